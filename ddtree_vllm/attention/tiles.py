# SPDX-License-Identifier: Apache-2.0
"""How attention is cut into programs: tile sizes, and splits of the keys over programs."""

import functools
import math
from dataclasses import dataclass

import torch
import triton

from ddtree_vllm.gpu import LARGE_SHARED_MEMORY, shared_memory_per_block

# Splitting the keys further than this costs more in the merge than it gains in parallelism.
MAX_SPLITS = 32
# Fewest keys worth a program of their own.
_MIN_KEYS_PER_SPLIT = 256


@dataclass(frozen=True)
class Tiles:
    """One launch's tile sizes.

    `block_m` counts (row, query head of the group) pairs, `block_n` keys of the prefix and
    `block_suffix` keys of this step's rows. Powers of two, 16 at least.
    """

    block_m: int
    block_n: int
    block_suffix: int
    num_warps: int = 4
    num_stages: int = 2


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter in this process."""
    return bool(triton.knobs.runtime.interpret)


def choose_tiles(
    max_query_len: int, group: int, head_dim: int, dtype: torch.dtype, max_keys: int
) -> Tiles:
    """Tile sizes for a launch, from sizes the host knows.

    Args:
        max_query_len: most rows of a request in the batch.
        group: query heads per key/value head.
        head_dim: D.
        dtype: of the queries and the caches.
        max_keys: most keys of a request.
    """
    rows = max(16, triton.next_power_of_2(max_query_len * group))
    suffix = max(16, triton.next_power_of_2(max_query_len))
    if interpreting():
        # The cost is per operation, nearly whatever its size.
        keys = min(512, max(64, triton.next_power_of_2(max_keys)))
        return Tiles(min(512, rows), keys, min(512, suffix))
    if dtype == torch.float32:
        # "ieee" products run outside the tensor cores, their operands in registers.
        keys = 16 if head_dim == 256 else 32
        return Tiles(16, keys, min(keys, suffix), num_warps=4, num_stages=1)
    if shared_memory_per_block() < LARGE_SHARED_MEMORY:
        return _small_tiles(rows, suffix, head_dim)
    if rows <= 64:
        # Decode-like: bound by reading the cache, so keep more of it in flight.
        stages = 2 if head_dim == 256 else 3
        return Tiles(rows, 64, min(64, suffix), num_warps=4, num_stages=stages)
    keys = 64 if head_dim == 256 else 128
    return Tiles(128, keys, min(64, suffix), num_warps=8, num_stages=2)


def _small_tiles(rows: int, suffix: int, head_dim: int) -> Tiles:
    """For 99 KB of shared memory. Not measured: they fit, and spill hardly any registers."""
    if rows <= 32:
        return Tiles(rows, 64, min(64, suffix), num_warps=4, num_stages=2)
    keys = 32 if head_dim == 256 else 64
    return Tiles(64, keys, min(64, suffix), num_warps=8, num_stages=2)


def choose_suffix_tiles(max_query_len: int, group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """As `choose_tiles`, where the keys are this step's rows alone.

    A step's suffix is a few microseconds of work: small tiles spread it over more processors.
    """
    tiles = choose_tiles(max_query_len, group, head_dim, dtype, max_query_len)
    if interpreting() or dtype == torch.float32:
        return tiles
    # More rows of 256-wide heads do not fit the registers of four warps.
    block_m = min(32 if head_dim == 256 else 64, tiles.block_m)
    return Tiles(block_m, tiles.block_n, min(64, tiles.block_suffix), num_warps=4, num_stages=1)


def choose_num_splits(num_programs: int, max_keys: int, device: torch.device) -> int:
    """How many programs share the keys of one tile of rows.

    The fewest splits whose last wave of programs leaves the GPU about as full as the best number
    would. `max_keys` is an upper bound (the longest sequence a captured graph may meet): shorter
    sequences use fewer splits, decided on the device.
    """
    if device.type != "cuda":
        return 1
    processors = _multiprocessors(device)
    if num_programs >= processors:
        return 1
    most = min(MAX_SPLITS, max_keys // _MIN_KEYS_PER_SPLIT)
    fullness = []
    for splits in range(1, most + 1):
        waves = num_programs * splits / processors
        fullness.append(waves / math.ceil(waves))
    for splits, full in enumerate(fullness, start=1):
        if full >= 0.85 * max(fullness):
            return splits
    return 1


def min_tiles_per_split(tiles: Tiles) -> int:
    return max(1, _MIN_KEYS_PER_SPLIT // tiles.block_n)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
