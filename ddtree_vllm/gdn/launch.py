# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the Gated DeltaNet kernels: one place that knows what they run on."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

MIN_ROWS = 16
"""`tl.dot` needs 16 rows, so that is the smallest row tile."""
MAX_ROWS = 128
"""Rows of a tree request: a root and at most 127 nodes. Two tiles of 64."""
ROW_TILE = 64

# A launch with fewer programs than this leaves multiprocessors of an H100 or H200 (132) idle, so
# the value dimension is split further.
_FULL_DEVICE = 132


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels: a few large programs are then the fastest."""
    return bool(triton.knobs.runtime.interpret)


def default_precision() -> str:
    """How `tl.dot` multiplies two float32 factors.

    On a GPU "tf32x3": three tensor-core products that together are as exact as float32. "ieee" runs
    on the ordinary cores and is unrolled, which takes minutes to compile at these tile sizes. Plain
    "tf32" is not enough for the solve. The interpreter multiplies in float32 whatever is asked.
    """
    return "ieee" if interpreting() else "tf32x3"


class RowTiles(NamedTuple):
    """How up to `MAX_ROWS` rows are tiled: one tile of `rows`, or two."""

    rows: int
    two: bool


def row_tiles(max_num_rows: int) -> RowTiles:
    """Tiles for requests of at most `max_num_rows` rows.

    Raises:
        ValueError: more than 128 rows.
    """
    if max_num_rows > MAX_ROWS:
        raise ValueError(
            f"a tree request has at most {MAX_ROWS} rows (a root and {MAX_ROWS - 1} nodes), "
            f"not {max_num_rows}"
        )
    if max_num_rows > ROW_TILE:
        return RowTiles(ROW_TILE, True)
    return RowTiles(max(MIN_ROWS, triton.next_power_of_2(max_num_rows)), False)


def solve_group(max_depth: int) -> int:
    """log2 of the depth levels that `solve_unit_lower` inverts as one group.

    Eight groups cover the depths 0..max_depth, so that at most seven rounds of substitution follow.
    """
    return max(0, max_depth.bit_length() - 3)


class ValueSplit(NamedTuple):
    """How a request's value heads and their value dimension spread over programs.

    Attributes:
        block_v: value columns of a program.
        heads: value heads of a program, stacked.
        num_warps: warps of a program.
    """

    block_v: int
    heads: int
    num_warps: int


def value_split(num_reqs: int, num_v_heads: int, head_v_dim: int, tile_rows: int) -> ValueSplit:
    """Split of the verify kernel for `num_reqs` requests of row tiles of `tile_rows`."""
    if interpreting():
        return ValueSplit(head_v_dim, stacked_heads(num_v_heads, tile_rows), 4)
    block_v = head_v_dim
    while block_v > 32 and num_reqs * num_v_heads * (head_v_dim // block_v) < _FULL_DEVICE:
        block_v //= 2
    return ValueSplit(block_v, 1, 8 if block_v > 64 else 4)


def stacked_heads(num_v_heads: int, tile_rows: int) -> int:
    """Heads that share a program under the interpreter, whose cost is per operation."""
    return min(triton.next_power_of_2(num_v_heads), max(1, MAX_ROWS // tile_rows))


def native_bf16(dtype: torch.dtype) -> bool:
    """Whether products with bfloat16 rows go to the tensor cores as bfloat16.

    They are exact there: two bfloat16 factors have a 16-bit product, and a float32 factor is split
    into three bfloat16 terms that together hold its 24 bits. The interpreter has no bfloat16 dot.
    """
    return dtype == torch.bfloat16 and not interpreting()


class CommitTiles(NamedTuple):
    """Value columns of a state, or channels of a window, that a program of the commit moves."""

    block_v: int
    block_channels: int


def commit_tiles(head_v_dim: int, group: int, num_channels: int) -> CommitTiles:
    """Tiles of the commit. On a GPU small ones: it is bound by memory and wants many in flight.

    Args:
        group: value heads that share a key head.
    """
    if interpreting():
        # All heads of a key head, if their number is a power of two.
        block_v = head_v_dim * (group & -group)
        return CommitTiles(block_v, min(4096, triton.next_power_of_2(num_channels)))
    return CommitTiles(min(head_v_dim, 32), min(1024, triton.next_power_of_2(num_channels)))
