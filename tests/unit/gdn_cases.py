# SPDX-License-Identifier: Apache-2.0
"""Random steps of Gated DeltaNet layers over draft trees, and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree_vllm.gdn import (
    Stash,
    StateTable,
    TreeRows,
    commit_paths,
    reference,
    tree_causal_conv,
    verify_tree,
)
from ddtree_vllm.tree import DraftTree

NULL_SLOT = 0
WIDTH = 4

# Centre and spread of (decay input a, beta input b). Together with a_log and dt_bias of about 0,
# softplus(a) is the decay rate: exp(g) is 0.9999 for slow, 1e-5 for fast.
REGIMES = {
    "mixed": ((0.0, 2.0), (0.0, 2.0)),
    "slow decay, beta near 1": ((-9.0, 0.5), (8.0, 1.0)),
    "slow decay, beta near 0": ((-9.0, 0.5), (-8.0, 1.0)),
    "fast decay, beta near 1": ((12.0, 1.0), (8.0, 1.0)),
    "fast decay, beta near 0": ((12.0, 1.0), (-8.0, 1.0)),
}


def random_parents(rng: np.random.Generator, num_rows: int, max_depth: int = 15) -> list[int]:
    """Parents, parents first, of a random tree; -1 for the root."""
    parents, depths = [-1], [0]
    for row in range(1, num_rows):
        # Half of the rows extend a recent one, so that deep paths occur.
        parent = int(rng.integers(0, row)) if rng.random() < 0.5 else row - 1
        while depths[parent] >= max_depth:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def chain(num_rows: int) -> list[int]:
    return list(range(-1, num_rows - 1))


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the root to `row`."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def ancestor_matrix(parents: Sequence[int]) -> torch.Tensor:
    """bool [n, n]: whether column j is row i or an ancestor of it."""
    matrix = torch.zeros((len(parents), len(parents)), dtype=torch.bool)
    for row in range(len(parents)):
        matrix[row, path_to(parents, row)] = True
    return matrix


def plant(tree: DraftTree, slot: int, parents: Sequence[int]) -> None:
    """Writes a tree into a slot; rows past its end stay padding."""
    num_rows = len(parents)
    depths = [len(path_to(parents, row)) - 1 for row in range(num_rows)]
    tree.parents[slot, :num_rows] = torch.tensor(parents, dtype=torch.int32)
    tree.depths[slot, :num_rows] = torch.tensor(depths, dtype=torch.int32)
    tree.num_nodes[slot] = num_rows - 1
    words = np.zeros((num_rows, tree.num_words), dtype=np.uint32)
    for row in range(num_rows):
        for ancestor in path_to(parents, row):
            words[row, ancestor // 32] |= np.uint32(1 << (ancestor % 32))
    tree.ancestors[slot, :num_rows] = torch.from_numpy(words.view(np.int32))


@dataclass
class LayerInputs:
    """One layer's weights, caches and rows of a step. Shapes as in `ddtree_vllm.gdn`."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    conv_state: torch.Tensor
    state: torch.Tensor


