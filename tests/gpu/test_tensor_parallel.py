# SPDX-License-Identifier: Apache-2.0
"""Two GPUs draft one set of trees and say what one GPU says."""

from __future__ import annotations

import random

import pytest
from comparison import SCORED, assert_same_up_to_rounding, scored
from harness import Job, run
from prompts import source_prompts

BUDGET = 31


@pytest.mark.two_gpus
def test_two_gpus_draft_the_same_trees_and_give_the_tokens_of_one(demo_pair, full_graphs) -> None:
    prompts = source_prompts(demo_pair[0], 12, random.Random(26))
    params = scored({"max_tokens": 48, "temperature": 0.0, "ignore_eos": True})
    asked = [{"prompt": prompt, "params": params} for prompt in prompts]
    engine = SCORED | full_graphs | {"max_num_seqs": 8}
    one, two = run(
        demo_pair,
        [
            Job(asked, budget=BUDGET, engine=engine, compare_ranks=True),
            Job(
                asked,
                budget=BUDGET,
                engine=engine | {"tensor_parallel_size": 2},
                compare_ranks=True,
            ),
        ],
    )
    assert len(one.digests) == 1
    assert len(two.digests) == 2
    assert two.digests[0] == two.digests[1]
    assert_same_up_to_rounding(one, two, asked)
    assert two.tokens_per_step == pytest.approx(one.tokens_per_step, rel=0.1)
