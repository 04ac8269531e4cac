# SPDX-License-Identifier: Apache-2.0
"""Whatever shares a batch with a tree, and however a request ends, its tokens stay the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import Job, Result, random_prompts, run
from prompts import source_prompts
from tiny_pair import EOS_TOKEN, VOCAB

BUDGET = 31


def request(prompt: list[int] | dict, max_tokens: int, **options) -> dict:
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    params |= options.pop("params", {})
    return {"prompt": prompt, "params": params, **options}


def both(
    pair: tuple[Path, Path], requests: list[dict], budget: int = BUDGET, **engine
) -> tuple[Result, Result]:
    """The same requests without speculation and with trees."""
    without, trees = run(
        pair, [Job(requests, engine=engine), Job(requests, budget=budget, engine=engine)]
    )
    return without, trees


def assert_equal(without: Result, trees: Result, requests: list[dict]) -> None:
    for number, (plain, tree) in enumerate(zip(without.outputs, trees.outputs, strict=True)):
        if "abort_at" in requests[number]:
            shorter = min(len(plain["token_ids"]), len(tree["token_ids"]))
            assert tree["token_ids"][:shorter] == plain["token_ids"][:shorter], number
            continue
        assert tree["token_ids"] == plain["token_ids"], number
        assert tree["finish_reason"] == plain["finish_reason"], number
        assert tree["stop_reason"] == plain["stop_reason"], number


def test_requests_that_join_leave_and_abort_every_step(tiny_pair) -> None:
    """Prefill, chunked prefill, decode with drafts and without, in one batch (complaint 4)."""
    rng = random.Random(4)
    prompts = random_prompts(rng, [rng.choice([1, 2, 9, 40, 90, 130]) for _ in range(16)], VOCAB)
    requests = [
        request(prompt, rng.randrange(1, 25), at_step=2 * i) for i, prompt in enumerate(prompts)
    ]
    for i in (3, 8, 13):
        requests[i]["abort_at"] = requests[i]["at_step"] + rng.randrange(1, 6)
    # 40 tokens a step: prompts of 90 and 130 come in chunks beside other requests' trees.
    without, trees = both(tiny_pair, requests, max_num_batched_tokens=40, max_num_seqs=6)
    assert_equal(without, trees, requests)
    assert trees.counters["vllm:spec_decode_num_accepted_tokens"] > 0


def test_a_step_planned_before_the_last_one_is_known(tiny_pair) -> None:
    """Async scheduling: the host runs ahead with upper bounds, requests end a step late."""
    rng = random.Random(16)
    prompts = random_prompts(rng, [3, 18, 33, 64, 90, 12], VOCAB)
    requests = [request(p, 9 + i, at_step=2 * i) for i, p in enumerate(prompts)]
    without, trees = run(
        tiny_pair, [Job(requests), Job(requests, budget=31, engine={"async_scheduling": True})]
    )
    assert_equal(without, trees, requests)


def test_preemption_under_a_small_cache(tiny_pair) -> None:
    rng = random.Random(5)
    requests = [request(prompt, 70) for prompt in random_prompts(rng, [60] * 5, VOCAB)]
    blocks = {"num_gpu_blocks_override": 17, "enable_prefix_caching": False}
    without, trees = both(tiny_pair, requests, budget=15, max_num_seqs=5, **blocks)
    assert trees.counters["vllm:num_preemptions"] > 0
    assert_equal(without, trees, requests)


def test_every_prompt_length_of_a_block_and_more(tiny_pair) -> None:
    """128 consecutive lengths (complaint 8: garbage at lengths of one residue)."""
    rng = random.Random(8)
    requests = [request(p, 5) for p in random_prompts(rng, list(range(1, 129)), VOCAB)]
    without, trees = both(tiny_pair, requests, max_num_seqs=32)
    assert_equal(without, trees, requests)


def test_max_model_len_reached_inside_a_tree(tiny_pair) -> None:
    rng = random.Random(6)
    # The model's limit of 64 tokens comes before max_tokens does, at every offset into a tree.
    lengths = list(range(40, 64, 3))
    requests = [request(p, 100) for p in random_prompts(rng, lengths, VOCAB)]
    without, trees = both(tiny_pair, requests, max_model_len=64)
    assert_equal(without, trees, requests)
    assert {o["finish_reason"] for o in trees.outputs} == {"length"}


def test_stop_tokens_and_end_of_text_at_every_depth(tiny_pair) -> None:
    """A path may go on past the token that ends the request (complaint 10)."""
    rng = random.Random(10)
    prompts = random_prompts(rng, [12, 20, 31, 44], VOCAB)
    free = [request(prompt, 24) for prompt in prompts]
    (reference,) = run(tiny_pair, [Job(free)])
    requests = []
    for prompt, tokens in zip(prompts, reference.tokens, strict=True):
        for depth in range(1, 24, 3):
            stop = tokens[depth]
            params = {"stop_token_ids": [stop], "ignore_eos": False}
            requests.append(request(prompt, 24, params=params))
    without, trees = both(tiny_pair, requests, max_num_seqs=16)
    assert_equal(without, trees, requests)
    assert {o["finish_reason"] for o in trees.outputs} >= {"stop"}
    for output in trees.outputs:
        if output["stop_reason"] is not None:
            assert output["token_ids"][-1] in (output["stop_reason"], EOS_TOKEN)


def test_greedy_and_sampled_requests_share_a_batch(tiny_pair) -> None:
    rng = random.Random(11)
    requests = [
        request(prompt, 8, params={"temperature": temperature, "seed": 100 + i, **extra})
        for i, (prompt, temperature, extra) in enumerate(
            zip(
                random_prompts(rng, [5, 11, 23, 37, 8, 16], VOCAB),
                (0.0, 1.0, 0.7, 1.3, 0.0, 1.0),
                ({}, {}, {"top_p": 0.8}, {"top_k": 7}, {}, {"min_p": 0.1}),
                strict=True,
            )
        )
    ]
    without, trees = both(tiny_pair, requests, budget=15)
    assert_equal(without, trees, requests)


def test_penalties_follow_the_path(tiny_pair) -> None:
    """Their logits depend on the drafts before a row, so these requests' trees are chains."""
    rng = random.Random(12)
    options = (
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.1},
        {"repetition_penalty": 1.4},
        {},
    )
    requests = [
        request(prompt, 16, params=extra)
        for prompt, extra in zip(random_prompts(rng, [9, 14, 22, 30], VOCAB), options, strict=True)
    ]
    without, trees = both(tiny_pair, requests, budget=15)
    assert_equal(without, trees, requests)


