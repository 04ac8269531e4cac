# SPDX-License-Identifier: Apache-2.0
"""One product for the layer's input, of vLLM's own linear layers, which are loaded as ever."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from ddtree_vllm.attention.metadata import TREE_ATTRIBUTE
from ddtree_vllm.gdn.conv import lay_out_by_taps
from ddtree_vllm.gdn.layer import TreeGatedDeltaNetAttention
from ddtree_vllm.gdn.operator import split_graphs_at_operator
from ddtree_vllm.gdn.projection import COLUMNS, share_weight

VLLMS = "vllm::qwen_gdn_attention_core"
HIDDEN, HK, HV, K, V = 48, 2, 6, 8, 8
KEY, VALUE = HK * K, HV * V


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """vLLM's layers ask for their rank."""
    rendezvous = f"file://{tmp_path_factory.mktemp('ranks')}/one"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, rendezvous, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
        cleanup_dist_env_and_memory()


@pytest.fixture
def parts(one_rank, device):
    """The two layers as vLLM makes them, on one rank."""

    def linear(sizes):
        return MergedColumnParallelLinear(HIDDEN, sizes, bias=False)

    made = linear([KEY, KEY, VALUE, VALUE]), linear([HV, HV])
    for part in made:
        part.to(device)
        torch.nn.init.normal_(part.weight)
    return made


def layer(parts, in_proj):
    """What the layer's projection reads of it."""
    return SimpleNamespace(
        in_proj_qkvz=parts[0],
        in_proj_ba=parts[1],
        in_proj=in_proj,
        key_dim=KEY,
        value_dim=VALUE,
        num_v_heads=HV,
        tp_size=1,
        split_ba=lambda ba: ba.chunk(2, dim=-1),
    )


def project(parts, in_proj, x):
    return TreeGatedDeltaNetAttention._project(layer(parts, in_proj), x)


