# SPDX-License-Identifier: Apache-2.0
"""Writing this step's keys and values into a paged cache."""

import torch
import triton
import triton.language as tl

from ddtree_vllm.attention.tiles import interpreting


@triton.jit
def _store_kv_kernel(
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, D]
    key_cache_ptr,  # [blocks, BLOCK_SIZE, Hkv, D]
    value_cache_ptr,  # [blocks, BLOCK_SIZE, Hkv, D]
    slot_mapping_ptr,  # int64 [T]
    num_tokens,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_k_block,
    stride_k_position,
    stride_k_head,
    stride_v_block,
    stride_v_position,
    stride_v_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    head = (c // HEAD_DIM)[None, :]
    d = (c % HEAD_DIM)[None, :]
    mask = (slot >= 0)[:, None] & (c < NUM_HEADS * HEAD_DIM)[None, :]
    slot = tl.maximum(slot, 0)
    block = (slot // BLOCK_SIZE)[:, None]
    offset = (slot % BLOCK_SIZE)[:, None]
    token = token[:, None]
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + d, mask=mask)
    value = tl.load(
        value_ptr + token * stride_value_token + head * stride_value_head + d, mask=mask
    )
    k_to = block * stride_k_block + offset * stride_k_position + head * stride_k_head + d
    v_to = block * stride_v_block + offset * stride_v_position + head * stride_v_head + d
    tl.store(key_cache_ptr + k_to, key, mask=mask)
    tl.store(value_cache_ptr + v_to, value, mask=mask)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes token t's key and value to cache slot slot_mapping[t].

    Args:
        key, value: [>= T, Hkv, D], last dimension contiguous.
        key_cache, value_cache: [num_blocks, block_size, Hkv, D] views, key's dtype, any strides but
            the last, which is 1.
        slot_mapping: int64 [T], block * block_size + offset; negative: the token is skipped.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    num_tokens = slot_mapping.shape[0]
    if key.shape != value.shape or key.dim() != 3 or key.shape[0] < num_tokens:
        raise ValueError(
            f"key and value must be [{num_tokens} or more, Hkv, D]: "
            f"{tuple(key.shape)}, {tuple(value.shape)}."
        )
    if key_cache.shape != value_cache.shape or key_cache.shape[2:] != key.shape[1:]:
        raise ValueError(
            f"Caches {tuple(key_cache.shape)}, {tuple(value_cache.shape)} do not fit keys of "
            f"{tuple(key.shape[1:])}."
        )
    if len({key.dtype, value.dtype, key_cache.dtype, value_cache.dtype}) > 1:
        raise ValueError(f"Keys of {key.dtype} do not fit a cache of {key_cache.dtype}.")
    if any(t.stride(-1) != 1 for t in (key, value, key_cache, value_cache)):
        raise ValueError("The last dimension of every tensor must be contiguous.")
    if num_tokens == 0:
        return
    num_heads, head_dim = key.shape[1:]
    columns = triton.next_power_of_2(num_heads * head_dim)
    block_t, block_c = (128, columns) if interpreting() else (4, min(columns, 1024))
    _store_kv_kernel[(triton.cdiv(num_tokens, block_t), triton.cdiv(columns, block_c))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        num_tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_T=block_t,
        BLOCK_C=block_c,
    )


def store_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`store_kv`, one token after another."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[token]
            value_cache[slot // block_size, slot % block_size] = value[token]
