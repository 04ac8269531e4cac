# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs replay the step that eager mode runs (complaint 3: acceptance quietly falls to 1.00)."""

from __future__ import annotations

import random

import pytest
from harness import Job, run
from prompts import source_prompts

MODES = {
    "eager": {"enforce_eager": True},
    "full graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "default": {},
}


@pytest.fixture(scope="module")
def runs(demo_pair) -> dict:
    rng = random.Random(1)
    prompts = source_prompts(demo_pair[0], 16, rng)
    requests = [
        {
            "prompt": prompt,
            "params": {
                "max_tokens": 64,
                "temperature": temperature,
                "seed": i,
                "ignore_eos": True,
            },
        }
        for temperature in (0.0, 1.0)
        for i, prompt in enumerate(prompts)
    ]
    jobs = [
        Job(requests, budget=31, engine={**mode, "max_num_seqs": 16}) for mode in MODES.values()
    ]
    # One process each: a graph captured for one engine must not serve another.
    return {name: run(demo_pair, [job])[0] for name, job in zip(MODES, jobs, strict=True)}


def test_acceptance_is_the_same_in_eager_mode_and_in_graphs(runs) -> None:
    eager = runs["eager"].tokens_per_step
    assert eager > 1.5
    for name in ("full graphs", "default"):
        assert runs[name].tokens_per_step == pytest.approx(eager, rel=0.02), name


def test_tokens_are_the_same_in_eager_mode_and_in_full_graphs(runs) -> None:
    """Same kernels, same shapes: bfloat16 or not, nothing may differ."""
    assert runs["full graphs"].tokens == runs["eager"].tokens