def test_one_product_gives_what_the_two_give(parts):
    x = torch.randn(9, HIDDEN, device=parts[0].weight.device)
    merged = project(parts, share_weight(parts), x)
    for part in parts:
        part.quant_method.process_weights_after_loading(part)
    apart = project(parts, None, x)
    for one, other in zip(merged, apart, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_weights_loaded_afterwards_are_those_of_the_product(parts):
    """As a checkpoint is read, and as weights are loaded anew by a running server."""
    shared = share_weight(parts)
    z, a = (torch.randn(rows, HIDDEN, device=shared.device) for rows in (VALUE, HV))
    parts[0].weight.weight_loader(parts[0].weight, z, 3)
    parts[1].weight.weight_loader(parts[1].weight, a, 1)
    x = torch.randn(5, HIDDEN, device=parts[0].weight.device)
    _, got_z, _, got_a = project(parts, shared, x)
    torch.testing.assert_close(got_z, x @ z.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_a, x @ a.T, rtol=1e-5, atol=1e-5)


def test_weights_are_kept_once_and_rows_of_the_product_are_aligned(parts):
    shared = share_weight(parts)
    assert shared.shape == (192, HIDDEN)
    assert shared.shape[0] % COLUMNS == 0
    storage = shared.untyped_storage().data_ptr()
    assert [p.weight.untyped_storage().data_ptr() for p in parts] == [storage, storage]
    used = sum(p.weight.shape[0] for p in parts)
    assert not shared[used:].any()


def test_a_quantised_layer_is_left_as_it_is(parts):
    parts[0].quant_method = object()
    before = [p.weight.data_ptr() for p in parts]
    assert share_weight(parts) is None
    assert [p.weight.data_ptr() for p in parts] == before


@pytest.fixture
def served(parts, monkeypatch):
    """A layer that goes through the real operator, and what its core was given."""
    given = {}
    monkeypatch.setattr(
        torch, "empty_like", lambda *a, **k: torch.zeros_like(*a, **k).fill_(torch.nan)
    )
    made = layer(parts, share_weight(parts))
    made.prefix, made.head_v_dim = "layer", V
    made._project = lambda x: TreeGatedDeltaNetAttention._project(made, x)
    made.run_core = lambda *tensors: TreeGatedDeltaNetAttention.run_core(made, *tensors)
    made._output_projection = lambda out, z: (out, z)

    def core(mixed_qkv, b, a, out, step=None, rows_per_request=0):
        given.update(mixed_qkv=mixed_qkv, b=b, a=a, step=step, nothing_yet=not out.any())
        given["rows_per_request"] = rows_per_request
        out.fill_(7)

    made._forward_core = made._verify_trees = core

    def run(step=None):
        made._metadata = lambda: SimpleNamespace(**{TREE_ATTRIBUTE: step})
        context = SimpleNamespace(no_compile_layers={"layer": made})
        x = torch.randn(6, HIDDEN, device=parts[0].weight.device)
        with override_forward_context(context):
            out, z = TreeGatedDeltaNetAttention.forward_cuda(made, x)
        q, k, v, weight_z = parts[0].weight.split([KEY, KEY, VALUE, VALUE])
        weight_b, weight_a = parts[1].weight.split([HV, HV])
        expected = {"mixed_qkv": torch.cat([q, k, v]), "b": weight_b, "a": weight_a}
        for name, weight in expected.items():
            torch.testing.assert_close(given[name], x @ weight.T, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(z.flatten(1), x @ weight_z.T, rtol=1e-5, atol=1e-5)
        assert out.shape == (6, HV, V)
        assert (out == 7).all()
        return given | {"out": out}

    return run


def test_vllms_kernels_get_contiguous_gates_and_an_output_of_zeros(served):
    given = served()
    assert given["step"] is None
    assert given["nothing_yet"]
    assert given["a"].is_contiguous()
    assert given["b"].is_contiguous()


def test_a_step_of_equal_trees_reads_the_product_where_it_is(served):
    """Nothing is copied and nothing zeroed: the kernels write every row."""
    step = SimpleNamespace(num_reqs=2, rows_per_request=3)
    given = served(step)
    assert given["step"] is step
    assert given["rows_per_request"] == 3
    product = {given[name].untyped_storage().data_ptr() for name in ("mixed_qkv", "b", "a")}
    assert len(product) == 1
    assert given["out"].untyped_storage().data_ptr() not in product


@pytest.mark.parametrize(("num_reqs", "rows"), [(2, 0), (1, 3), (3, 3)])
def test_a_step_of_other_rows_is_served_as_any_batch(served, num_reqs, rows):
    given = served(SimpleNamespace(num_reqs=num_reqs, rows_per_request=rows))
    assert given["step"] is None
    assert given["nothing_yet"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["vllm::a", VLLMS], ["vllm::a", VLLMS, "ddtree::gated_delta_net"]),
        ([VLLMS, "ddtree::gated_delta_net"], [VLLMS, "ddtree::gated_delta_net"]),
        (["vllm::a"], ["vllm::a"]),
        ([], []),
        (None, None),
    ],
)
def test_graphs_break_at_the_operator_where_they_would_at_vllms(given, wanted):
    config = SimpleNamespace(splitting_ops=given)
    split_graphs_at_operator(config)
    assert config.splitting_ops == wanted
    assert VLLMS in CompilationConfig._attention_ops


def test_a_weight_by_taps_keeps_its_shape_and_takes_what_is_loaded(device):
    weight = torch.nn.Parameter(torch.randn(10, 1, 4, device=device), requires_grad=False)
    before = weight.data.clone()
    lay_out_by_taps(weight)
    assert weight.stride()[0] == 1
    assert torch.equal(weight.data, before)
    # As vLLM's loader does, and as its kernels then see it.
    weight.data[3:7] = 2.5
    seen = weight.view(10, 4)
    assert (seen[3:7] == 2.5).all()
    assert torch.equal(seen[:3], before[:3, 0])
