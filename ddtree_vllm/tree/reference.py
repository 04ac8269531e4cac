# SPDX-License-Identifier: Apache-2.0
"""The tree builder in plain Python, as the definition the kernel is held to.

Best-first search is the algorithm of DDTree (Ringel and Romano, arXiv 2604.12989). A block
diffusion drafter gives one distribution per draft position, independent of the tokens before it, so
every node at depth d - 1 has the same candidate children: the candidates of position d, by rank. A
node is therefore the tuple of ranks on the way to it, and its score the sum of their
log-probabilities: the log of the probability that the drafter gives to this prefix.
"""

import heapq
import math
from collections.abc import Sequence

from ddtree_vllm.tree.nodes import RankTuple


def best_first(
    log_probs: Sequence[Sequence[float]], budget: int, *, always_spine: bool = False
) -> list[RankTuple]:
    """The `budget` most probable prefixes, most probable first.

    Equal scores are ordered by rank tuple, a prefix before its extensions. A log-probability of
    minus infinity means that the node does not exist; there may be fewer nodes than `budget`.

    Args:
        log_probs: [depth, k], at most 0, sorted downwards in each row.
        always_spine: pop the top-1 spine (0), (0, 0), ... first, whatever its score.
    """
    depth, candidates = len(log_probs), len(log_probs[0])

    def push(parent: RankTuple, parent_score: float, rank: int) -> None:
        score = parent_score + float(log_probs[len(parent)][rank])
        if score > -math.inf:
            heapq.heappush(heap, (-score, (*parent, rank), parent_score))

    heap: list[tuple[float, RankTuple, float]] = []
    nodes: list[RankTuple] = []
    push((), 0.0, 0)
    while heap and len(nodes) < budget:
        if always_spine:
            entry = next((e for e in heap if e[1] == (0,) * (len(nodes) + 1)), heap[0])
            heap.remove(entry)
            heapq.heapify(heap)
        else:
            entry = heapq.heappop(heap)
        negated_score, node, parent_score = entry
        nodes.append(node)
        if node[-1] + 1 < candidates:
            push(node[:-1], parent_score, node[-1] + 1)
        if len(node) < depth:
            push(node, -negated_score, 0)
    return nodes


def exhaustive(log_probs: Sequence[Sequence[float]], budget: int) -> list[RankTuple]:
    """The same list by enumerating and sorting every prefix: k + k^2 + ... + k^depth of them."""
    scored: list[tuple[float, RankTuple]] = []
    level: list[tuple[float, RankTuple]] = [(0.0, ())]
    for row in log_probs:
        level = [
            (score + float(log_prob), (*node, rank))
            for score, node in level
            for rank, log_prob in enumerate(row)
        ]
        scored += [(-score, node) for score, node in level if score > -math.inf]
    return [node for _, node in sorted(scored)[:budget]]


def fixed_shape(
    log_probs: Sequence[Sequence[float]], shape: Sequence[RankTuple], budget: int
) -> list[RankTuple]:
    """The nodes of a static tree that exist, parents first, cut to `budget`.

    The cut comes first: a node that does not exist is not replaced by one past the budget.
    """

    def exists(node: RankTuple) -> bool:
        return all(log_probs[d][rank] > -math.inf for d, rank in enumerate(node))

    return [node for node in shape[:budget] if exists(node)]


def ancestor_sets(nodes: Sequence[RankTuple]) -> list[set[int]]:
    """By local row (root 0, node i at i + 1): the rows that the row may see, itself included."""
    row = {(): 0} | {node: i + 1 for i, node in enumerate(nodes)}
    return [{row[node[:n]] for n in range(len(node) + 1)} for node in row]
