# SPDX-License-Identifier: Apache-2.0
"""The nodes of one tree, for tools and tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RankTuple = tuple[int, ...]
"""A node by the ranks on the way to it: (0, 2) is the third child of the best child of the root."""


@dataclass(frozen=True)
class TreeNodes:
    """The nodes of one draft tree in pop order, without the root; parents come first.

    Attributes:
        parents: int64 [n], index of the parent among these nodes; -1 for a child of the root.
        depths: int64 [n], 1 for a child of the root.
        ranks: int64 [n], rank of the node's token among the candidates of its depth.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor

    def __len__(self) -> int:
        return self.parents.shape[0]

    def prefix(self, n: int) -> "TreeNodes":
        """The first `n` nodes: the tree that a budget of `n` builds. All nodes if there are fewer.

        Raises:
            ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"a prefix has 0 nodes or more, not {n}.")
        return TreeNodes(self.parents[:n], self.depths[:n], self.ranks[:n])

    def rank_tuples(self) -> list[RankTuple]:
        """Each node as the tuple of ranks on the way to it. Reads the tensors on the host."""
        tuples: list[RankTuple] = []
        for parent, rank in zip(self.parents.tolist(), self.ranks.tolist(), strict=True):
            tuples.append((*(tuples[parent] if parent >= 0 else ()), rank))
        return tuples


def parent_indices(nodes: Sequence[RankTuple]) -> list[int]:
    """Index of each node's parent in the list; -1 for a child of the root."""
    index = {node: i for i, node in enumerate(nodes)}
    return [index[node[:-1]] if len(node) > 1 else -1 for node in nodes]
