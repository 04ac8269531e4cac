# SPDX-License-Identifier: Apache-2.0
"""Structured output by each backend, and engine options that a client does not see.

As in test_batches.py: every scenario runs without speculation and with trees, in two processes. The
tiny pair's vocabulary has one character a token, so a drafter of random weights often drafts what a
grammar leaves, and the end of thinking lies inside accepted paths.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness import Job, Result, greedy_continuation, random_prompts, run
from prompts import source_prompts
from tiny_pair import END_OF_THINKING_TOKEN, EOS_TOKEN, THINK_TOKEN, VOCAB
from tiny_vision_pair import IMAGE, VISION_END, VISION_START, write_tiny_vision_pair

DIGITS = list(range(16, 26))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["cab", "cad", "dab"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json_object": {"json_object": True},
    "json_schema": {"json": SCHEMA},
    "regex": {"regex": "[0-9]{3,5}(-[a-f]{2,4}){1,3}"},
    "choice": {"choice": ["abacad", "abaca", "dead", "deaf"]},
    "grammar": {"grammar": 'root ::= item ("," item)*\nitem ::= [a-d]{1,3} ":" [0-9]{1,4}'},
}


def constrained(target: Path) -> list[dict]:
    """Every kind of constraint, greedy and sampled, with and without thinking before it."""
    rng = random.Random(31)
    requests = []
    for i, constraint in enumerate(CONSTRAINTS.values()):
        for sampled in (False, True):
            params: dict[str, Any] = {"max_tokens": 16, "structured_outputs": constraint}
            params |= {"temperature": 1.0, "seed": i} if sampled else {"temperature": 0.0}
            [prompt] = random_prompts(rng, [6 + i], VOCAB)
            prompt = [t for t in prompt if t not in (THINK_TOKEN, END_OF_THINKING_TOKEN)]
            # Without a thought in the prompt the reasoning parser takes all that follows for one.
            closed = [*prompt, THINK_TOKEN, END_OF_THINKING_TOKEN]
            requests.append({"prompt": closed, "params": params, "at_step": i})
    for i, prompt in enumerate(prompts_that_end_thinking(target, 3, rng)):
        thinking = {
            "max_tokens": 24,
            "min_tokens": 9,
            "structured_outputs": {"regex": "[0-4]{4,6}"},
            "temperature": 0.0,
            "allowed_token_ids": THOUGHTS,
        }
        requests.append({"prompt": prompt, "params": thinking, "at_step": i})
    # What is not constrained shares the batch.
    requests.append(
        {
            "prompt": random_prompts(rng, [9], VOCAB)[0],
            "params": {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True},
        }
    )
    return requests


# Five digits, the end of thinking and, once min_tokens are there, the end of text.
THOUGHTS = [EOS_TOKEN, END_OF_THINKING_TOKEN, *DIGITS[:5]]


def prompts_that_end_thinking(target: Path, count: int, rng: random.Random) -> list[list[int]]:
    """Prompts after which the target, left those tokens, ends thinking at the 2nd to 8th."""
    found: list[list[int]] = []
    while len(found) < count:
        [prompt] = random_prompts(rng, [5], VOCAB)
        prompt = [t for t in prompt if t not in (THINK_TOKEN, END_OF_THINKING_TOKEN)]
        prompt.append(THINK_TOKEN)
        thought = greedy_continuation(target, prompt, 8, THOUGHTS[1:])
        if END_OF_THINKING_TOKEN in thought[1:]:
            found.append(prompt)
    return found


def structured_engine(backend: str) -> dict[str, Any]:
    return {
        "skip_tokenizer_init": False,
        "structured_outputs_config": {"backend": backend, "reasoning_parser": "qwen3"},
    }


def greedy(prompt: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return {"prompt": prompt, "params": params, **options}


def one_after_another() -> list[dict]:
    prompts = random_prompts(random.Random(33), [4, 17, 290], VOCAB)
    again = [
        greedy(prompts[2], 6, after=2),
        greedy(prompts[2], 6, after=3, reset_prefix_cache=True),
        greedy(prompts[2], 6, after=4),
    ]
    first = [greedy(prompt, 12) for prompt in prompts]
    first[0]["params"] |= {"temperature": 0.9, "seed": 6, "top_k": 9, "logprobs": 4}
    first[1]["params"] |= {"presence_penalty": 1.1, "logprobs": 3}
    return [*first, *again]


def many_at_once() -> list[dict]:
    rng = random.Random(34)
    lengths = [rng.randrange(1, 40) for _ in range(48)]
    return [greedy(prompt, 3) for prompt in random_prompts(rng, lengths, VOCAB)]


def prioritised() -> list[dict]:
    """With trees four of these fill the blocks: what comes later and matters more sends others back."""
    prompts = random_prompts(random.Random(37), [108] * 5, VOCAB)
    return [
        greedy(prompt, 30, priority=priority, at_step=step)
        for prompt, priority, step in zip(prompts, [5, 5, 1, 0, 9], [0, 0, 3, 6, 6], strict=True)
    ]


PRIORITY = {
    "scheduling_policy": "priority",
    "num_gpu_blocks_override": 27,
    "enable_prefix_caching": False,
    "max_num_seqs": 4,
    "max_model_len": 256,
}


def embedded() -> list[dict]:
    prompts = random_prompts(random.Random(38), [5, 17, 60], VOCAB)
    requests = [greedy(prompt, 10, as_embeddings=True) for prompt in prompts]
    requests[1]["params"] |= {"temperature": 1.0, "seed": 3}
    # What is given as tokens shares the batch.
    return [*requests, greedy(prompts[2], 10)]


def sharing_parts_of_blocks() -> list[dict]:
    """Prompts that begin alike, but part inside a block of 128 tokens."""
    first, other, third = random_prompts(random.Random(39), [300, 90, 160], VOCAB)
    prompts = [first, first, first[:200] + other, first[:150] + other[:10], first[:260] + third[:3]]
    requests = [greedy(prompt, 8, after=i - 1) for i, prompt in enumerate(prompts)]
    del requests[0]["after"]
    return requests


SINGLE = {
    "max_num_seqs": 1,
    "prefix_cache_retention_interval": 128,
    "logprobs_mode": "processed_logprobs",
}


def jobs_by_name(target: Path) -> dict[str, list[Job]]:
    structured = constrained(target)
    return {
        "xgrammar": [
            Job(structured, engine=structured_engine("xgrammar")),
            Job(structured, budget=15, engine=structured_engine("xgrammar")),
            Job(
                structured,
                budget=15,
                engine=structured_engine("xgrammar") | {"async_scheduling": True},
            ),
        ],
        "guidance": [
            Job(structured, engine=structured_engine("guidance")),
            Job(structured, budget=15, engine=structured_engine("guidance")),
        ],
        "one sequence": [
            Job(one_after_another(), engine=SINGLE),
            Job(one_after_another(), budget=15, engine=SINGLE),
        ],
        "many sequences": [
            Job(many_at_once(), engine={"max_num_seqs": 48}),
            Job(many_at_once(), budget=7, engine={"max_num_seqs": 48}),
        ],
        "priority": [
            Job(prioritised(), engine=PRIORITY),
            Job(prioritised(), budget=15, engine=PRIORITY),
        ],
        "embeddings": [
            Job(embedded(), engine={"enable_prompt_embeds": True}),
            Job(embedded(), budget=15, engine={"enable_prompt_embeds": True}),
        ],
        "match unit": [
            Job(sharing_parts_of_blocks(), engine={"prefix_match_unit": 16}),
            Job(sharing_parts_of_blocks(), budget=15, engine={"prefix_match_unit": 16}),
        ],
    }


SLOW = ("guidance", "many sequences", "priority", "embeddings", "match unit")


@pytest.fixture(scope="module")
def jobs(tiny_pair, request: pytest.FixtureRequest) -> dict[str, list[Job]]:
    found = jobs_by_name(tiny_pair[0])
    if request.config.getoption("--slow"):
        return found
    return {name: group for name, group in found.items() if name not in SLOW}


@pytest.fixture(scope="module")
def runs(tiny_pair, jobs) -> dict[str, list[Result]]:
    results = iter(run(tiny_pair, [job for group in jobs.values() for job in group]))
    return {name: [next(results) for _ in group] for name, group in jobs.items()}


def assert_same(plain: Result, trees: Result) -> None:
    for number, (expected, got) in enumerate(zip(plain.outputs, trees.outputs, strict=True)):
        for key in ("token_ids", "finish_reason", "stop_reason"):
            assert got[key] == expected[key], (number, key)


@pytest.mark.parametrize("backend", ["xgrammar", pytest.param("guidance", marks=pytest.mark.slow)])
def test_constrained_output_is_that_without_speculation(backend, jobs, runs, compatibility) -> None:
    plain, trees, *ahead = runs[backend]
    thought = 0
    for request, output in zip(jobs[backend][0].requests, plain.outputs, strict=True):
        if request["prompt"][-1] == THINK_TOKEN and END_OF_THINKING_TOKEN in output["token_ids"]:
            thought += 1
    assert thought >= 2, "no thinking ended, so no constraint began after one"
    for result in (trees, *ahead):
        assert_same(plain, result)
    compatibility.record(f"backend {backend}")


# What the demo target would write anyway, so that branches of a tree would be accepted often.
NAMES_AND_CALLS = r"[a-z_A-Z0-9 ().,:=\n]{10,16}"


def constrained_source(target: Path) -> list[dict]:
    prompts = source_prompts(target, 8, random.Random(36), 40)
    requests = []
    for i, prompt in enumerate(prompts):
        request = greedy(prompt, 14)
        request["params"] |= {
            "structured_outputs": {"regex": NAMES_AND_CALLS},
            "ignore_eos": False,
        }
        if i % 2:
            request["params"] |= {"temperature": 0.7, "seed": i}
        requests.append(request)
    return requests


def test_a_constraint_follows_the_path_and_not_the_rows(demo_pair) -> None:
    """Were such a tree not a chain, its rows would be masked by what other branches say."""
    requests = constrained_source(demo_pair[0])
    options = {"skip_tokenizer_init": False}
    plain, trees = run(
        demo_pair, [Job(requests, engine=options), Job(requests, budget=15, engine=options)]
    )
    assert_same(plain, trees)
    print(f"{trees.tokens_per_step:.2f} tokens per verification of a constrained request")
    assert trees.tokens_per_step > 1.2


def test_one_sequence_at_a_time_and_an_emptied_prefix_cache(runs, compatibility) -> None:
    plain, trees = runs["one sequence"]
    assert_same(plain, trees)
    cached = [output["num_cached"] for output in trees.outputs[-3:]]
    assert cached[0] == cached[2] > cached[1] == 0
    compatibility.record("--max-num-seqs of 1")
    compatibility.record("reset_prefix_cache")


def test_processed_logprobs_are_those_after_penalties_and_top_k(runs, compatibility) -> None:
    plain, trees = runs["one sequence"]
    for number in (0, 1):
        expected, got = plain.outputs[number]["logprobs"], trees.outputs[number]["logprobs"]
        assert len(got) == len(expected) == 12
        for wanted, found in zip(expected, got, strict=True):
            assert found == pytest.approx(wanted, abs=5e-4)
    compatibility.record("--logprobs-mode")


@pytest.mark.slow
def test_many_sequences_at_once(runs, compatibility) -> None:
    assert_same(*runs["many sequences"])
    compatibility.record("--max-num-seqs of 48")


@pytest.mark.slow
def test_requests_of_another_priority_are_sent_back_and_go_on(runs, compatibility) -> None:
    plain, trees = runs["priority"]
    assert_same(plain, trees)
    assert trees.counters["vllm:num_preemptions"] > 0
    compatibility.record("--scheduling-policy priority")


@pytest.mark.slow
def test_a_prompt_of_embeddings_gives_the_tokens_of_its_tokens(runs, compatibility) -> None:
    plain, trees = runs["embeddings"]
    assert_same(plain, trees)
    assert trees.outputs[2]["token_ids"] == trees.outputs[3]["token_ids"]
    compatibility.record("--enable-prompt-embeds")


@pytest.mark.slow
def test_prefixes_that_part_inside_a_block_give_the_same_tokens(runs, compatibility) -> None:
    plain, trees = runs["match unit"]
    assert_same(plain, trees)
    # A hit ends a block early, as with every drafter: shorter, but there is one.
    for result, longest in ((plain, 288), (trees, 128)):
        assert max(output["num_cached"] for output in result.outputs) == longest
    compatibility.record("--prefix-match-unit")


def test_images_give_the_same_tokens(tmp_path, compatibility) -> None:
    """M-RoPE: after an image a token's position is not its place in the sequence."""
    image = [VISION_START, IMAGE, VISION_END]
    requests = [
        greedy([10, 11, *image, 20, 22], 16, images=[[0, 64, 64]]),
        greedy([*image, 20, *image, 22, 25], 14, images=[[1, 64, 64], [2, 96, 64]], at_step=2),
        greedy([9, 8, 20, 17], 12, at_step=3),
        greedy([*image, 30], 9, images=[[3, 64, 128]], at_step=4),
    ]
    requests[3]["params"] |= {"temperature": 1.0, "seed": 5}
    options = {
        "skip_tokenizer_init": False,
        "max_num_seqs": 4,
        "limit_mm_per_prompt": {"image": 2, "video": 0},
    }
    plain, trees = run(
        write_tiny_vision_pair(tmp_path),
        [Job(requests, engine=options), Job(requests, budget=31, engine=options)],
    )
    assert_same(plain, trees)
    assert trees.counters["vllm:spec_decode_num_accepted_tokens"] > 0
    compatibility.record("images")


def test_two_ranks_draft_the_same_trees_and_give_the_tokens_of_one(
    demo_pair, compatibility
) -> None:
    """Tensor parallelism over two processes."""
    rng = random.Random(35)
    prompts = source_prompts(demo_pair[0], 3, rng, 30)
    requests = [greedy(prompt, 8) for prompt in prompts]
    requests[2]["params"] |= {"temperature": 1.0, "seed": 4, "max_tokens": 5}
    two = {"tensor_parallel_size": 2, "max_num_seqs": 4}
    one, both = run(
        demo_pair,
        [
            Job(requests, engine={"max_num_seqs": 4}),
            Job(requests, budget=7, engine=two, compare_ranks=True),
        ],
    )
    assert_same(one, both)
    assert both.counters["vllm:spec_decode_num_accepted_tokens"] > 0
    assert len(both.digests) == 2
    assert both.digests[0] == both.digests[1]
    compatibility.record("--tensor-parallel-size")
