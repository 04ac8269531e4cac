# SPDX-License-Identifier: Apache-2.0
"""Prompts of one token join running trees, in graphs and in blocks that others have left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from comparison import SCORED, assert_same_up_to_rounding, scored
from harness import Job, run
from prompts import source_prompts

BUDGET = 15


def requests(target: Path) -> list[dict[str, Any]]:
    """Three leave their blocks, one decodes throughout, eight join it with a single token each."""
    rng = random.Random(24)
    prompts = source_prompts(target, 12, rng)
    found: list[dict[str, Any]] = [request(prompt, 3) for prompt in prompts[:3]]
    found.append(request(prompts[3], 100, after=2))
    options: list[dict[str, Any]] = [{}, {"presence_penalty": 1.2}, {"temperature": 1.0, "seed": 5}]
    for i, prompt in enumerate(prompts[4:]):
        found.append(request(prompt[:1], 12, at_step=12 + i, **options[i % 3]))
    return found


def request(prompt: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    when = {key: options.pop(key) for key in ("at_step", "after") if key in options}
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | options
    return {"prompt": prompt, "params": scored(params), **when}


def test_a_prompt_of_one_token_is_continued_as_without_speculation(demo_pair, full_graphs) -> None:
    asked = requests(demo_pair[0])
    # Few blocks: what joins gets those that were used before.
    engine = SCORED | {"max_num_seqs": 4, "num_gpu_blocks_override": 40}
    plain, eager, graphs = run(
        demo_pair,
        [
            Job(asked, engine=engine | {"enforce_eager": True}),
            Job(asked, budget=BUDGET, engine=engine | {"enforce_eager": True}),
            Job(asked, budget=BUDGET, engine=engine | full_graphs),
        ],
    )
    assert_same_up_to_rounding(plain, eager, asked)
    assert_same_up_to_rounding(eager, graphs, asked)
    assert graphs.tokens_per_step > 1.3
