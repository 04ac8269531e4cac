# SPDX-License-Identifier: Apache-2.0
"""Keys and values land in the cache slots named for them, and nowhere else."""

import numpy as np
import pytest
import torch

from ddtree_vllm.attention import store_kv
from ddtree_vllm.attention.store_kv import store_kv_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_size", "num_heads", "head_dim"), [(16, 1, 64), (33, 3, 128)])
def test_tokens_land_in_their_slots(rng, device, dtype, block_size, num_heads, head_dim):
    num_blocks, num_tokens = 9, 150
    slots = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int64)
    slots[::7] = -1  # padding: not stored
    key, value = (
        torch.from_numpy(rng.standard_normal((num_tokens, num_heads, head_dim))).to(dtype)
        for _ in range(2)
    )
    # Heads outside positions, keys beside values, as vLLM lays its cache out.
    cache = torch.zeros(num_blocks, num_heads, block_size, 2 * head_dim, dtype=dtype)
    expected = cache.clone()
    store_kv_reference(
        key, value, *expected.transpose(1, 2).split(head_dim, dim=-1), torch.from_numpy(slots)
    )
    cache = cache.to(device)
    store_kv(
        key.to(device),
        value.to(device),
        *cache.transpose(1, 2).split(head_dim, dim=-1),
        torch.from_numpy(slots).to(device),
    )
    assert torch.equal(cache.cpu(), expected)


def test_keys_may_be_a_slice_of_a_wider_projection(rng, device):
    """q, k and v often come out of one matrix product; padding tokens follow the real ones."""
    qkv = torch.from_numpy(rng.standard_normal((8, 4, 64), dtype=np.float32)).to(device)
    cache = torch.zeros(2, 2, 16, 1, 64, device=device)
    slots = torch.tensor([3, 17, 18, 5], device=device)
    store_kv(qkv[:, 2:3], qkv[:, 3:4], cache[:, 0], cache[:, 1], slots)
    flat_keys, flat_values = cache[:, 0].reshape(32, 64), cache[:, 1].reshape(32, 64)
    assert torch.equal(flat_keys[slots], qkv[:4, 2])
    assert torch.equal(flat_values[slots], qkv[:4, 3])
    assert int((cache != 0).flatten(3).any(-1).sum()) == 8


def test_what_does_not_fit_is_refused(device):
    key = torch.zeros(4, 2, 64, device=device)
    cache = torch.zeros(2, 16, 2, 64, device=device)
    slots = torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="do not fit a cache"):
        store_kv(key.bfloat16(), key.bfloat16(), cache, cache, slots)
    with pytest.raises(ValueError, match="do not fit keys"):
        store_kv(key[:, :1], key[:, :1], cache, cache, slots)
    with pytest.raises(ValueError, match="5 or more"):
        store_kv(key, key, cache, cache, torch.zeros(5, dtype=torch.int64, device=device))
