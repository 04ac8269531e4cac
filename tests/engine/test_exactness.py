# SPDX-License-Identifier: Apache-2.0
"""Trees change how many tokens a step emits, never which.

In float32 on a CPU, where the kernels of a run with trees and of one without are the same, tokens
must be equal one by one.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from harness import Job, Result, run
from prompts import source_prompts

BINARY_TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0]]
SPINE = [[0] * depth for depth in range(1, 16)]
ENGINES = {
    "ddtree-1": {"budget": 1},
    "ddtree-7": {"budget": 7},
    "ddtree-15": {"budget": 15},
    "ddtree-31": {"budget": 31},
    "ddtree-63": {"budget": 63},
    "ddtree-127": {"budget": 127},
    "chain-7": {"budget": 7, "policy": "chain"},
    "chain-15": {"budget": 15, "policy": "chain"},
    "static-9": {"budget": 9, "policy": "static", "static_tree": BINARY_TREE},
    "static-spine": {"budget": 15, "policy": "static", "static_tree": SPINE},
}
PROMPTS_PER_ENGINE = 20
PLAIN_PROMPTS_PER_ENGINE = 5
# The same prompts for every engine whose acceptance is compared.
COMPARED = ("chain-15", "static-spine", "ddtree-15", "ddtree-31", "ddtree-63")
COMPARED_PROMPTS = 6


def greedy(prompt: list[int], max_tokens: int) -> dict:
    return {
        "prompt": prompt,
        "params": {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True},
    }


@pytest.fixture(scope="module")
def requests(demo_pair: tuple[Path, Path], request: pytest.FixtureRequest) -> dict[str, list[dict]]:
    """Per engine its own prompts, then the compared ones."""
    rng = random.Random(20)
    common = [greedy(p, 24) for p in source_prompts(demo_pair[0], COMPARED_PROMPTS, rng, 60)]
    own = {
        name: [greedy(p, 8) for p in source_prompts(demo_pair[0], PROMPTS_PER_ENGINE, rng)]
        for name in ENGINES
    }
    return {name: own[name] + (common if name in COMPARED else []) for name in ENGINES}


@pytest.fixture(scope="module")
def without_speculation(
    demo_pair: tuple[Path, Path], requests: dict[str, list[dict]]
) -> dict[tuple[int, ...], list[int]]:
    """Tokens by prompt, of the compared prompts and of some of every engine's own.

    Stepping one token at a time is the slow way, so not of all: the rest is held against Hugging
    Face's model, as these are.
    """
    unique = {
        tuple(r["prompt"]): r
        for rs in requests.values()
        for r in rs[:PLAIN_PROMPTS_PER_ENGINE] + rs[PROMPTS_PER_ENGINE:]
    }
    halves = [list(unique.values())[half::2] for half in (0, 1)]
    results = run(demo_pair, [Job(half, engine={"max_num_seqs": 32}) for half in halves])
    return {
        tuple(r["prompt"]): tokens
        for half, result in zip(halves, results, strict=True)
        for r, tokens in zip(half, result.tokens, strict=True)
    }


@pytest.fixture(scope="module")
def hugging_face(demo_pair: tuple[Path, Path]):
    """The target's greedy choice after every prefix of ``prompt + tokens``, by an independent model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_pair[0], dtype=torch.float32).eval()

    def choices(prompt: list[int], tokens: list[int]) -> list[int]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
        return logits[len(prompt) - 1 : -1].argmax(-1).tolist()

    return choices


@pytest.fixture(scope="module")
def with_trees(demo_pair: tuple[Path, Path], requests: dict[str, list[dict]]) -> dict[str, Result]:
    jobs = [
        Job(requests[name], **options, engine={"max_num_seqs": 8})
        for name, options in ENGINES.items()
    ]
    return dict(zip(ENGINES, run(demo_pair, jobs), strict=True))


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_equal_those_without_speculation(
    name: str, requests, without_speculation, with_trees
) -> None:
    compared = 0
    for request, tokens in zip(requests[name], with_trees[name].tokens, strict=True):
        expected = without_speculation.get(tuple(request["prompt"]))
        if expected is not None:
            assert tokens == expected
            compared += 1
    assert compared >= PLAIN_PROMPTS_PER_ENGINE


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_tokens_are_hugging_faces_choices(name, requests, with_trees, hugging_face) -> None:
    for request, tokens in zip(requests[name], with_trees[name].tokens, strict=True):
        assert tokens == hugging_face(request["prompt"], tokens)


def test_tokens_without_speculation_are_hugging_faces_choices(
    without_speculation, hugging_face
) -> None:
    for prompt, tokens in without_speculation.items():
        assert tokens == hugging_face(list(prompt), tokens)


def test_a_tree_is_never_worse_than_the_chain(with_trees, requests) -> None:
    chain = _common_tokens_per_step(with_trees["chain-15"], requests["chain-15"])
    at = {
        n: _common_tokens_per_step(with_trees[f"ddtree-{n}"], requests[f"ddtree-{n}"])
        for n in (15, 31, 63)
    }
    print("tokens per step:", {"chain": chain, **at})
    assert at[15] >= 0.99 * chain
    assert at[31] > chain
    assert at[63] > at[31] > at[15]


def test_a_spine_only_tree_accepts_exactly_what_the_chain_accepts(with_trees, requests) -> None:
    chain, spine = with_trees["chain-15"], with_trees["static-spine"]
    common = slice(PROMPTS_PER_ENGINE, None)
    assert [o["emitted"] for o in chain.outputs[common]] == [
        o["emitted"] for o in spine.outputs[common]
    ]


def _common_tokens_per_step(result: Result, requests: list[dict]) -> float:
    """Tokens per verification over the compared prompts alone."""
    emitted = [e for o in result.outputs[PROMPTS_PER_ENGINE:] for e in o["emitted"][1:]]
    assert len(requests) == PROMPTS_PER_ENGINE + COMPARED_PROMPTS
    return sum(emitted) / len(emitted)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_thousands_of_prompts(demo_pair, hugging_face, seed) -> None:
    """Two hundred new prompts for every engine, two thousand in all; hours on two cores."""
    rng = random.Random(seed)
    asked = {
        name: [greedy(p, 16) for p in source_prompts(demo_pair[0], 200, rng)] for name in ENGINES
    }
    jobs = [
        Job(asked[name], **options, engine={"max_num_seqs": 8}) for name, options in ENGINES.items()
    ]
    results = run(demo_pair, jobs, timeout_s=5 * 3600)
    for name, result in zip(ENGINES, results, strict=True):
        for request, tokens in zip(asked[name], result.tokens, strict=True):
            assert tokens == hugging_face(request["prompt"], tokens), (name, request["prompt"])
