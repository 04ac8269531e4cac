# SPDX-License-Identifier: Apache-2.0
"""One product for the layer's input, of vLLM's own linear layers, which are loaded as ever."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from ddtree_vllm.gdn.layer import TreeGatedDeltaNetAttention
from ddtree_vllm.gdn.projection import COLUMNS, share_weight

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


def test_vllms_operator_is_given_what_its_own_layer_gives_it(parts):
    """The real operator, which is declared to write `a`: that must not be a part of the product."""
    given = {}

    def core(mixed_qkv, b, a, core_attn_out):
        given.update(mixed_qkv=mixed_qkv, b=b, a=a)
        core_attn_out.fill_(7)

    made = layer(parts, share_weight(parts))
    made.prefix, made.head_v_dim = "layer", V
    made._project = lambda x: TreeGatedDeltaNetAttention._project(made, x)
    made._forward_core = core
    made._output_projection = lambda out, z: (out, z)
    context = SimpleNamespace(no_compile_layers={"layer": made})
    x = torch.randn(5, HIDDEN, device=parts[0].weight.device)
    with override_forward_context(context):
        out, z = TreeGatedDeltaNetAttention.forward_cuda(made, x)

    q, k, v, weight_z = parts[0].weight.split([KEY, KEY, VALUE, VALUE])
    weight_b, weight_a = parts[1].weight.split([HV, HV])
    expected = {"mixed_qkv": torch.cat([q, k, v]), "b": weight_b, "a": weight_a}
    for name, weight in expected.items():
        torch.testing.assert_close(given[name], x @ weight.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z.flatten(1), x @ weight_z.T, rtol=1e-5, atol=1e-5)
    assert out.shape == (5, HV, V)
    assert (out == 7).all()
    written = {t.untyped_storage().data_ptr() for t in (given["a"], out)}
    read = {t.untyped_storage().data_ptr() for t in (given["mixed_qkv"], given["b"], z)}
    assert not written & read
    assert given["a"].is_contiguous()
    assert given["b"].is_contiguous()
