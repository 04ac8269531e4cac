# SPDX-License-Identifier: Apache-2.0
"""15,000 decode steps at temperature 1, while requests join, leave and are aborted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness import Job, run
from prompts import source_prompts

DRIVER = (Path(__file__).with_name("in_engine.py"), "soak")
STEPS = 15_000
SEATS = 16
BUDGET = 31
# Requests that come round again and again with the same seeds: a third of the run serves each of
# them several times, so the first and the last third differ by what the engine does, not by luck.
POOL = 256
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool(demo_pair) -> list[dict[str, Any]]:
    rng = random.Random(22)
    prompts = source_prompts(demo_pair[0], POOL, rng)
    for i in range(0, POOL, 16):
        prompts[i] = prompts[i][:1]
    return [
        {
            "prompt": prompt,
            "params": {
                "max_tokens": rng.randrange(8, 120),
                "temperature": 1.0,
                "seed": seed,
                "ignore_eos": True,
            },
        }
        for seed, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def soaked(demo_pair, full_graphs, pool) -> dict[str, Any]:
    job = Job(
        budget=BUDGET,
        engine=full_graphs | {"max_num_seqs": SEATS, "async_scheduling": True},
        driver=DRIVER,
        arguments={"pool": pool, "steps": STEPS, "seats": SEATS},
    )
    return run(demo_pair, [job])[0].found


def test_every_request_ends_with_as_many_tokens_as_it_asked_for(soaked, pool) -> None:
    wrong = [
        (number, tokens, reason)
        for number, tokens, _, reason in soaked["ended"]
        if (tokens, reason) != (pool[number % len(pool)]["params"]["max_tokens"], "length")
    ]
    assert wrong == []
    assert len(soaked["ended"]) + soaked["aborted"] + soaked["left"] == soaked["begun"]
    assert soaked["left"] <= SEATS


def test_acceptance_at_the_end_is_that_at_the_beginning(soaked, pool) -> None:
    """Complaint 3: acceptance may fall without an error."""
    rounds = soaked["begun"] // len(pool)
    # Whole rounds of the pool: every request as often in the one as in the other. The last one was
    # not served to its end.
    span = max(1, rounds // 3) * len(pool)
    last = (rounds - 1) * len(pool)
    assert rounds >= 3
    first_third = tokens_per_step(soaked["ended"], 0, span)
    last_third = tokens_per_step(soaked["ended"], last - span, last)
    print(f"tokens per step {first_third:.3f} and {last_third:.3f}, {span} requests each")
    assert first_third > 1.5
    assert last_third == pytest.approx(first_third, rel=0.02)


def tokens_per_step(ended: list[list[Any]], begin: int, end: int) -> float:
    chosen = [(tokens, steps) for number, tokens, steps, _ in ended if begin <= number < end]
    # A request's first token comes of its prompt.
    return sum(tokens - 1 for tokens, _ in chosen) / sum(steps for _, steps in chosen)


@pytest.mark.parametrize(
    ("column", "slack"),
    # Torch takes memory in blocks of 2 and 20 MiB. RAM: 5 KB a step would be found.
    [("allocated", 1 * MIB), ("reserved", 40 * MIB), ("resident", 64 * MIB)],
)
def test_memory_after_all_steps_is_that_after_a_tenth_of_them(soaked, column, slack) -> None:
    place = 1 + ("allocated", "reserved", "resident").index(column)
    begin, end = (window(soaked["memory"], place, tenths) for tenths in (1, 10))
    print(
        f"{column}: {begin / MIB:.1f} MiB after {STEPS // 10} steps, {end / MIB:.1f} after {STEPS}"
    )
    assert begin > 0
    assert end - begin <= slack


def window(samples: list[list[int]], place: int, tenths: int) -> int:
    """The least of the half tenth before the end of that tenth: what is never given back."""
    end = tenths * STEPS // 10
    begin = end - STEPS // 20
    return min(sample[place] for sample in samples if begin <= sample[0] < end)
