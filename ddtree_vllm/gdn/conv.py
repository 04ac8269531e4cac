# SPDX-License-Identifier: Apache-2.0
"""The short causal convolution before Gated DeltaNet: over a tree, and over ordinary sequences.

Row i sees the W - 1 inputs before it and itself, then SiLU. In a tree "before" is along the path:
its parent, the parent's parent, and past the root the window that the committed sequence left. Both
kernels add the taps in the same order, oldest first, so that a chain gives the same bits as a
sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ddtree_vllm.gdn.launch import interpreting, overlapping
from ddtree_vllm.gdn.rows import TreeRows
from ddtree_vllm.gdn.stash import Stash

if TYPE_CHECKING:
    from ddtree_vllm.tree import DraftTree

MAX_WIDTH = 4


def lay_out_by_taps(weight: torch.nn.Parameter) -> None:
    """Keeps the shape ``[C, 1, W]`` of a weight and makes its channels contiguous.

    So a thread reads a tap of eight channels at once. What is loaded later is copied into it.
    """
    weight.data = weight.data.transpose(0, 2).contiguous().transpose(0, 2)


def tree_causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    rows: TreeRows,
    tree: DraftTree,
    out: torch.Tensor,
    stash: Stash,
    layer: int,
) -> None:
    """Convolves the tree rows of a step and stashes their raw inputs.

    Reads the window of each request and does not move it: the commit does, along the accepted path.
    Rows of other requests keep what `out` holds.

    Args:
        x: [T, C], raw rows of the step, channels contiguous, any row stride.
        weight: [C, W], oldest tap first, W in 2..4.
        bias: [C] or None.
        conv_state: [slots, >= W - 1, C], oldest input first, channels contiguous.
        rows: the tree requests.
        tree: their trees (`parents` is read).
        out: [T, C], written for tree rows.
        stash: `conv[layer]` is written.
    """
    if rows.num_reqs == 0 or rows.max_num_rows == 0:
        return
    num_channels, width = _check(x, weight, conv_state, out)
    block_rows, block_channels, num_warps = _tree_tiles(rows.max_num_rows, num_channels)
    raw = stash.conv[layer]
    grid = (
        triton.cdiv(num_channels, block_channels),
        triton.cdiv(rows.max_num_rows, block_rows),
        rows.num_reqs,
    )
    _tree_conv_kernel[grid](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        weight.stride(1),
        bias,
        conv_state,
        conv_state.stride(0),
        conv_state.stride(1),
        out,
        out.stride(0),
        raw,
        raw.stride(0),
        rows.slots,
        rows.state_slots,
        rows.row_start,
        rows.num_rows,
        rows.stash_start,
        rows.null_slot,
        tree.parents,
        tree.parents.stride(0),
        NUM_CHANNELS=num_channels,
        WIDTH=width,
        HAS_BIAS=bias is not None,
        SAME_TYPE=x.dtype == conv_state.dtype,
        BLOCK_ROWS=block_rows,
        BLOCK_CHANNELS=block_channels,
        OVERLAP=overlapping(),
        num_warps=num_warps,
    )


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state_slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    out: torch.Tensor,
    max_query_len: int,
    null_slot: int = -1,
) -> None:
    """Convolves consecutive rows, from and to the window in the cache.

    Args:
        x: [T, C], raw rows, channels contiguous.
        weight, bias, conv_state, out: as in `tree_causal_conv`; the window of every sequence moves
            to its last W - 1 inputs.
        state_slots: int32 or int64 [R]; a sequence whose slot is not above `null_slot` is skipped.
        query_start_loc: int32 [R + 1], rows of sequence r are query_start_loc[r] up to [r + 1].
        has_initial_state: bool [R], False starts from zeros; None: all have one.
        max_query_len: the most rows of a sequence; known on the host.
    """
    num_reqs = state_slots.shape[0]
    if num_reqs == 0 or max_query_len == 0:
        return
    num_channels, width = _check(x, weight, conv_state, out)
    block_rows, block_channels = _sequence_tiles(max_query_len, num_channels)
    grid = (
        triton.cdiv(num_channels, block_channels),
        triton.cdiv(max_query_len, block_rows),
        num_reqs,
    )
    _causal_conv_kernel[grid](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        weight.stride(1),
        bias,
        conv_state,
        conv_state.stride(0),
        conv_state.stride(1),
        out,
        out.stride(0),
        state_slots,
        query_start_loc,
        has_initial_state,
        null_slot,
        NUM_CHANNELS=num_channels,
        WIDTH=width,
        HAS_BIAS=bias is not None,
        HAS_INITIAL=has_initial_state is not None,
        SAME_TYPE=x.dtype == conv_state.dtype,
        BLOCK_ROWS=block_rows,
        BLOCK_CHANNELS=block_channels,
        num_warps=4,
    )


def _check(
    x: torch.Tensor, weight: torch.Tensor, conv_state: torch.Tensor, out: torch.Tensor
) -> tuple[int, int]:
    num_channels, width = weight.shape
    if not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"the convolution must be 2 to {MAX_WIDTH} taps wide, not {width}")
    for name, tensor in (("x", x), ("conv_state", conv_state), ("out", out)):
        if tensor.shape[-1] != num_channels or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must have {num_channels} contiguous channels in its last dimension, "
                f"not shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if conv_state.shape[1] < width - 1:
        raise ValueError(f"conv_state keeps {conv_state.shape[1]} inputs a slot, needs {width - 1}")
    return num_channels, width


def _tree_tiles(max_rows: int, num_channels: int) -> tuple[int, int, int]:
    """Rows and channels of a program that convolves a tree, and its warps."""
    if interpreting():
        return *_sequence_tiles(max_rows, num_channels), 4
    # Fastest of a sweep on an H200 (docs/benchmarks): a thread has eight channels of two rows, and
    # so many programs hide that each reads what it needs one after the other.
    return 2, min(512, triton.next_power_of_2(num_channels)), 2


def _sequence_tiles(max_rows: int, num_channels: int) -> tuple[int, int]:
    """Rows and channels of a program that convolves a sequence.

    All rows, or at least `MAX_WIDTH` - 1: the first program alone may look into the window, which it
    moves.
    """
    if interpreting():
        return (
            min(128, triton.next_power_of_2(max_rows)),
            min(4096, triton.next_power_of_2(num_channels)),
        )
    return 16, min(128, triton.next_power_of_2(num_channels))


@triton.jit
def _tree_conv_kernel(
    x_ptr,  # [T, C]
    x_stride,
    weight_ptr,  # [C, W]
    weight_stride_c,
    weight_stride_w,
    bias_ptr,  # [C]
    window_ptr,  # [slots, >= W - 1, C]
    window_stride_slot,
    window_stride_w,
    out_ptr,  # [T, C]
    out_stride,
    raw_ptr,  # [max_rows, C]
    raw_stride,
    slots_ptr,  # [R]
    state_slots_ptr,  # [R]
    row_start_ptr,  # [R]
    num_rows_ptr,  # [R]
    stash_start_ptr,  # [R]
    null_slot,
    parents_ptr,  # [S, N + 1]
    parents_stride,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAME_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        # Verification comes next; it waits for the end of this before it reads anything.
        tl.extra.cuda.gdc_launch_dependents()
    req = tl.program_id(2)
    slot = tl.load(slots_ptr + req).to(tl.int64)
    state_slot = tl.load(state_slots_ptr + req).to(tl.int64)
    num_rows = tl.load(num_rows_ptr + req)
    first = tl.program_id(1).to(tl.int64) * BLOCK_ROWS
    if (slot < 0) | (state_slot <= null_slot) | (first >= num_rows):
        return

    local = first + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(0).to(tl.int64) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = local < num_rows
    # A row of a matrix, so that a thread reads the weights of its own channels.
    channel = channel[None, :]
    inside = channel
    mask = valid[:, None]
    if NUM_CHANNELS % BLOCK_CHANNELS != 0:
        # Channels past the end read the last one and are masked when stored.
        mask = mask & (channel < NUM_CHANNELS)
        inside = tl.minimum(channel, NUM_CHANNELS - 1)
    weight = weight_ptr + inside * weight_stride_c
    row_start = tl.load(row_start_ptr + req).to(tl.int64)
    row = row_start + local

    stash_row = tl.load(stash_start_ptr + req).to(tl.int64) + local

    # Ancestors at distance 1, 2 and 3 by local row; past the root -1, -2, -3: the window's last row
    # and those before it.
    parents = parents_ptr + slot * parents_stride
    up1 = tl.load(parents + local, mask=valid, other=-1).to(tl.int64)
    up2 = tl.where(up1 >= 0, tl.load(parents + up1, mask=up1 >= 0, other=0).to(tl.int64), up1 - 1)
    up3 = tl.where(up2 >= 0, tl.load(parents + up2, mask=up2 >= 0, other=0).to(tl.int64), up2 - 1)

    own = tl.load(x_ptr + (row * x_stride)[:, None] + channel, mask=mask, other=0.0)
    tl.store(raw_ptr + (stash_row * raw_stride)[:, None] + channel, own, mask=mask)
    x_request = x_ptr + row_start * x_stride
    window_end = window_ptr + (state_slot * window_stride_slot + (WIDTH - 1) * window_stride_w)
    for tap in tl.static_range(WIDTH - 1):
        if WIDTH - 1 - tap == 3:
            up = up3
        elif WIDTH - 1 - tap == 2:
            up = up2
        else:
            up = up1
        in_rows = up >= 0
        x_at = x_request + up * x_stride
        window_at = window_end + up * window_stride_w
        if SAME_TYPE:
            at = tl.where(in_rows, x_at, window_at)
            value = tl.load(at[:, None] + channel, mask=mask, other=0.0).to(tl.float32)
        else:
            from_rows = mask & in_rows[:, None]
            from_window = mask & (up < 0)[:, None]
            value = tl.load(x_at[:, None] + channel, mask=from_rows, other=0.0).to(tl.float32)
            before = tl.load(window_at[:, None] + channel, mask=from_window, other=0.0)
            value += before.to(tl.float32)
        w = tl.load(weight + tap * weight_stride_w).to(tl.float32)
        if tap == 0:
            acc = value * w
            if HAS_BIAS:
                acc += tl.load(bias_ptr + inside).to(tl.float32)
        else:
            acc += value * w
    w = tl.load(weight + (WIDTH - 1) * weight_stride_w).to(tl.float32)
    acc += own.to(tl.float32) * w
    acc = acc / (1.0 + tl.exp(-acc))
    out = out_ptr + (row * out_stride)[:, None] + channel
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _causal_conv_kernel(
    x_ptr,  # [T, C]
    x_stride,
    weight_ptr,  # [C, W]
    weight_stride_c,
    weight_stride_w,
    bias_ptr,  # [C]
    window_ptr,  # [slots, >= W - 1, C]
    window_stride_slot,
    window_stride_w,
    out_ptr,  # [T, C]
    out_stride,
    state_slots_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    has_initial_ptr,  # [R]
    null_slot,
    NUM_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SAME_TYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
):
    req = tl.program_id(2)
    state_slot = tl.load(state_slots_ptr + req).to(tl.int64)
    row_start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    num_rows = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - row_start
    first = tl.program_id(1).to(tl.int64) * BLOCK_ROWS
    if (state_slot <= null_slot) | (first >= num_rows):
        return

    local = first + tl.arange(0, BLOCK_ROWS)
    channel = tl.program_id(0).to(tl.int64) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    valid = local < num_rows
    in_channels = channel < NUM_CHANNELS
    # Channels past the end read the last one and are masked when stored.
    inside = tl.minimum(channel, NUM_CHANNELS - 1)
    weight = weight_ptr + inside * weight_stride_c
    channel = channel[None, :]
    mask = valid[:, None]
    if NUM_CHANNELS % BLOCK_CHANNELS != 0:
        mask = mask & in_channels[None, :]
    # Before the first row is the window, or zeros where the sequence starts here.
    has_window = num_rows > 0
    if HAS_INITIAL:
        has_window = tl.load(has_initial_ptr + req) != 0

    x_request = x_ptr + row_start * x_stride
    window = window_ptr + state_slot * window_stride_slot
    window_end = window + (WIDTH - 1) * window_stride_w
    for tap in tl.static_range(WIDTH):
        source = local - (WIDTH - 1 - tap)
        in_rows = source >= 0
        x_at = x_request + source * x_stride
        known = mask & (in_rows | has_window)[:, None]
        if SAME_TYPE:
            at = tl.where(in_rows, x_at, window_end + source * window_stride_w)
            value = tl.load(at[:, None] + channel, mask=known, other=0.0).to(tl.float32)
        else:
            from_rows = known & in_rows[:, None]
            from_window = known & (source < 0)[:, None]
            value = tl.load(x_at[:, None] + channel, mask=from_rows, other=0.0).to(tl.float32)
            window_at = window_end + source * window_stride_w
            before = tl.load(window_at[:, None] + channel, mask=from_window, other=0.0)
            value += before.to(tl.float32)
        w = tl.load(weight + tap * weight_stride_w).to(tl.float32)
        if tap == 0:
            acc = value * w[None, :]
            if HAS_BIAS:
                acc += tl.load(bias_ptr + inside).to(tl.float32)[None, :]
        else:
            acc += value * w[None, :]
    acc = acc / (1.0 + tl.exp(-acc))
    out = out_ptr + ((row_start + local) * out_stride)[:, None] + channel
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)

    # Only rows of the first tile look into the window, so its program alone moves it.
    if first == 0:
        j = tl.arange(0, 4).to(tl.int64)
        kept = (j < WIDTH - 1)[:, None] & in_channels[None, :]
        newest = num_rows + j - (WIDTH - 1)
        from_x = (newest >= 0)[:, None]
        fresh_at = x_request + (newest * x_stride)[:, None] + channel
        fresh = tl.load(fresh_at, mask=kept & from_x, other=0.0).to(window_ptr.dtype.element_ty)
        stale_at = window_end + (newest * window_stride_w)[:, None] + channel
        stale = tl.load(stale_at, mask=kept & (newest < 0)[:, None] & has_window, other=0.0)
        moved = tl.where(from_x, fresh, stale)
        # A row of the window moves up into another one: all reads before the first write.
        tl.debug_barrier()
        tl.store(window + (j * window_stride_w)[:, None] + channel, moved, mask=kept)