def test_logprobs_are_those_of_the_emitted_tokens(tiny_pair) -> None:
    rng = random.Random(13)
    requests = [
        request(p, 12, params={"logprobs": 3}) for p in random_prompts(rng, [9, 30, 41], VOCAB)
    ]
    without, trees = both(tiny_pair, requests)
    assert_equal(without, trees, requests)
    for plain, tree in zip(without.outputs, trees.outputs, strict=True):
        assert len(tree["logprobs"]) == len(tree["token_ids"])
        for expected, got in zip(plain["logprobs"], tree["logprobs"], strict=True):
            assert got.keys() == expected.keys()
            for token, value in expected.items():
                assert got[token] == pytest.approx(value, abs=2e-4)


def test_a_budget_per_batch_size_takes_prefixes_of_the_trees(tiny_pair) -> None:
    rng = random.Random(14)
    requests = [
        request(prompt, 14, at_step=3 * i)
        for i, prompt in enumerate(random_prompts(rng, [12, 25, 31, 8, 40, 17], VOCAB))
    ]
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 2, 31], [3, 4, 15], [5, 8, 3]]}
    without, trees = run(tiny_pair, [Job(requests), Job(requests, budget=31, speculative=schedule)])
    assert_equal(without, trees, requests)
    drafts = trees.counters["vllm:spec_decode_num_drafts"]
    nodes = trees.counters["vllm:spec_decode_num_draft_tokens"]
    assert 3 * drafts < nodes < 31 * drafts


def test_a_stop_string_inside_an_accepted_path_ends_the_text_before_it(demo_pair) -> None:
    rng = random.Random(15)
    free = [request(prompt, 40) for prompt in source_prompts(demo_pair[0], 6, rng, 80)]
    tokenizer = {"skip_tokenizer_init": False}
    for each in free:
        each["params"]["detokenize"] = True
    (reference,) = run(demo_pair, [Job(free, engine=tokenizer)])
    requests = []
    for each, output in zip(free, reference.outputs, strict=True):
        words = output["text"].split()
        # A word from the middle of the text: its last token is often not the last of its path.
        params = {"detokenize": True, "stop": [words[len(words) // 2]]}
        requests.append(request(each["prompt"], 40, params=params))
    without, trees = both(demo_pair, requests, **tokenizer)
    assert_equal(without, trees, requests)
    assert [o["text"] for o in trees.outputs] == [o["text"] for o in without.outputs]
    assert {o["finish_reason"] for o in trees.outputs} == {"stop"}
