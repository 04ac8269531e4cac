# SPDX-License-Identifier: Apache-2.0
"""Weights quantised to FP8 at load (`--quantization fp8`): trees pay, graphs change nothing."""

from __future__ import annotations

import random

from comparison import SCORED, assert_same_up_to_rounding, scored
from harness import Job, run
from prompts import source_prompts

BUDGET = 31


def test_trees_of_a_target_in_fp8_are_accepted_alike_in_graphs_and_eager(
    demo_pair, full_graphs
) -> None:
    prompts = source_prompts(demo_pair[0], 24, random.Random(25))
    params = scored({"max_tokens": 64, "temperature": 0.0, "ignore_eos": True})
    asked = [{"prompt": prompt, "params": params} for prompt in prompts]
    engine = SCORED | {"quantization": "fp8", "max_num_seqs": 8}
    eager, graphs = run(
        demo_pair,
        [
            Job(asked, budget=BUDGET, engine=engine | {"enforce_eager": True}),
            Job(asked, budget=BUDGET, engine=engine | full_graphs),
        ],
    )
    print(
        f"tokens per step {eager.tokens_per_step:.2f} eager, {graphs.tokens_per_step:.2f} in graphs"
    )
    assert eager.tokens_per_step > 1.5
    assert graphs.tokens_per_step > 1.5
    assert_same_up_to_rounding(eager, graphs, asked)
