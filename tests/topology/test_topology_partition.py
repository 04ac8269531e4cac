# SPDX-License-Identifier: Apache-2.0
"""The search for groups, against every division there is."""

import random
from itertools import combinations

import pytest
import topology_machines as machines

from ddtree_topology import links
from ddtree_topology.partition import best_partition


def every_division(gpus, size, idle):
    """All ways to make groups of `size` with `idle` GPUs left over, in PCI order."""
    if not gpus:
        yield []
        return
    first, rest = gpus[0], gpus[1:]
    if len(gpus) >= size:
        for others in combinations(rest, size - 1):
            left = [gpu for gpu in rest if gpu not in others]
            if len(left) >= idle:
                for division in every_division(left, size, idle):
                    yield [(first, *others), *division]
    if idle:
        yield from every_division(rest, size, idle - 1)


def score(division, matrix):
    """The aims in their order: worst link, sum of links, NUMA nodes."""
    ranks = [
        links.rank(matrix.links[i][j]) for group in division for i, j in combinations(group, 2)
    ]
    nodes = sum(len({n for i in group for n in matrix.numa[i] or ()}) for group in division)
    return min(ranks, default=0), sum(ranks), -nodes


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_no_division_is_better(size, seed):
    rng = random.Random(seed * 10 + size)
    for _ in range({1: 20, 2: 40, 4: 60, 8: 20}[size]):
        count = rng.randint(size, 8)
        matrix = machines.random_matrix(count, rng)
        found = best_partition(
            range(count),
            size,
            lambda i, j, m=matrix: links.rank(m.links[i][j]),
            dict(enumerate(matrix.numa)),
        )
        divisions = list(every_division(list(range(count)), size, count % size))
        best = max(score(division, matrix) for division in divisions)
        assert score(found.groups, matrix) == best
        # Among equals the first in PCI order: every_division comes in that order.
        first = next(division for division in divisions if score(division, matrix) == best)
        assert list(found.groups) == first
        if size > 1:
            assert (found.worst, found.total) == best[:2]
        members = [gpu for group in found.groups for gpu in group]
        assert sorted([*members, *found.idle]) == list(range(count))


def test_links_outweigh_numa_and_pci_order():
    matrix = machines.reordered(machines.machine("12"), [0, 2, 1, 3])
    found = best_partition(
        range(4),
        2,
        lambda i, j: links.rank(matrix.links[i][j]),
        {0: (0,), 1: (0,), 2: (1,), 3: (1,)},
    )
    assert found.groups == ((0, 2), (1, 3))


def test_sixteen_gpus_are_searched_in_full():
    # Four switches of four; the slots alternate between them.
    def rank(i, j):
        return 5 if i % 4 == j % 4 else 1

    found = best_partition(range(16), 4, rank, {})
    assert found.groups == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert found.worst == 5


@pytest.mark.parametrize(("count", "size"), [(17, 2), (3, 4), (2, 0)])
def test_impossible_sizes_are_an_error(count, size):
    with pytest.raises(ValueError, match="cannot divide"):
        best_partition(range(count), size, lambda i, j: 1, {})
