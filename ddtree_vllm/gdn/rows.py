# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step belong to trees, and where each tree's recurrent state lives."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class TreeRows:
    """The tree rows of a step, one entry a request, R entries.

    The rows of one request are consecutive, root first, in the order of its `DraftTree` slot. An
    entry is skipped, and nothing is written for it, when its `num_rows` is 0, its slot is negative
    or its state slot is not above `null_slot`: requests that bring no tree (prefill) and the
    padding of a CUDA graph may stay in the arrays.

    Attributes:
        slots: int32 [R], the request's slot in the `DraftTree`.
        state_slots: int32 or int64 [R], index of its committed state in the layer's caches.
        row_start: int32 [R], its first row among the step's rows.
        num_rows: int32 [R], root and draft nodes.
        stash_start: int32 [R], its first row in the stash, which holds tree rows only: the tree
            rows of the requests before it. With trees alone in the batch that equals `row_start`.
        max_num_rows: the most rows that any entry can have; known on the host.
        null_slot: state slots up to this one belong to nobody. vLLM keeps block 0 for that.
    """

    slots: torch.Tensor
    state_slots: torch.Tensor
    row_start: torch.Tensor
    num_rows: torch.Tensor
    stash_start: torch.Tensor
    max_num_rows: int
    null_slot: int = -1

    @property
    def num_reqs(self) -> int:
        return self.slots.shape[0]
