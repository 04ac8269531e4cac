# SPDX-License-Identifier: Apache-2.0
"""A decode step keeps the host ahead of the device: nothing in it waits for a result.

Twice: torch's own check around whole steps of the engine, and vLLM's around what a worker does from
the end of its warm-up on, prompts included, which also notices copies from memory that is not pinned.
Both end the engine with the place in a traceback; no call of vLLM or of ours is exempt.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import Job, run
from prompts import source_prompts

DRIVER = (Path(__file__).with_name("in_engine.py"), "decode_without_waiting")
BATCH = 8
STEPS = 20
BUDGET = 31


@pytest.fixture(scope="module")
def runs(demo_pair, full_graphs) -> dict:
    prompts = source_prompts(demo_pair[0], BATCH, random.Random(21))
    requests = [
        # Some of each kind of sampling; enough tokens that none ends under the check.
        {
            "prompt": prompt,
            "params": {
                "max_tokens": 16 * (STEPS + 8),
                "ignore_eos": True,
                "temperature": (0.0, 1.0)[i % 2],
                "top_p": (1.0, 0.9)[i % 4 // 2],
                "seed": i,
            },
        }
        for i, prompt in enumerate(prompts)
    ]
    engine = full_graphs | {
        "async_scheduling": True,
        "max_num_seqs": BATCH,
        "max_model_len": 1024,
    }
    arguments = {"requests": requests, "steps": STEPS}
    jobs = {
        name: Job(
            budget=BUDGET,
            engine=engine,
            driver=DRIVER,
            arguments=arguments,
            environment=environment,
        )
        for name, environment in {
            "torch": {},
            "vllm": {"VLLM_GPU_SYNC_CHECK": "error"},
        }.items()
    }
    results = run(demo_pair, list(jobs.values()), processes=len(jobs))
    return dict(zip(jobs, results, strict=True))


@pytest.mark.parametrize("check", ["torch", "vllm"])
def test_no_decode_step_waits_for_the_device(runs, check) -> None:
    found = runs[check].found
    assert found["checked"]
    assert found["running"] == BATCH, "a request ended under the check"
    assert found["tokens"] >= (STEPS - 1) * BATCH
