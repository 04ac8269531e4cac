# SPDX-License-Identifier: Apache-2.0
"""Whatever shares a batch with a tree, and however a request ends, its tokens stay the same.

Each scenario runs without speculation and with trees, on real engines; all of them in two
processes side by side, since starting one costs more than most scenarios.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from harness import Job, Result, greedy_continuation, random_prompts, run
from prompts import source_prompts
from tiny_pair import EOS_TOKEN, VOCAB


@dataclass
class Scenario:
    requests: list[dict]
    budget: int = 31
    engine: dict[str, Any] = field(default_factory=dict)
    trees_engine: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    static_tree: list[list[int]] | None = None

    def jobs(self) -> list[Job]:
        trees = Job(
            self.requests,
            budget=self.budget,
            engine=self.engine | self.trees_engine,
            speculative=self.speculative,
            policy="ddtree" if self.static_tree is None else "static",
            static_tree=self.static_tree,
        )
        return [Job(self.requests, engine=self.engine), trees]


def request(prompt: list[int], max_tokens: int, **options) -> dict:
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    params |= options.pop("params", {})
    return {"prompt": prompt, "params": params, **options}


def joining_and_leaving() -> Scenario:
    rng = random.Random(4)
    prompts = random_prompts(rng, [rng.choice([1, 2, 9, 40, 90, 130]) for _ in range(12)], VOCAB)
    requests = [
        request(prompt, rng.randrange(1, 20), at_step=2 * i) for i, prompt in enumerate(prompts)
    ]
    for i in (3, 8):
        requests[i]["abort_at"] = requests[i]["at_step"] + rng.randrange(1, 6)
    # 40 tokens a step: prompts of 90 and 130 come in chunks beside other requests' trees.
    return Scenario(requests, engine={"max_num_batched_tokens": 40, "max_num_seqs": 6})


def running_ahead() -> Scenario:
    rng = random.Random(16)
    prompts = random_prompts(rng, [3, 18, 33, 64, 90, 12], VOCAB)
    requests = [request(p, 7 + i, at_step=2 * i) for i, p in enumerate(prompts)]
    return Scenario(requests, trees_engine={"async_scheduling": True})


def preempted() -> Scenario:
    rng = random.Random(5)
    requests = [request(prompt, 36) for prompt in random_prompts(rng, [108] * 4, VOCAB)]
    # Blocks are of 128 tokens, and a request takes six: all four start, and none can go on past its
    # first block until another has been sent back.
    small = {
        "num_gpu_blocks_override": 27,
        "enable_prefix_caching": False,
        "max_num_seqs": 4,
        "max_model_len": 256,
    }
    return Scenario(requests, budget=15, engine=small)


def prompt_lengths() -> Scenario:
    rng = random.Random(8)
    requests = [request(p, 3) for p in random_prompts(rng, list(range(1, 129)), VOCAB)]
    return Scenario(requests, budget=15, engine={"max_num_seqs": 32})


def one_token_prompts() -> Scenario:
    """They join while others decode, which makes vLLM pad them with drafts, in blocks used before."""
    rng = random.Random(17)
    requests = [request(p, 3) for p in random_prompts(rng, [40] * 3, VOCAB)]
    requests += [request(p, 40, after=2) for p in random_prompts(rng, [30], VOCAB)]
    options: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 1.2},
        {"temperature": 1.0, "seed": 5},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
    ]
    for i, params in enumerate(options * 2):
        [prompt] = random_prompts(rng, [1], VOCAB)
        requests.append(request(prompt, 6, at_step=12 + i, params=params))
    # A last token that comes alone, as the third chunk of a prompt.
    for i, prompt in enumerate(random_prompts(rng, [41, 41], VOCAB)):
        requests.append(request(prompt, 6, at_step=14 + 8 * i, params={"prompt_logprobs": 1}))
    small = {
        "max_num_seqs": 4,
        "num_gpu_blocks_override": 40,
        "long_prefill_token_threshold": 20,
    }
    return Scenario(requests, budget=15, engine=small)


def context_ends() -> Scenario:
    rng = random.Random(6)
    # The model's limit of 64 tokens comes before max_tokens does, at every offset into a tree.
    requests = [request(p, 100) for p in random_prompts(rng, list(range(46, 64, 3)), VOCAB)]
    return Scenario(requests, engine={"max_model_len": 64})


def stop_tokens(tiny_pair) -> Scenario:
    rng = random.Random(10)
    requests = []
    for prompt in random_prompts(rng, [12, 20, 31], VOCAB):
        tokens = greedy_continuation(tiny_pair[0], prompt, 18)
        for depth in range(1, 18, 3):
            params = {"stop_token_ids": [tokens[depth]], "ignore_eos": False}
            requests.append(request(prompt, 18, params=params))
    return Scenario(requests, engine={"max_num_seqs": 18})


def sampled_beside_greedy() -> Scenario:
    options = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.95, "top_k": 20},
    )
    prompts = random_prompts(random.Random(11), [5, 11, 23, 37, 8, 16], VOCAB)
    requests = [
        request(prompt, 8, params={"seed": 100 + i, **extra})
        for i, (prompt, extra) in enumerate(zip(prompts, options, strict=True))
    ]
    return Scenario(requests, budget=15)


def penalised() -> Scenario:
    options = (
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.1},
        {"repetition_penalty": 1.4},
        {},
    )
    prompts = random_prompts(random.Random(12), [9, 14, 22, 30], VOCAB)
    requests = [
        request(prompt, 14, params=extra) for prompt, extra in zip(prompts, options, strict=True)
    ]
    return Scenario(requests, budget=15)


def scored() -> Scenario:
    prompts = random_prompts(random.Random(13), [9, 30, 41], VOCAB)
    return Scenario([request(p, 12, params={"logprobs": 3}) for p in prompts])


def budget_per_batch_size() -> Scenario:
    prompts = random_prompts(random.Random(14), [12, 25, 31, 8, 40, 17], VOCAB)
    requests = [request(prompt, 12, at_step=3 * i) for i, prompt in enumerate(prompts)]
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 2, 31], [3, 4, 15], [5, 8, 3]]}
    return Scenario(requests, speculative=schedule)


def context_ends_beside_another() -> Scenario:
    """A request that has reached the end sits out a step and keeps the drafts of a smaller batch.

    The other one is then given those of one request: together more rows than two requests have.
    """
    rng = random.Random(28)
    requests = [request(p, 50) for p in random_prompts(rng, [8], VOCAB)]
    requests += [request(p, 100) for p in random_prompts(rng, list(range(46, 60, 2)), VOCAB)]
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 31], [2, 2, 15]]}
    return Scenario(
        requests,
        engine={"max_model_len": 64, "max_num_seqs": 2},
        trees_engine={"async_scheduling": True},
        speculative=schedule,
    )


def static_tree_of_high_ranks() -> Scenario:
    requests = [request(p, 12) for p in random_prompts(random.Random(29), [9, 21], VOCAB)]
    return Scenario(requests, budget=2, static_tree=[[0], [5]])


@pytest.fixture(scope="module")
def scenarios(tiny_pair) -> dict[str, Scenario]:
    return {
        "joining and leaving": joining_and_leaving(),
        "running ahead": running_ahead(),
        "preempted": preempted(),
        "prompt lengths": prompt_lengths(),
        "one-token prompts": one_token_prompts(),
        "context ends": context_ends(),
        "stop tokens": stop_tokens(tiny_pair),
        "sampled beside greedy": sampled_beside_greedy(),
        "penalised": penalised(),
        "scored": scored(),
        "budget per batch size": budget_per_batch_size(),
        "context ends beside another": context_ends_beside_another(),
        "static tree of high ranks": static_tree_of_high_ranks(),
    }


@pytest.fixture(scope="module")
def runs(tiny_pair, scenarios) -> dict[str, tuple[Result, Result]]:
    results = run(tiny_pair, [job for scenario in scenarios.values() for job in scenario.jobs()])
    return {name: (results[2 * i], results[2 * i + 1]) for i, name in enumerate(scenarios)}


def assert_equal(runs: tuple[Result, Result], requests: list[dict]) -> tuple[Result, Result]:
    without, trees = runs
    for number, (plain, tree) in enumerate(zip(without.outputs, trees.outputs, strict=True)):
        if "abort_at" in requests[number]:
            shorter = min(len(plain["token_ids"]), len(tree["token_ids"]))
            assert tree["token_ids"][:shorter] == plain["token_ids"][:shorter], number
            continue
        assert tree["token_ids"] == plain["token_ids"], number
        assert tree["finish_reason"] == plain["finish_reason"], number
        assert tree["stop_reason"] == plain["stop_reason"], number
    return without, trees


def test_requests_that_join_leave_and_abort_every_step(runs, scenarios, compatibility) -> None:
    """Prefill, chunked prefill, decode with drafts and without, in one batch (complaint 4)."""
    name = "joining and leaving"
    _, trees = assert_equal(runs[name], scenarios[name].requests)
    assert trees.counters["vllm:spec_decode_num_accepted_tokens"] > 0
    compatibility.record("chunked prefill")


def test_a_step_planned_before_the_last_one_is_known(runs, scenarios, compatibility) -> None:
    """Async scheduling: the host runs ahead with upper bounds, requests end a step late."""
    assert_equal(runs["running ahead"], scenarios["running ahead"].requests)
    compatibility.record("async scheduling")


def test_preemption_under_a_small_cache(runs, scenarios, compatibility) -> None:
    _, trees = assert_equal(runs["preempted"], scenarios["preempted"].requests)
    assert trees.counters["vllm:num_preemptions"] > 0
    compatibility.record("preemption")


def test_every_prompt_length_of_a_block_and_more(runs, scenarios) -> None:
    """128 consecutive lengths (complaint 8: garbage at lengths of one residue)."""
    assert_equal(runs["prompt lengths"], scenarios["prompt lengths"].requests)


def test_a_prompt_of_one_token_joins_running_trees(runs, scenarios) -> None:
    """Its state starts from zeros, and no padding of it gets into the state or among its scores."""
    requests = scenarios["one-token prompts"].requests
    without, trees = assert_equal(runs["one-token prompts"], requests)
    for asked, plain, tree in zip(requests, without.outputs, trees.outputs, strict=True):
        if "prompt_logprobs" not in asked["params"]:
            continue
        assert len(tree["prompt_logprobs"]) == len(asked["prompt"])
        assert tree["prompt_logprobs"][0] is None
        for expected, got in zip(
            plain["prompt_logprobs"][1:], tree["prompt_logprobs"][1:], strict=True
        ):
            assert got == pytest.approx(expected, abs=2e-4)


def test_max_model_len_reached_inside_a_tree(runs, scenarios, compatibility) -> None:
    _, trees = assert_equal(runs["context ends"], scenarios["context ends"].requests)
    assert {o["finish_reason"] for o in trees.outputs} == {"length"}
    compatibility.record("--max-model-len")


def test_stop_tokens_and_end_of_text_at_every_depth(runs, scenarios) -> None:
    """A path may go on past the token that ends the request (complaint 10)."""
    _, trees = assert_equal(runs["stop tokens"], scenarios["stop tokens"].requests)
    assert "stop" in {o["finish_reason"] for o in trees.outputs}
    for output in trees.outputs:
        if output["stop_reason"] is not None:
            assert output["token_ids"][-1] in (output["stop_reason"], EOS_TOKEN)


def test_greedy_and_sampled_requests_share_a_batch(runs, scenarios, compatibility) -> None:
    """Sampled output with a seed equals that of the same seed without speculation."""
    name = "sampled beside greedy"
    assert_equal(runs[name], scenarios[name].requests)
    compatibility.record("mixed batches")


def test_penalties_follow_the_path(runs, scenarios) -> None:
    """Their logits depend on the drafts before a row, so these requests' trees are chains."""
    assert_equal(runs["penalised"], scenarios["penalised"].requests)


