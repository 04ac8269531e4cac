# SPDX-License-Identifier: Apache-2.0
"""The draft trees of all requests, as one object of device tensors."""

from dataclasses import dataclass

import torch

MAX_BUDGET = 127
"""Most draft nodes in a tree: with its root a tree has at most 128 rows."""

BITS_PER_WORD = 32


@dataclass
class DraftTree:
    """One draft tree per request slot, in buffers allocated once.

    S is the number of slots (a request keeps its slot for life), N the budget in nodes. *Local row*
    0 is the root, the last sampled token, which is not a draft; local row i (1..N) is node i - 1.
    Nodes are in pop order: a parent's row is smaller than its children's, and the first n nodes are
    the tree of budget n, so a step that verifies fewer nodes takes a prefix.

    Nodes from `num_nodes` on are padding: never accepted, never seen by a valid row.

    Attributes:
        tokens: int64 [S, N], token of each node; padding 0, which is a valid id.
        parents: int32 [S, N+1], by local row, the parent's local row; root and padding -1.
        depths: int32 [S, N+1], by local row, root 0, its children 1; padding 0.
        ranks: int32 [S, N], rank of the node's token among the candidates of its depth; padding -1.
        ancestors: int32 [S, N+1, W], W = ceil((N+1) / 32): bit j % 32 of word j // 32 is set iff
            local row j is the row itself or one of its ancestors; padding rows: themselves only.
        num_nodes: int32 [S], valid nodes.
        max_depth: deepest a node can be (the drafter's number of positions, at most N).
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor
    ancestors: torch.Tensor
    num_nodes: torch.Tensor
    max_depth: int

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        budget: int,
        device: torch.device | str,
        max_depth: int | None = None,
    ) -> "DraftTree":
        """Allocates `num_slots` empty trees of at most `budget` nodes.

        Args:
            max_depth: deepest a node can be; the walk takes that many steps. Default: `budget`.

        Raises:
            ValueError: `budget` is not in 1..127, or `num_slots` or `max_depth` is below 1.
        """
        if not 1 <= budget <= MAX_BUDGET:
            raise ValueError(f"budget must be between 1 and {MAX_BUDGET} nodes, not {budget}.")
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}.")
        if max_depth is None:
            max_depth = budget
        if max_depth < 1:
            raise ValueError(f"max_depth must be at least 1, not {max_depth}.")

        rows = budget + 1
        words = -(-rows // BITS_PER_WORD)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        tree = cls(
            tokens=empty(num_slots, budget, dtype=torch.int64),
            parents=empty(num_slots, rows),
            depths=empty(num_slots, rows),
            ranks=empty(num_slots, budget),
            ancestors=empty(num_slots, rows, words),
            num_nodes=empty(num_slots),
            max_depth=min(max_depth, budget),
        )
        tree.clear()
        return tree

    @property
    def num_slots(self) -> int:
        return self.tokens.shape[0]

    @property
    def budget(self) -> int:
        """N, the most nodes a tree can have."""
        return self.tokens.shape[1]

    @property
    def num_rows(self) -> int:
        """N + 1: the root and the nodes."""
        return self.parents.shape[1]

    @property
    def num_words(self) -> int:
        """W, words of a row's ancestor bitmask."""
        return self.ancestors.shape[2]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def clear(self) -> None:
        """Empties every tree: a root and N padding nodes."""
        self.tokens.zero_()
        self.parents.fill_(-1)
        self.depths.zero_()
        self.ranks.fill_(-1)
        self.num_nodes.zero_()
        row = torch.arange(self.num_rows, device=self.device)
        word = torch.arange(self.num_words, device=self.device)
        own_bit = torch.ones_like(row) << (row % BITS_PER_WORD)
        own_word = row[:, None] // BITS_PER_WORD == word
        self.ancestors.copy_(_as_int32(torch.where(own_word, own_bit[:, None], 0)))

    def ancestor_matrix(self, slot: int) -> torch.Tensor:
        """The bitmask of one tree spelled out, for references and tests.

        Returns:
            bool [N+1, N+1]: entry [i, j] tells whether row i may see row j.
        """
        row = torch.arange(self.num_rows, device=self.device)
        words = self.ancestors[slot][:, row // BITS_PER_WORD]
        return ((words >> (row % BITS_PER_WORD)) & 1).bool()

    def nbytes(self) -> int:
        """Device memory of the buffers, in bytes."""
        buffers = (self.tokens, self.parents, self.depths, self.ranks, self.ancestors)
        return sum(b.nbytes for b in buffers) + self.num_nodes.nbytes


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    """Reinterprets words held in int64 (0..2^32 - 1) as int32, bit 31 becoming the sign."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
