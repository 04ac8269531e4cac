# SPDX-License-Identifier: Apache-2.0
"""Once the engine is up, no request waits for one of our kernels to be compiled."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness import Job, run
from prompts import source_prompts

DRIVER = (Path(__file__).with_name("in_engine.py"), "compiled_while_serving")
OURS = "ddtree_vllm."
SCHEDULE = {"num_speculative_tokens_per_batch_size": [[1, 2, 31], [3, 8, 15]]}


def requests(target: Path) -> list[dict[str, Any]]:
    """Prompts that join decoding batches of every size; contexts of two lengths; a tree cut short."""
    rng = random.Random(27)
    prompts = source_prompts(target, 12, rng)
    prompts[5] = [token for prompt in prompts for token in prompt][:900]
    prompts[6] = prompts[6][:1]
    found = [
        {
            "prompt": prompt,
            "params": {
                "max_tokens": 40,
                "temperature": (0.0, 1.0)[i % 2],
                "seed": i,
                "ignore_eos": True,
            },
            "at_step": 3 * i,
        }
        for i, prompt in enumerate(prompts)
    ]
    # The end of the context, alone: its trees are cut ever shorter.
    [last] = source_prompts(target, 1, rng)
    last = (last * 1024)[: 1024 - 30]
    found.append(
        {
            "prompt": last,
            "params": {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True},
            "after": len(found) - 1,
        }
    )
    return found


@pytest.mark.parametrize("speculative", [{}, SCHEDULE], ids=["one budget", "by batch size"])
def test_serving_compiles_no_kernel_of_ours(demo_pair, full_graphs, speculative) -> None:
    job = Job(
        budget=31,
        engine=full_graphs | {"max_num_seqs": 8, "max_model_len": 1024},
        speculative=speculative,
        driver=DRIVER,
        arguments={"requests": requests(demo_pair[0])},
    )
    found = run(demo_pair, [job])[0].found
    assert found["noticed"], "a compilation is not noticed"
    compiled = sorted(set(found["compiled"]))
    print("compiled by others while serving:", [n for n in compiled if not n.startswith(OURS)])
    assert [name for name in compiled if name.startswith(OURS)] == []
    assert all(found["tokens"])