class Step:
    """A batch of requests, each with a tree of its own, through one or more layers.

    Args:
        trees: parents of each request's tree; None: a request of 5 rows that brings no tree.
        padding: nodes of padding verified after each tree's own.
        regime: a key of `REGIMES`.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        trees: Sequence[Sequence[int] | None],
        *,
        num_k_heads: int = 1,
        num_v_heads: int = 2,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
        regime: str = "mixed",
        num_layers: int = 1,
        padding: int = 0,
        bias: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rng = rng
        self.trees = trees
        self.num_k_heads = num_k_heads
        self.num_v_heads = num_v_heads
        self.head_dim = head_dim
        self.device = device
        self.channels = (2 * num_k_heads + num_v_heads) * head_dim

        num_reqs = len(trees)
        lengths = [5 if tree is None else len(tree) + padding for tree in trees]
        num_rows = [0 if tree is None else len(tree) + padding for tree in trees]
        self.row_start = np.cumsum([0, *lengths])[:-1]
        self.stash_start = np.cumsum([0, *num_rows])[:-1]
        self.total_rows = sum(lengths)
        self.tree_slots = rng.permutation(num_reqs + 2)[:num_reqs]
        self.state_slots = 1 + rng.permutation(num_reqs + 3)[:num_reqs]
        self.num_state_slots = num_reqs + 4

        budget = max(1, max(num_rows, default=1) - 1)
        depth = max((len(path_to(t, i)) - 1 for t in trees if t for i in range(len(t))), default=1)
        self.tree = DraftTree.allocate(num_reqs + 2, budget, "cpu", max_depth=max(1, depth))
        for slot, parents in zip(self.tree_slots, trees, strict=True):
            if parents is not None:
                plant(self.tree, int(slot), parents)
        for name in ("tokens", "parents", "depths", "ranks", "ancestors", "num_nodes"):
            setattr(self.tree, name, getattr(self.tree, name).to(device))
        slots = [-1 if t is None else int(s) for s, t in zip(self.tree_slots, trees, strict=True)]
        self.rows = TreeRows(
            slots=self.ints(slots),
            state_slots=self.ints(self.state_slots),
            row_start=self.ints(self.row_start),
            num_rows=self.ints(num_rows),
            stash_start=self.ints(self.stash_start),
            max_num_rows=max(num_rows, default=0),
            null_slot=NULL_SLOT,
        )
        self.stash = Stash.allocate(
            num_layers,
            max(1, sum(num_rows)),
            num_k_heads,
            num_v_heads,
            head_dim,
            head_dim,
            dtype,
            device,
            max_reqs=num_reqs,
            max_num_rows=max(1, *num_rows, 1),
        )
        self.layers = [
            self._random_layer(regime, dtype, state_dtype, bias) for _ in range(num_layers)
        ]
        self.table = StateTable.build([(layer.conv_state, layer.state) for layer in self.layers])
        self.conv_out = [torch.full_like(layer.x, torch.nan) for layer in self.layers]
        self.out = [
            torch.full(
                (self.total_rows, num_v_heads, head_dim), torch.nan, dtype=dtype, device=device
            )
            for _ in self.layers
        ]

    def ints(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=self.device)

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        values = self.rng.standard_normal(shape, dtype=np.float32)
        return torch.from_numpy(values * np.float32(std) + np.float32(mean)).to(self.device)

    def _random_layer(
        self, regime: str, dtype: torch.dtype, state_dtype: torch.dtype, bias: bool
    ) -> LayerInputs:
        (a_mean, a_std), (b_mean, b_std) = REGIMES[regime]
        heads, size, slots = self.num_v_heads, self.head_dim, self.num_state_slots
        # A slot is wider than its window, as in a cache that pads its pages.
        pages = self.normal(slots, WIDTH, self.channels).to(dtype)
        return LayerInputs(
            x=self.normal(self.total_rows, self.channels).to(dtype),
            weight=self.normal(self.channels, WIDTH, std=0.5).to(dtype),
            bias=self.normal(self.channels, std=0.5).to(dtype) if bias else None,
            a=self.normal(self.total_rows, heads, mean=a_mean, std=a_std).to(dtype),
            b=self.normal(self.total_rows, heads, mean=b_mean, std=b_std).to(dtype),
            a_log=self.normal(heads, std=0.3),
            dt_bias=self.normal(heads, std=0.3),
            conv_state=pages[:, : WIDTH - 1],
            state=self.normal(slots, heads, size, size, std=0.3).to(state_dtype),
        )

    def verify(self) -> None:
        """Convolves and verifies in every layer."""
        for index, layer in enumerate(self.layers):
            tree_causal_conv(
                layer.x,
                layer.weight,
                layer.bias,
                layer.conv_state,
                self.rows,
                self.tree,
                self.conv_out[index],
                self.stash,
                index,
            )
            verify_tree(
                self.conv_out[index],
                layer.a,
                layer.b,
                layer.a_log,
                layer.dt_bias,
                layer.state,
                self.rows,
                self.tree,
                self.out[index],
                self.stash,
                index,
            )

    def request_rows(self, req: int) -> slice:
        """Rows of a request's tree among the step's, without its padding."""
        parents = self.trees[req]
        assert parents is not None
        start = int(self.row_start[req])
        return slice(start, start + len(parents))

    def projections(self, req: int, layer: int = 0) -> reference.Projections:
        """What the recurrence of a request reads, from the convolution output of the kernels."""
        rows, inputs = self.request_rows(req), self.layers[layer]
        return reference.project(
            *(t.cpu() for t in (self.conv_out[layer][rows], inputs.a[rows], inputs.b[rows])),
            inputs.a_log.cpu(),
            inputs.dt_bias.cpu(),
            self.head_dim,
            self.head_dim,
        )

    def committed_state(self, req: int, layer: int = 0) -> torch.Tensor:
        return self.layers[layer].state[int(self.state_slots[req])].cpu().double()

    def random_path(self, req: int) -> list[int]:
        """A path as the walk could accept it: from the root to a random row."""
        parents = self.trees[req]
        return [] if parents is None else path_to(parents, int(self.rng.integers(len(parents))))

    def commit(
        self,
        paths: Sequence[Sequence[int]],
        *,
        dst_slots: Sequence[int] | None = None,
        cuts: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Commits a path per request; `cuts` are (length, slot) pairs."""
        max_path = max([len(path) for path in paths] + [self.tree.max_depth + 1])
        table = np.full((len(paths), max_path), -1)
        for req, path in enumerate(paths):
            table[req, : len(path)] = path
        commit_paths(
            self.table,
            self.stash,
            self.ints(table),
            self.ints([len(path) for path in paths]),
            self.rows.stash_start,
            self.rows.state_slots,
            max_path=max_path,
            conv_width=WIDTH,
            dst_slots=None if dst_slots is None else self.ints(dst_slots),
            cut_len=None if cuts is None else self.ints([length for length, _ in cuts]),
            cut_slots=None if cuts is None else self.ints([slot for _, slot in cuts]),
            null_slot=NULL_SLOT,
        )

    def snapshot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of every layer's caches: (conv, state)."""
        return [(layer.conv_state.clone(), layer.state.clone()) for layer in self.layers]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of a row over the larger of its norm and the rows' mean norm.

    Rows lie along the first dimension. Not over the row's own norm alone: with q and k nearly
    orthogonal a row can come out as close to nothing as it likes, and its float32 inputs
    determine no digit of it. Nor over the mean alone: under a fast decay the first row, all that
    is left of the initial state, can be a hundred times the others, and float32 rounds it, and
    the exponent of its decay, in proportion to itself.
    """
    actual, expected = actual.cpu().double().flatten(1), expected.cpu().double().flatten(1)
    assert actual.isfinite().all()
    norms = expected.norm(dim=1)
    return float(((actual - expected).norm(dim=1) / norms.clamp(min=norms.mean())).max())
