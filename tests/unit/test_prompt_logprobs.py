# SPDX-License-Identifier: Apache-2.0
"""Scores of drafts that a prompt's last token brought along are cut off; engine tests check the rest."""

from __future__ import annotations

import torch
from vllm.v1.outputs import LogprobsTensors

from ddtree_vllm.engine.prompt_logprobs import without_last


def scores(rows: int) -> LogprobsTensors:
    ids = torch.arange(rows * 3).reshape(rows, 3)
    return LogprobsTensors(ids, ids.float() / 10, torch.arange(rows))


def test_the_last_rows_go_from_every_tensor() -> None:
    left = without_last(scores(5), 2)
    assert left is not None
    assert left.logprob_token_ids.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert left.logprobs.shape == (3, 3)
    assert left.selected_token_ranks.tolist() == [0, 1, 2]


def test_a_prompt_that_ends_with_the_step_keeps_all() -> None:
    for rows in (0, -7):
        assert without_last(scores(4), rows).logprobs.shape == (4, 3)


def test_a_prompt_of_one_token_has_none() -> None:
    assert without_last(scores(15), 15) is None
