# SPDX-License-Identifier: Apache-2.0
"""The first requests compile no kernel: the warm-up has launched whatever serving launches."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import Job, random_prompts, run
from launches import CPU_ONLY
from test_batches import joining_and_leaving, request
from tiny_pair import VOCAB

LAUNCHES = Path(__file__).with_name("launches.py")


@pytest.fixture(scope="module")
def results(tiny_pair):
    requests = joining_and_leaving().requests[:6]
    for joins in requests:
        joins["params"]["max_tokens"] = min(joins["params"]["max_tokens"], 6)
    # The end of the context leaves this one a tree of 21 rows, then fewer.
    [last] = random_prompts(random.Random(18), [123], VOCAB)
    requests.append(request(last, 100, after=len(requests) - 1))
    engine = {"max_num_batched_tokens": 512, "max_num_seqs": 6, "max_model_len": 144}
    plain = Job(requests, engine=engine)
    warmed = Job(
        budget=37,
        engine=engine,
        driver=(LAUNCHES, "warm_up_then_serve"),
        arguments={"requests": requests},
    )
    return requests, *run(tiny_pair, [plain, warmed])


def test_serving_launches_no_kernel_that_the_warm_up_did_not(results) -> None:
    _, _, warmed = results
    known = {*warmed.found["stock"], *warmed.found["ours"]}
    served = {name for name in warmed.found["served"] if name.split("(")[0] not in CPU_ONLY}
    assert len({name.split("(")[0] for name in served}) >= 9, "kernels are missing from the record"
    assert served - known == set()


def test_attention_of_trees_beside_prompts_is_warmed_up_whole_and_split(results) -> None:
    """A GPU has it beside FlashAttention for the prompts; vLLM's own warm-up never mixes the two."""
    _, _, warmed = results
    for split in ("SPLIT=True", "SPLIT=False"):
        kernels = [n for n in warmed.found["ours"] if n.startswith("_tree_attention_kernel(")]
        assert any(split in name for name in kernels)
    assert any(name.startswith("_merge_splits_kernel(") for name in warmed.found["ours"])
    assert not any(name.startswith("_merge_splits_kernel(") for name in warmed.found["stock"])


def test_the_warm_up_leaves_no_trace_in_tokens(results) -> None:
    requests, plain, warmed = results
    for number, asked in enumerate(requests):
        expected, got = plain.tokens[number], warmed.found["tokens"][number]
        if "abort_at" in asked:
            shorter = min(len(expected), len(got))
            expected, got = expected[:shorter], got[:shorter]
        assert got == expected, number
