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
def parts(one_rank):
    """The two layers as vLLM makes them, on one rank."""

    def linear(sizes):
        return MergedColumnParallelLinear(HIDDEN, sizes, bias=False)

    made = linear([KEY, KEY, VALUE, VALUE]), linear([HV, HV])
    for part in made:
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
    x = torch.randn(9, HIDDEN)
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
    z, a = torch.randn(VALUE, HIDDEN), torch.randn(HV, HIDDEN)
    parts[0].weight.weight_loader(parts[0].weight, z, 3)
    parts[1].weight.weight_loader(parts[1].weight, a, 1)
    x = torch.randn(5, HIDDEN)
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
