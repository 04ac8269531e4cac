# SPDX-License-Identifier: Apache-2.0
"""A budget per batch size under CUDA graphs: other graphs, other tiles, the same tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from comparison import SCORED, assert_same_up_to_rounding, scored
from harness import Job, Result, run
from prompts import source_prompts

from ddtree_vllm.config import AUTO_BUDGETS

LARGEST = max(budget for _, budget in AUTO_BUDGETS)
MOST = 8


def schedule() -> list[list[int]]:
    """`--budget auto` as vLLM's option, and a third budget that is no power of two less one."""
    begins = [first for first, _ in AUTO_BUDGETS] + [MOST // 2 + 1]
    ends = [begin - 1 for begin in begins[1:]] + [MOST]
    budgets = [budget for _, budget in AUTO_BUDGETS] + [6]
    return [list(entry) for entry in zip(begins, ends, budgets, strict=True)]


def requests(target: Path, count: int = 12, longest: int = 96) -> list[dict]:
    """One by one in, so that the batch grows and shrinks through every entry."""
    rng = random.Random(23)
    return [
        {
            "prompt": prompt,
            "params": scored(
                {"max_tokens": longest - 4 * i, "temperature": 0.0, "ignore_eos": True}
            ),
            "at_step": 3 * i,
        }
        for i, prompt in enumerate(source_prompts(target, count, rng))
    ]


@pytest.fixture(scope="module")
def asked(demo_pair) -> list[dict]:
    return requests(demo_pair[0])


@pytest.fixture(scope="module")
def runs(demo_pair, full_graphs, asked) -> tuple[Result, Result]:
    engine = SCORED | {"max_num_seqs": MOST}
    fixed, scheduled = run(
        demo_pair,
        [
            Job(asked, budget=LARGEST, engine=engine | {"enforce_eager": True}),
            Job(
                asked,
                budget=LARGEST,
                engine=engine | full_graphs,
                speculative={"num_speculative_tokens_per_batch_size": schedule()},
            ),
        ],
    )
    return fixed, scheduled


def test_tokens_are_those_of_one_budget_in_eager_mode(runs, asked) -> None:
    assert_same_up_to_rounding(*runs, asked)


def test_the_budget_follows_the_batch(runs) -> None:
    fixed, scheduled = (result.counters for result in runs)
    drafts = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_drafts"
    per_step = [counters[drafts[0]] / counters[drafts[1]] for counters in (fixed, scheduled)]
    print(f"{per_step[0]:.1f} and {per_step[1]:.1f} nodes a verification")
    assert per_step[0] > 0.9 * LARGEST
    assert 6 < per_step[1] < 0.7 * LARGEST
