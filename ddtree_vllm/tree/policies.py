# SPDX-License-Identifier: Apache-2.0
"""Which nodes a draft tree gets: chosen by score every step, or a shape fixed beforehand."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ddtree_vllm.tree.draft_tree import MAX_BUDGET
from ddtree_vllm.tree.nodes import RankTuple, parent_indices

POLICIES = ("ddtree", "chain", "static")


@dataclass(frozen=True)
class BestFirst:
    """DDTree: the most probable prefixes, chosen anew from each step's log-probabilities.

    With `always_spine` the top-1 spine is popped before everything else. The tree then holds the
    whole chain that plain DFlash would verify, and spends what is left of the budget on the most
    probable other nodes. A prefix of the pop order is still the tree of that smaller budget: one
    that is shorter than the spine is a chain.
    """

    always_spine: bool = False


@dataclass(frozen=True)
class FixedShape:
    """The same nodes every step, as device tensors, parents first.

    Attributes:
        parents: int32 [n], local row of the parent (0 is the root, node i is row i + 1).
        depths: int32 [n], from 1.
        ranks: int32 [n].
        max_depth: the largest depth.
        max_rank: the largest rank.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor
    max_depth: int
    max_rank: int

    @classmethod
    def of(cls, nodes: Sequence[RankTuple], device: torch.device | str) -> "FixedShape":
        """A shape from rank tuples that are parents first."""

        def on_device(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            parents=on_device([i + 1 for i in parent_indices(nodes)]),
            depths=on_device([len(node) for node in nodes]),
            ranks=on_device([node[-1] for node in nodes]),
            max_depth=max(map(len, nodes)),
            max_rank=max(map(max, nodes)),
        )


TreePolicy = BestFirst | FixedShape


def make_policy(
    name: str,
    *,
    budget: int,
    depth: int,
    candidates: int,
    device: torch.device | str,
    static_tree: Iterable[Sequence[int]] | None = None,
    always_spine: bool = False,
) -> TreePolicy:
    """Resolves a policy by name for one budget and one drafter.

    Args:
        name: `ddtree`, `chain` (the top-1 spine, what plain DFlash verifies) or `static`.
        budget: N, most nodes of a tree. A fixed shape with more nodes is cut to its first N.
        depth: L, positions that the drafter scores.
        candidates: k, candidates per position.
        static_tree: rank tuples, for `static` only: (0,) is the most probable child of the root,
            (0, 2) that node's third child. The order is kept, except that a parent given after its
            child is moved in front of it.
        always_spine: for `ddtree` only, see `BestFirst`.

    Raises:
        ValueError: the name is unknown, an option does not belong to the policy, the budget is out
            of range, or the static tree is malformed or does not fit `depth` and `candidates`.
    """
    budget = check_budget(budget)
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}.")
    if static_tree is not None and name != "static":
        raise ValueError(f"static_tree belongs to policy 'static', not to {name!r}.")
    if always_spine and name != "ddtree":
        raise ValueError(f"always_spine belongs to policy 'ddtree', not to {name!r}.")

    if name == "ddtree":
        return BestFirst(always_spine)
    if name == "chain":
        return FixedShape.of([(0,) * d for d in range(1, min(budget, depth) + 1)], device)
    if static_tree is None:
        raise ValueError("policy 'static' needs static_tree, a list of rank tuples.")
    nodes = check_static_tree(static_tree, depth=depth, candidates=candidates)
    return FixedShape.of(nodes[:budget], device)


def check_budget(budget: int) -> int:
    """Returns the budget as an int, or raises ValueError when it is not a number in 1..127."""
    try:
        if isinstance(budget, bool):
            raise TypeError
        value = operator.index(budget)
    except TypeError:
        raise ValueError(f"budget must be a whole number of nodes, not {budget!r}.") from None
    if not 1 <= value <= MAX_BUDGET:
        raise ValueError(f"budget must be between 1 and {MAX_BUDGET} nodes, not {value}.")
    return value


def check_static_tree(
    static_tree: Iterable[Sequence[int]],
    *,
    depth: int | None = None,
    candidates: int | None = None,
) -> list[RankTuple]:
    """Checks the rank tuples of a static tree and puts parents first.

    Args:
        depth: largest depth allowed; None: any.
        candidates: ranks must be below this; None: any.

    Returns:
        The tuples in the order given, each parent that came late moved in front of its first child.

    Raises:
        ValueError: no nodes, more than 127, an entry that is not a non-empty list of ranks >= 0, a
            duplicate, a missing parent, or a depth or rank out of range.
    """
    given: dict[RankTuple, None] = {}
    for entry in _entries(static_tree):
        node = _rank_tuple(entry)
        if node in given:
            raise ValueError(f"static tree: node {list(node)} appears twice.")
        given[node] = None
    if not given:
        raise ValueError("static tree: it has no nodes.")
    if len(given) > MAX_BUDGET:
        raise ValueError(f"static tree: {len(given)} nodes are more than the limit, {MAX_BUDGET}.")
    for node in given:
        if len(node) > 1 and node[:-1] not in given:
            raise ValueError(
                f"static tree: the parent of node {list(node)} is missing; "
                f"add {list(node[:-1])} or leave the node out."
            )
        if depth is not None and len(node) > depth:
            raise ValueError(
                f"static tree: node {list(node)} is at depth {len(node)}, "
                f"but there are {depth} draft positions."
            )
        if candidates is not None and max(node) >= candidates:
            raise ValueError(
                f"static tree: node {list(node)} has rank {max(node)}, "
                f"but ranks go from 0 to {candidates - 1} ({candidates} candidates per position)."
            )

    ordered: dict[RankTuple, None] = {}
    for node in given:
        for length in range(1, len(node) + 1):
            ordered.setdefault(node[:length])
    return list(ordered)


def _entries(static_tree: object) -> list[object]:
    if isinstance(static_tree, str | bytes) or not isinstance(static_tree, Iterable):
        raise ValueError(f"static tree: it must be a list of rank tuples, not {static_tree!r}.")
    return list(static_tree)


def _rank_tuple(entry: object) -> RankTuple:
    if isinstance(entry, Sequence) and not isinstance(entry, str | bytes) and len(entry) > 0:
        ranks = list(entry)
        if all(isinstance(r, int) and not isinstance(r, bool) and r >= 0 for r in ranks):
            return tuple(ranks)
    raise ValueError(
        f"static tree: {entry!r} is not a node; a node is a non-empty list of ranks, "
        "whole numbers from 0, such as [0, 1]."
    )
