# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the Gated DeltaNet kernels: one place that knows what they run on."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from ddtree_vllm.gpu import LARGE_SHARED_MEMORY, shared_memory_per_block

MIN_ROWS = 16
"""`tl.dot` needs 16 rows, so that is the smallest row tile."""
MAX_ROWS = 128
"""Rows of a tree request: a root and at most 127 nodes. Two tiles of 64."""
ROW_TILE = 64


def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels: a few large programs are then the fastest."""
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def overlapping() -> bool:
    """Whether a kernel may start while the one before it still runs, and wait where it needs it.

    Programmatic dependent launch, from compute capability 9.0 on.
    """
    return not interpreting() and torch.cuda.get_device_capability() >= (9, 0)


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


ROW_FACTORS = 4
"""Numbers of a row that do not depend on the value dimension, see `verify`."""


class FactorSplit(NamedTuple):
    """How the factors of a step's rows spread over programs.

    Attributes:
        heads: value heads of a program, stacked.
        pairs: pairs of row tiles, a program each.
        numel: floats of all pairs of a program: two square factors each, and `ROW_FACTORS` a row.
        block_k: key channels of a pass of its loop.
        num_warps: warps of a program.
    """

    heads: int
    pairs: int
    numel: int
    block_k: int
    num_warps: int


def factor_split(num_reqs: int, num_v_heads: int, tiles: RowTiles) -> FactorSplit:
    """Split of the factors of `num_reqs` requests of these row tiles."""
    heads = stacked_heads(num_v_heads, tiles.rows) if interpreting() else 1
    pairs = 3 if tiles.two else 1
    n = heads * tiles.rows
    numel = pairs * (2 * n + ROW_FACTORS) * n
    # Fastest of a sweep on an H200 (docs/benchmarks), with the convolution before it.
    block_k, num_warps = 128, 4
    if tiles.two:
        block_k, num_warps = 64, 8
    elif tiles.rows == 64 and num_reqs * num_v_heads < 4 * 48:
        # Few programs: each has a multiprocessor to itself.
        num_warps = 8
    elif tiles.rows == 64:
        block_k = 32
    elif tiles.rows == 16 and num_reqs * num_v_heads >= 4 * 48:
        # Small products leave most of a program's warps idle.
        num_warps = 1
    return FactorSplit(heads, pairs, numel, block_k, num_warps)


def num_factors(max_reqs: int, max_num_rows: int, num_v_heads: int) -> int:
    """Floats that the factors of a step can take."""
    split = factor_split(max_reqs, num_v_heads, row_tiles(max_num_rows))
    return max_reqs * triton.cdiv(num_v_heads, split.heads) * split.numel


class ValueSplit(NamedTuple):
    """How the value dimension of a request's value heads spreads over programs.

    Attributes:
        block_v: value columns of a program.
        block_k: key channels of a pass of its loop.
    """

    block_v: int
    block_k: int


# Fastest of a sweep on an H200 (docs/benchmarks), 48 value heads of 128: by rows, the first line
# whose requests are not fewer counts. Wide value slices share the rows' own work among more columns;
# narrow ones leave registers and give more programs.
_SPLITS = {
    16: ((0, 64, 32),),
    32: ((0, 64, 32),),
    64: ((8, 64, 32), (0, 32, 128)),
    128: ((0, 32, 128),),
}


def value_split(
    num_reqs: int, num_v_heads: int, head_v_dim: int, head_k_dim: int, tiles: RowTiles
) -> ValueSplit:
    """Split of the verify kernel for `num_reqs` requests of these row tiles."""
    if interpreting():
        return ValueSplit(head_v_dim, head_k_dim)
    if tiles.two and shared_memory_per_block() < LARGE_SHARED_MEMORY:
        # Not measured. These GPUs multiply out of registers: wider slices would spill a thousand
        # bytes of them, as they do on 8.0, narrower ones read all else once more.
        return ValueSplit(32, 32)
    block_v, block_k = next(
        (block_v, block_k)
        for requests, block_v, block_k in _SPLITS[tiles.rows * (2 if tiles.two else 1)]
        if num_reqs * num_v_heads >= requests * 48
    )
    return ValueSplit(min(block_v, head_v_dim), min(block_k, head_k_dim))


def stacked_heads(num_v_heads: int, tile_rows: int) -> int:
    """Heads that share a program under the interpreter, whose cost is per operation."""
    return min(triton.next_power_of_2(num_v_heads), max(1, MAX_ROWS // tile_rows))


def longest_chunk() -> int:
    """Rows of a chunk of the sequential form.

    On a GPU, where vLLM's kernels serve these rows in earnest, half a tile or a quarter: more of
    them and the state they carry do not fit a block's shared memory.
    """
    if interpreting():
        return ROW_TILE
    return ROW_TILE // (4 if shared_memory_per_block() < LARGE_SHARED_MEMORY else 2)


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
    return CommitTiles(min(head_v_dim, 16), min(1024, triton.next_power_of_2(num_channels)))
