# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs replay the step that eager mode runs (complaint 3: acceptance quietly falls to 1.00)."""

from __future__ import annotations

import random

import pytest
from comparison import SCORED, assert_same_up_to_rounding, scored
from harness import Job, run
from prompts import source_prompts

MODES = {
    "eager": {"enforce_eager": True},
    "full graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "default": {},
}


@pytest.fixture(scope="module")
def asked(demo_pair) -> list[dict]:
    prompts = source_prompts(demo_pair[0], 16, random.Random(1))
    return [
        {
            "prompt": prompt,
            "params": scored(
                {"max_tokens": 64, "temperature": temperature, "seed": i, "ignore_eos": True}
            ),
        }
        for temperature in (0.0, 1.0)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def runs(demo_pair, asked) -> dict:
    # One process each: a graph captured for one engine must not serve another.
    jobs = [
        Job(asked, budget=31, engine=SCORED | mode | {"max_num_seqs": 16})
        for mode in MODES.values()
    ]
    return dict(zip(MODES, run(demo_pair, jobs, processes=len(jobs)), strict=True))


def test_acceptance_is_the_same_in_eager_mode_and_in_graphs(runs) -> None:
    eager = runs["eager"].tokens_per_step
    assert eager > 1.5
    for name in ("full graphs", "default"):
        assert runs[name].tokens_per_step == pytest.approx(eager, rel=0.02), name


def test_tokens_are_the_same_in_eager_mode_and_in_full_graphs(runs, asked) -> None:
    """Up to rounding: FlashAttention chooses its splits for the longest context when it is captured."""
    assert_same_up_to_rounding(runs["eager"], runs["full graphs"], asked)