def test_logprobs_are_those_of_the_emitted_tokens(runs, scenarios) -> None:
    without, trees = assert_equal(runs["scored"], scenarios["scored"].requests)
    for plain, tree in zip(without.outputs, trees.outputs, strict=True):
        assert len(tree["logprobs"]) == len(tree["token_ids"])
        for expected, got in zip(plain["logprobs"], tree["logprobs"], strict=True):
            assert got.keys() == expected.keys()
            for token, value in expected.items():
                assert got[token] == pytest.approx(value, abs=2e-4)


def test_a_budget_per_batch_size_takes_prefixes_of_the_trees(
    runs, scenarios, compatibility
) -> None:
    name = "budget per batch size"
    _, trees = assert_equal(runs[name], scenarios[name].requests)
    drafts = trees.counters["vllm:spec_decode_num_drafts"]
    nodes = trees.counters["vllm:spec_decode_num_draft_tokens"]
    assert 3 * drafts < nodes < 31 * drafts
    compatibility.record("num_speculative_tokens_per_batch_size")


def test_a_step_with_more_rows_than_the_stash_cuts_a_tree(runs, scenarios) -> None:
    name = "context ends beside another"
    assert_equal(runs[name], scenarios[name].requests)


def test_a_static_tree_may_have_ranks_beyond_its_number_of_nodes(runs, scenarios) -> None:
    name = "static tree of high ranks"
    assert_equal(runs[name], scenarios[name].requests)


def test_a_stop_string_inside_an_accepted_path_ends_the_text_before_it(demo_pair) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_pair[0])
    requests = []
    for prompt in source_prompts(demo_pair[0], 6, random.Random(15), 80):
        words = tokenizer.decode(greedy_continuation(demo_pair[0], prompt, 28)).split()
        # A word from the middle of the text: its last token is often not the last of its path.
        params = {"detokenize": True, "stop": [words[len(words) // 2]]}
        requests.append(request(prompt, 28, params=params))
    scenario = Scenario(requests, engine={"skip_tokenizer_init": False})
    runs = run(demo_pair, scenario.jobs())
    without, trees = assert_equal((runs[0], runs[1]), requests)
    assert [o["text"] for o in trees.outputs] == [o["text"] for o in without.outputs]
    assert {o["finish_reason"] for o in trees.outputs} == {"stop"}
