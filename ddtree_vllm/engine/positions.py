# SPDX-License-Identifier: Apache-2.0
"""RoPE and sampling positions of tree rows: root + depth instead of the row's place in the batch.

Rows of a tree keep linear positions for their KV slots, since two nodes of one depth must not share
a slot. What the model and the sampler see is the position the node's token would have in the text.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def to_depth_positions(
    positions: torch.Tensor,
    depths: torch.Tensor,
    slots: torch.Tensor,
    row_start: torch.Tensor,
    num_rows: torch.Tensor,
    num_reqs: int,
) -> None:
    """Turn linear row positions into root + depth, in place.

    Args:
        positions: int64 ``[channels, >= num_tokens]`` or ``[>= num_tokens]``; row ``i`` of a tree
            request holds root + ``i`` on entry and root + depth on return, in every channel.
        depths: int32 ``[num_slots, N + 1]``, depth of each local row, root 0.
        slots, row_start, num_rows: int32 ``[num_reqs]``; a request with slot -1 is left alone.
    """
    if num_reqs == 0:
        return
    channels = positions.shape[0] if positions.dim() == 2 else 1
    stride = positions.stride(0) if positions.dim() == 2 else 0
    _depth_positions_kernel[(num_reqs, channels)](
        positions,
        stride,
        depths,
        depths.stride(0),
        slots,
        row_start,
        num_rows,
        BLOCK=triton.next_power_of_2(depths.shape[1]),
        num_warps=1,
    )


def depth_positions_reference(
    positions: torch.Tensor,
    depths: torch.Tensor,
    slots: torch.Tensor,
    row_start: torch.Tensor,
    num_rows: torch.Tensor,
) -> torch.Tensor:
    """Plain PyTorch form of ``to_depth_positions``; returns a new tensor."""
    out = positions.clone()
    for r in range(slots.shape[0]):
        slot, start, rows = int(slots[r]), int(row_start[r]), int(num_rows[r])
        if slot < 0:
            continue
        for i in range(rows):
            out[..., start + i] += int(depths[slot, i]) - i
    return out


@triton.jit
def _depth_positions_kernel(
    positions_ptr,
    positions_stride,
    depths_ptr,
    depths_stride,
    slots_ptr,
    row_start_ptr,
    num_rows_ptr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    channel = tl.program_id(1)
    slot = tl.load(slots_ptr + req)
    start = tl.load(row_start_ptr + req)
    rows = tl.load(num_rows_ptr + req)
    row = tl.arange(0, BLOCK)
    mask = (row < rows) & (slot >= 0)
    depth = tl.load(depths_ptr + slot * depths_stride + row, mask=mask, other=0)
    ptr = positions_ptr + channel * positions_stride + start + row
    linear = tl.load(ptr, mask=mask, other=0)
    tl.store(ptr, linear + (depth - row).to(tl.int64), mask=mask)
