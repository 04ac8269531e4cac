# SPDX-License-Identifier: Apache-2.0
"""Dividing GPUs into groups of one size: an exact search, at most 16 GPUs.

Order of aims: the worst link in any group, the sum of the links, the fewest NUMA nodes per group,
and PCI order where nothing else decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import NamedTuple

MOST_GPUS = 16


class Partition(NamedTuple):
    """Groups in PCI order.

    Attributes:
        groups: GPU indices of each group.
        idle: GPU indices that were left over.
        worst: rank of the worst link in any group (`links.rank`), None for groups of one.
        total: sum of the ranks of all links inside groups.
    """

    groups: tuple[tuple[int, ...], ...]
    idle: tuple[int, ...]
    worst: int | None
    total: int


class _Group(NamedTuple):
    members: tuple[int, ...]
    mask: int
    worst: int
    total: int
    nodes: int


_Found = tuple[tuple[int, int], tuple[tuple[int, ...], ...]]


def best_partition(
    gpus: Sequence[int],
    size: int,
    rank: Callable[[int, int], int],
    numa: Mapping[int, Sequence[int] | None],
) -> Partition:
    """The best division of `gpus` into len(gpus) // size groups; the rest stays idle.

    Args:
        gpus: indices in PCI order.
        rank: rank of the link between two of them, higher is better.
        numa: NUMA nodes of each GPU, None where unknown (then it weighs nothing).

    Raises:
        ValueError: more than 16 GPUs, or fewer than `size`.
    """
    if not 0 < size <= len(gpus) <= MOST_GPUS:
        raise ValueError(f"cannot divide {len(gpus)} GPUs into groups of {size}")
    groups = [_group(members, gpus, rank, numa) for members in combinations(gpus, size)]
    # The worst link comes first of all: with groups below a threshold struck out, the other aims
    # simply add up. The highest threshold that still leaves a division wins.
    for threshold in sorted({group.worst for group in groups}, reverse=True):
        found = _search(len(gpus), size, [group for group in groups if group.worst >= threshold])
        if found is not None:
            (total, _), chosen = found
            used = {gpu for group in chosen for gpu in group}
            idle = tuple(gpu for gpu in gpus if gpu not in used)
            return Partition(chosen, idle, threshold if size > 1 else None, total)
    raise AssertionError("some division always exists")


def _group(
    members: tuple[int, ...],
    gpus: Sequence[int],
    rank: Callable[[int, int], int],
    numa: Mapping[int, Sequence[int] | None],
) -> _Group:
    ranks = [rank(i, j) for i, j in combinations(members, 2)]
    nodes = {node for gpu in members for node in numa.get(gpu) or ()}
    mask = sum(1 << gpus.index(gpu) for gpu in members)
    return _Group(members, mask, min(ranks, default=0), sum(ranks), len(nodes))


def _search(count: int, size: int, groups: Sequence[_Group]) -> _Found | None:
    """Best ((sum of links, -NUMA nodes), groups) that leaves count % size GPUs idle, or None."""
    by_first: list[list[_Group]] = [[] for _ in range(count)]
    for group in groups:
        by_first[(group.mask & -group.mask).bit_length() - 1].append(group)

    @cache
    def rest(free: int, idle: int) -> _Found | None:
        if not free:
            return (0, 0), ()
        best: _Found | None = None
        first = free & -free
        # Groups come in PCI order and only a better one replaces the best so far.
        for group in by_first[first.bit_length() - 1]:
            if group.mask & ~free:
                continue
            tail = rest(free & ~group.mask, idle)
            if tail is None:
                continue
            score = (tail[0][0] + group.total, tail[0][1] - group.nodes)
            if best is None or score > best[0]:
                best = score, (group.members, *tail[1])
        if idle:
            tail = rest(free & ~first, idle - 1)
            if tail is not None and (best is None or tail[0] > best[0]):
                best = tail
        return best

    return rest((1 << count) - 1, count % size)
