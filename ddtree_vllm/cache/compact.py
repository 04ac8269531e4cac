# SPDX-License-Identifier: Apache-2.0
"""Moving the accepted path's keys and values to the front of the step's cache slots."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Rows are moved as raw words, as wide as every stride and address allows.
_WORDS = {
    4: (torch.int32, tl.int32),
    2: (torch.int16, tl.int16),
    1: (torch.int8, tl.int8),
}


@dataclass(frozen=True)
class KVCacheTable:
    """The key and value caches of all attention layers that share one slot mapping.

    Holds the views so that the addresses stay valid. Build it once, when the caches are bound.
    """

    views: tuple[torch.Tensor, ...]
    addresses: torch.Tensor  # int64 [2 * layers], on the caches' device
    word_bytes: int
    strides: tuple[int, int, int]  # of block, position, head; in words
    block_size: int
    num_heads: int
    head_words: int
    aligned: bool  # every row starts at a multiple of 16 bytes

    @classmethod
    def build(cls, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> "KVCacheTable":
        """From each layer's (key_cache, value_cache), [num_blocks, block_size, Hkv, D] views.

        Raises:
            ValueError: no layers, or views that differ in shape, strides, dtype or device.
        """
        views = tuple(view for layer in layers for view in layer)
        if not views:
            raise ValueError("There are no attention layers to compact.")
        first = views[0]
        if first.dim() != 4 or first.stride(3) != 1:
            raise ValueError("Caches must be [num_blocks, block_size, Hkv, D], rows contiguous.")
        for view in views:
            if (view.shape, view.stride(), view.dtype, view.device) != (
                first.shape,
                first.stride(),
                first.dtype,
                first.device,
            ):
                raise ValueError(
                    "Caches of one table must agree in shape, strides, dtype and device: "
                    f"{tuple(view.shape)} {view.stride()} {view.dtype} {view.device}, "
                    f"{tuple(first.shape)} {first.stride()} {first.dtype} {first.device}."
                )
        size = first.element_size()
        _, block_size, num_heads, head_dim = first.shape
        in_bytes = [view.data_ptr() for view in views] + [size * s for s in first.stride()[:3]]
        word_bytes = max(w for w in _WORDS if all(b % w == 0 for b in [*in_bytes, head_dim * size]))
        block, position, head = (size * s // word_bytes for s in first.stride()[:3])
        return cls(
            views=views,
            addresses=torch.tensor([view.data_ptr() for view in views], dtype=torch.int64).to(
                first.device
            ),
            word_bytes=word_bytes,
            strides=(block, position, head),
            block_size=block_size,
            num_heads=num_heads,
            head_words=head_dim * size // word_bytes,
            aligned=all(b % 16 == 0 for b in in_bytes),
        )


@triton.jit
def _compact_kernel(
    addresses_ptr,  # int64 [caches]
    path_ptr,  # int32 [R, max_path]
    path_len_ptr,  # int32 [R]
    query_start_loc_ptr,  # int32 [R + 1]
    slot_mapping_ptr,  # int64 [T]
    stride_path,
    stride_block,
    stride_position,
    stride_head,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    request = tl.program_id(1)
    path_len = tl.load(path_len_ptr + request)
    if path_len <= 1:
        return
    first_token = tl.load(query_start_loc_ptr + request)
    cache_ptr = tl.load(addresses_ptr + tl.program_id(0)).to(tl.pointer_type(WORD))
    if ALIGNED:
        cache_ptr = tl.multiple_of(cache_ptr, 16)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = (c // HEAD_WORDS) * stride_head + c % HEAD_WORDS
    column_exists = c < NUM_HEADS * HEAD_WORDS
    # path[j] >= j and grows with j: a source lies at or after its destination, so a run of path
    # entries can be read whole, then written, without harm to the sources of later runs.
    for first in range(1, path_len, BLOCK_P):
        j = first + tl.arange(0, BLOCK_P)
        moves = j < path_len
        row = tl.load(path_ptr + request * stride_path + j, mask=moves, other=0)
        moves = moves & (row > j)
        source = tl.load(slot_mapping_ptr + first_token + row, mask=moves, other=-1)
        target = tl.load(slot_mapping_ptr + first_token + j, mask=moves, other=-1)
        moves = moves & (source >= 0) & (target >= 0)
        source = tl.maximum(source, 0)
        target = tl.maximum(target, 0)
        source = (source // BLOCK_SIZE) * stride_block + (source % BLOCK_SIZE) * stride_position
        target = (target // BLOCK_SIZE) * stride_block + (target % BLOCK_SIZE) * stride_position
        mask = moves[:, None] & column_exists[None, :]
        words = tl.load(cache_ptr + source[:, None] + column[None, :], mask=mask)
        # Threads hold different rows: all have to have read before any writes.
        tl.debug_barrier()
        tl.store(cache_ptr + target[:, None] + column[None, :], words, mask=mask)


def compact_accepted_kv(
    caches: KVCacheTable,
    path: torch.Tensor,
    path_len: torch.Tensor,
    query_start_loc: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copies the keys and values of row path[r, j] to the cache slot of row j, for every layer.

    One launch. Afterwards the first path_len[r] slots of the request's rows hold the accepted path
    in order; later ones hold what they held. Nothing is written for a path of 0 or 1 rows.

    Args:
        caches: of all layers.
        path: int32 [R, max_path], local rows of the accepted path, ascending, path[r, 0] = 0.
        path_len: int32 [R].
        query_start_loc: int32 [>= R + 1], first token of each request.
        slot_mapping: int64 [T], cache slot of each token of this step; a row whose slot or whose
            source's slot is negative is left out.
    """
    num_requests = path_len.shape[0]
    if num_requests == 0:
        return
    columns = caches.num_heads * caches.head_words
    block_c = triton.next_power_of_2(columns)
    if not triton.knobs.runtime.interpret:
        block_c = min(block_c, 256)
    _compact_kernel[(caches.addresses.shape[0], num_requests, triton.cdiv(columns, block_c))](
        caches.addresses,
        path,
        path_len,
        query_start_loc,
        slot_mapping,
        path.stride(0),
        *caches.strides,
        WORD=_WORDS[caches.word_bytes][1],
        ALIGNED=caches.aligned,
        NUM_HEADS=caches.num_heads,
        HEAD_WORDS=caches.head_words,
        BLOCK_SIZE=caches.block_size,
        BLOCK_P=16,
        BLOCK_C=block_c,
    )


def compact_accepted_kv_reference(
    views: Sequence[torch.Tensor],
    path: torch.Tensor,
    path_len: torch.Tensor,
    query_start_loc: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`compact_accepted_kv`, one row after another; `views` are all key and value caches."""
    block_size = views[0].shape[1]
    for request, length in enumerate(path_len.tolist()):
        first = int(query_start_loc[request])
        for j in range(1, length):
            source = int(slot_mapping[first + int(path[request, j])])
            target = int(slot_mapping[first + j])
            if source < 0 or target < 0:
                continue
            for view in views:
                view[target // block_size, target % block_size] = view[
                    source // block_size, source % block_size
                ].clone()
