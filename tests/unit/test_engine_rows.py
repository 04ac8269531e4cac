# SPDX-License-Identifier: Apache-2.0
"""How many tree rows a step can hold: what the stash is sized by."""

from types import SimpleNamespace

import pytest

from ddtree_vllm.engine.model_state import max_tree_rows


def config(most: int, budget: int, schedule=None, tokens: int = 8192):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=most, max_num_batched_tokens=tokens),
        speculative_config=SimpleNamespace(num_speculative_tokens_per_batch_size=schedule),
        num_speculative_tokens=budget,
    )


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (None, 16 * 64),
        # A batch may carry the drafts it was given one step ago and, beside, every newcomer's root.
        ([[1, 1, 63], [2, 16, 15]], 16 + 16 * 16),
        ([[1, 1, 63], [2, 2, 15]], 16 + 16 * 16),  # the last entry goes on
        ([[1, 1, 63], [9, 16, 3]], 16 + 8 * 64),  # and so does the one before a gap
        ([[1, 64, 31]], 16 + 16 * 32),
        ([[1, 16, 127]], 16 + 16 * 64),  # no more than the budget
    ],
)
def test_the_stash_holds_the_largest_batch_of_every_budget(schedule, rows) -> None:
    assert max_tree_rows(config(16, 63, schedule)) == rows


def test_no_step_has_more_rows_than_tokens() -> None:
    assert max_tree_rows(config(256, 63, tokens=2048)) == 2048
