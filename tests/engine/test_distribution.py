# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution, not the drafter's and not something between."""

from __future__ import annotations

import math
import random

import pytest
import torch
from harness import Job, random_prompts, run
from tiny_pair import VOCAB

TOKENS = 3
TOP_K = 3
SAMPLES = 288
# Each sample has its seed, so the statistic is the same every run; it may be this large by chance
# once in a thousand seeds.
SIGNIFICANCE = 1e-3


def exact_distribution(target, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of ``TOKENS`` tokens under top-k sampling, by enumeration."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for said, probability in outcomes.items():
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + list(said)])).logits[0, -1]
            best = logits.topk(TOP_K)
            for p, token in zip(best.values.softmax(-1), best.indices, strict=True):
                longer[(*said, int(token))] = probability * float(p)
        outcomes = longer
    return outcomes


def test_sampled_continuations_follow_the_targets_distribution(tiny_pair) -> None:
    (prompt,) = random_prompts(random.Random(3), [7], VOCAB)
    expected = exact_distribution(tiny_pair[0], prompt)
    assert sum(expected.values()) == pytest.approx(1.0)
    params = {"max_tokens": TOKENS, "temperature": 1.0, "top_k": TOP_K, "ignore_eos": True}
    requests = [{"prompt": prompt, "params": params | {"seed": seed}} for seed in range(SAMPLES)]
    (trees,) = run(tiny_pair, [Job(requests, budget=7, engine={"max_num_seqs": 32})])
    assert trees.counters["vllm:spec_decode_num_accepted_tokens"] > SAMPLES / 10
    counts = dict.fromkeys(expected, 0)
    for tokens in trees.tokens:
        counts[tuple(tokens)] += 1  # an outcome of probability zero is a KeyError
    statistic, cells = _chi_square(expected, counts)
    p_value = _chi_square_tail(statistic, cells - 1)
    print(f"chi-square {statistic:.1f} over {cells} cells, p = {p_value:.3f}")
    assert p_value > SIGNIFICANCE


def _chi_square(expected: dict, counts: dict) -> tuple[float, int]:
    """The statistic over outcomes expected five times or more, the rest pooled into one cell."""
    cells: list[tuple[float, int]] = []
    pooled_expected, pooled_count = 0.0, 0
    for outcome, probability in expected.items():
        if probability * SAMPLES >= 5:
            cells.append((probability * SAMPLES, counts[outcome]))
        else:
            pooled_expected += probability * SAMPLES
            pooled_count += counts[outcome]
    if pooled_expected > 0:
        cells.append((pooled_expected, pooled_count))
    return sum((count - e) ** 2 / e for e, count in cells), len(cells)


def _chi_square_tail(statistic: float, degrees: int) -> float:
    """P(X >= statistic), by the regularised upper incomplete gamma function."""
    tail = torch.special.gammaincc(
        torch.tensor(degrees / 2, dtype=torch.float64),
        torch.tensor(statistic / 2, dtype=torch.float64),
    )
    return float(tail)


def test_the_tail_of_the_chi_square_distribution_is_right() -> None:
    assert _chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-4)
    assert _chi_square_tail(2 * math.log(10), 2) == pytest.approx(0.1)
