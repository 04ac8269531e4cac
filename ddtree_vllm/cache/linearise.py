# SPDX-License-Identifier: Apache-2.0
"""Moving the accepted path's hidden states to the front of the request's rows."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def _linearise_kernel(
    tensors,  # tuple of pointers, each [T, H]
    path_ptr,  # int32 [R, max_path]
    path_len_ptr,  # int32 [R]
    query_start_loc_ptr,  # int32 [R + 1]
    stride_path,
    stride_row,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    request = tl.program_id(0)
    which = tl.program_id(2)
    path_len = tl.load(path_len_ptr + request)
    if path_len <= 1:
        return
    first_token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    # path[j] >= j and grows with j: no run of path entries overwrites a source of a later one.
    for first in range(1, path_len, BLOCK_P):
        j = first + tl.arange(0, BLOCK_P)
        moves = j < path_len
        row = tl.load(path_ptr + request * stride_path + j, mask=moves, other=0)
        moves = moves & (row > j)
        mask = moves[:, None] & (c < NUM_COLUMNS)[None, :]
        source = ((first_token + row) * stride_row)[:, None] + c[None, :]
        target = ((first_token + j) * stride_row)[:, None] + c[None, :]
        for i in tl.static_range(len(tensors)):
            if which == i:
                x = tl.load(tensors[i] + source, mask=mask)
                # Threads hold different rows: all have to have read before any writes.
                tl.debug_barrier()
                tl.store(tensors[i] + target, x, mask=mask)


def linearise_rows(
    tensors: Sequence[torch.Tensor],
    path: torch.Tensor,
    path_len: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    """Copies row path[r, j] of each request to its row j, in place, in every tensor.

    One launch for all tensors of one dtype, width and row stride. Afterwards the first path_len[r]
    rows of the request are the accepted path in order; later ones are as they were.

    Args:
        tensors: each [>= T, H], last dimension contiguous, any dtype: the hidden states and the
            auxiliary hidden states of a step.
        path: int32 [R, max_path], local rows of the accepted path, ascending, path[r, 0] = 0.
        path_len: int32 [R]; 0 or 1 moves nothing.
        query_start_loc: int32 [>= R + 1], first row of each request.

    Raises:
        ValueError: a tensor that is not two-dimensional, or whose rows are not contiguous.
    """
    num_requests = path_len.shape[0]
    groups: dict[tuple, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.dim() != 2 or tensor.stride(1) != 1:
            raise ValueError(f"Expected rows of hidden states, not {tuple(tensor.shape)}.")
        groups.setdefault((tensor.dtype, tensor.shape[1], tensor.stride(0)), []).append(tensor)
    if num_requests == 0:
        return
    for (_, width, stride), members in groups.items():
        block_c = triton.next_power_of_2(width)
        if not triton.knobs.runtime.interpret:
            block_c = min(block_c, 512)
        _linearise_kernel[(num_requests, triton.cdiv(width, block_c), len(members))](
            tuple(members),
            path,
            path_len,
            query_start_loc,
            path.stride(0),
            stride,
            NUM_COLUMNS=width,
            BLOCK_P=16,
            BLOCK_C=block_c,
        )


def linearise_rows_reference(
    tensors: Sequence[torch.Tensor],
    path: torch.Tensor,
    path_len: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    """`linearise_rows`, one row after another."""
    for request, length in enumerate(path_len.tolist()):
        first = int(query_start_loc[request])
        for j in range(1, length):
            for tensor in tensors:
                tensor[first + j] = tensor[first + int(path[request, j])].clone()
