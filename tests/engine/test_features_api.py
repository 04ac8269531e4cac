# SPDX-License-Identifier: Apache-2.0
"""Whatever a client sends works as it does without speculation, or is refused by name.

Two real servers, one with trees, get the same requests over HTTP. The fast suite sends the first
case of each feature, --slow all of them.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
from api_cases import MODEL, Case, cases
from api_client import differences, send_all
from compatibility import SAME
from hypothesis import strategies
from malformed import malformed
from random_cases import random_case
from recorded_requests import recorded

from ddtree_vllm.smoke.server import Server, counter, running_server

READY_TIMEOUT_S = 900
BUDGET = 15
PROPERTY_S, SLOW_PROPERTY_S = 20, 600
TOOL_PARSER = "qwen3_coder"
CASES = cases(TOOL_PARSER)
FEATURES = list(dict.fromkeys(case.feature for case in CASES))


@dataclass
class Servers:
    plain: Server
    trees: Server


@contextlib.contextmanager
def started(
    pair: tuple[Path, Path], logs: Path, tool_parser: str = TOOL_PARSER
) -> Iterator[Servers]:
    target, drafter = pair
    with contextlib.ExitStack() as stack:

        def start(name: str, *options: str) -> Server:
            def command(port: int) -> list[str]:
                return [
                    *(sys.executable, "-m", "ddtree_vllm.cli", "serve", str(target), *options),
                    *("--host", "127.0.0.1", "--port", str(port)),
                    *("--served-model-name", MODEL, "--dtype", "float32"),
                    *("--max-model-len", "512", "--max-num-seqs", "8"),
                    *("--chat-template", str(Path(__file__).with_name("qwen_like.jinja"))),
                    *("--reasoning-parser", "qwen3", "--enable-scale-out"),
                    *("--enable-auto-tool-choice", "--tool-call-parser", tool_parser),
                ]

            return stack.enter_context(running_server(command, logs / f"{name}.log"))

        found = Servers(
            start("plain", "--no-speculation"),
            start("trees", "--drafter", str(drafter), "--budget", str(BUDGET)),
        )
        for server in (found.plain, found.trees):
            server.wait_until_ready(READY_TIMEOUT_S, lambda: None)
        yield found


@pytest.fixture(scope="module")
def servers(demo_pair, tmp_path_factory) -> Iterator[Servers]:
    with started(demo_pair, tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[tuple[Case, bool]]:
    """Cases to send, and whether streamed."""
    if request.config.getoption("--slow"):
        return [(c, False) for c in CASES] + [(c, True) for c in CASES if c.stream]
    return [(case, case.stream) for case in CASES if case.number == 1]


def ask_both(
    servers: Servers, asked: list[tuple[Case, bool]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answers without speculation and those with trees."""
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(send_all, s.url, asked) for s in (servers.plain, servers.trees)]
        plain, trees = (future.result() for future in both)
    return plain, trees


@pytest.fixture(scope="module")
def answers(servers, asked) -> tuple[dict[str, Any], dict[str, Any]]:
    return ask_both(servers, asked)


def said(answers: dict[str, Any]) -> list[str]:
    """Every text of a chat's answers."""
    return [
        choice.get("message", choice)["content"]
        for answer in answers.values()
        for choice in answer["choices"]
    ]


def of_case(answers: dict[str, Any], case: Case) -> dict[str, Any]:
    return {name: answers[name] for name in (case.name, case.name + " streamed") if name in answers}


@pytest.mark.parametrize("feature", FEATURES)
def test_trees_answer_as_no_speculation_does(feature, asked, answers, compatibility) -> None:
    plain, trees = answers
    found = SAME
    compared = 0
    for case in {id(case): case for case, _ in asked if case.feature == feature}.values():
        expected, got = of_case(plain, case), of_case(trees, case)
        compared += len(expected)
        if case.unserved:
            assert not differences(expected, got)
            found = refusal(got, case.unserved)
            continue
        assert {answer["http_status"] for answer in expected.values()} == {200}, expected
        if case.refused:
            found = refusal(got, case.refused)
            continue
        assert not differences(expected, got)
        assert_holds(case, expected)
    assert compared
    compatibility.record(feature, found)


def refusal(answers: dict[str, Any], named: str) -> str:
    [message] = {answer["error"]["message"] for answer in answers.values()}
    assert {answer["http_status"] for answer in answers.values()} == {400}
    assert named in message
    return f"refused: {message.rstrip('.')}"


def assert_holds(case: Case, answers: dict[str, Any]) -> None:
    """What a constraint makes certain, whatever the model: else the same wrong answer twice would do."""
    for text in said(answers) if case.holds else ():
        assert re.match(case.holds, text), (case.name, text)
    for answer in answers.values() if case.calls else ():
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        calls = called(choice)
        assert [name for name, _ in calls] == ["add"] * case.calls
        assert [arguments.keys() for _, arguments in calls] == [{"a", "b"}] * case.calls


def called(choice: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The tool calls of an answer, of a whole one or of a stream's joined parts."""
    if "message" in choice:
        functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    else:
        functions = list((choice.get("tool_calls") or {}).values())
    return [(call["name"], json.loads(call["arguments"])) for call in functions]


def test_the_parser_of_tool_calls_finds_those_that_are_there(answers, compatibility) -> None:
    for found in answers:
        for case in CASES:
            if case.calls:
                assert_holds(case, of_case(found, case))
    compatibility.record(f"--tool-call-parser {TOOL_PARSER}")


@pytest.mark.slow
def test_another_parser_of_tool_calls_answers_the_same(demo_pair, tmp_path, compatibility) -> None:
    tools = [case for case in cases("hermes") if case.feature.startswith("tool ")]
    asked = [(case, stream) for case in tools for stream in (False, True)]
    with started(demo_pair, tmp_path, "hermes") as servers:
        plain, trees = ask_both(servers, asked)
    assert not differences(plain, trees)
    for case in tools:
        assert_holds(case, of_case(plain, case))
    assert sum(case.calls for case in tools) >= 3
    compatibility.record("--tool-call-parser hermes")


@pytest.mark.slow
def test_streamed_deltas_join_to_the_whole_answer(answers) -> None:
    """Needs --slow, which sends a case whole too."""
    _, trees = answers
    for case in CASES:
        if not case.stream or case.refused or case.unserved:
            continue
        # The demo target spells <tool_call> out of letters. A stream's parser looks for the token, and
        # would see the letters as content, in a stream without speculation too.
        if case.body.get("tools") and not case.calls:
            continue
        whole, streamed = trees[case.name], trees[case.name + " streamed"]
        for a, b in zip(whole["choices"], streamed["choices"], strict=True):
            message = a.get("message", a)
            for key in ("text", "content", "reasoning"):
                assert (message.get(key) or "") == (b.get(key) or ""), (case.name, key)
            assert a["finish_reason"] == b["finish_reason"], case.name
            if a["finish_reason"] == "tool_calls":
                assert called(a) == called(b) != [], case.name


def test_metrics_of_trees_agree_with_those_of_vllm(servers, answers) -> None:
    text = httpx.get(f"{servers.trees.url}/metrics", timeout=60).text
    # vLLM leaves out the last step of a request whose stop string ended it meanwhile.
    accepted = counter(text, "vllm:spec_decode_num_accepted_tokens_total")
    ours = counter(text, "ddtree:accepted_nodes_total")
    assert 50 < accepted <= ours <= 1.05 * accepted
    for depth in range(1, BUDGET + 1):
        at_depth = rf'ddtree:accepted_nodes_total{{depth="{depth}"}} '
        [line] = [line for line in text.splitlines() if line.startswith(at_depth)]
        theirs = sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{")
            and f'position="{depth - 1}"' in line
        )
        assert theirs <= float(line.removeprefix(at_depth)) <= theirs + ours - accepted
    verifications = counter(text, "ddtree:verifications_total")
    drafted = counter(text, "ddtree:drafted_nodes_total")
    assert 0 < verifications <= 1.05 * counter(text, "vllm:spec_decode_num_drafts_total")
    assert verifications <= drafted <= verifications * BUDGET
    assert 0 < counter(text, "ddtree:branch_wins_total") < ours
    assert counter(text, "ddtree:budget_nodes") == BUDGET
    assert 0 < counter(text, "ddtree:budget_in_use_nodes") <= BUDGET
    assert counter(text, "ddtree:acceptance_length_tokens_sum") == verifications + ours
    assert "ddtree:" not in httpx.get(f"{servers.plain.url}/metrics", timeout=60).text


def test_constrained_requests_take_fewer_steps_than_tokens(servers) -> None:
    """Their trees are chains; that still has to give more than no speculation would."""
    asked = [
        (case, False)
        for case in CASES
        if case.feature in ("json_object", "json_schema", "regex") and not case.body.get("seed")
    ]
    before = acceptance(servers.trees)
    send_all(servers.trees.url, asked)
    after = acceptance(servers.trees)
    tokens, verifications = (b - a for a, b in zip(before, after, strict=True))
    print(f"{tokens / verifications:.2f} tokens per verification of a constrained request")
    assert tokens / verifications > 1.2


def acceptance(server: Server) -> tuple[float, float]:
    """Tokens that verifications gave, and verifications."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    name = "ddtree:acceptance_length_tokens"
    return counter(text, f"{name}_sum"), counter(text, f"{name}_count")


def running(server: Server) -> float:
    return counter(httpx.get(f"{server.url}/metrics", timeout=60).text, "vllm:num_requests_running")


def wait_until_running(server: Server, count: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    seen: list[float] = []
    while (now := running(server)) != count:
        seen.append(now)
        assert time.monotonic() < deadline, f"requests running were {seen}, never {count}"
        time.sleep(0.1)


def test_a_closed_connection_ends_its_request(servers, compatibility) -> None:
    def tokens() -> float:
        text = httpx.get(f"{servers.trees.url}/metrics", timeout=60).text
        return counter(text, "vllm:generation_tokens_total")

    body = {"model": MODEL, "prompt": "def push(", "max_tokens": 480, "ignore_eos": True}
    before = tokens()
    with httpx.stream(
        "POST", f"{servers.trees.url}/v1/completions", json=body | {"stream": True}, timeout=120
    ) as stream:
        lines = stream.iter_lines()  # held: httpx closes the connection with it
        next(lines)
        wait_until_running(servers.trees, 1)
    wait_until_running(servers.trees, 0)
    # Ended early, not by its last token: vLLM counts no request that a client has left.
    assert tokens() - before < 240
    compatibility.record("closed connection")


def test_the_server_refuses_what_is_malformed_and_goes_on(servers) -> None:
    greedy = {"model": MODEL, "prompt": "def push(", "max_tokens": 5, "temperature": 0}
    with httpx.Client(base_url=servers.trees.url, timeout=120) as client:
        before = client.post("/v1/completions", json=greedy).json()["choices"]
        for name, request in malformed().items():
            answer = client.post(**request)
            assert 400 <= answer.status_code < 500, (name, answer.status_code, answer.text[:500])
            # FastAPI itself answers what is not JSON at all, with "detail".
            assert {"error", "detail"} & answer.json().keys(), (name, answer.text[:500])
            assert client.get("/health").status_code == 200, name
        assert client.post("/v1/completions", json=greedy).json()["choices"] == before


def assert_batch_is_the_same(servers: Servers, batch: list[Case]) -> None:
    for number, case in enumerate(batch):
        object.__setattr__(case, "number", number)
    plain, trees = ask_both(servers, [(case, case.stream) for case in batch])
    # A case that nobody serves would compare two refusals.
    refused = {name: answer for name, answer in plain.items() if answer["http_status"] != 200}
    assert not refused, (refused, [case.body for case in batch])
    found = differences(plain, trees)
    assert not found, (found, [case.body for case in batch])


def test_any_mix_of_parameters_gives_the_same_answers(servers, seed, request) -> None:
    """Random batches for a fixed time; hypothesis reports the simplest one that fails."""
    seconds = SLOW_PROPERTY_S if request.config.getoption("--slow") else PROPERTY_S
    deadline = time.monotonic() + seconds
    batches = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=400, deadline=None, database=None)
    @hypothesis.given(strategies.randoms(use_true_random=False), strategies.integers(1, 6))
    def batch_is_the_same(rng: random.Random, size: int) -> None:
        nonlocal batches
        batch = [random_case(rng) for _ in range(size)]
        if time.monotonic() < deadline:
            assert_batch_is_the_same(servers, batch)
            batches += 1

    batch_is_the_same()
    assert batches


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_five_hundred_recorded_requests_get_the_same_answers(servers) -> None:
    requests = [recorded_case(line, request) for line, request in enumerate(recorded(), 1)]
    assert len(requests) == 500
    for start in range(0, len(requests), 25):
        assert_batch_is_the_same(servers, requests[start : start + 25])


def recorded_case(line: int, request: dict[str, Any]) -> Case:
    """A line of recorded_requests.jsonl; a failure names it."""
    body = {key: value for key, value in request["body"].items() if key != "stream"}
    stream = request["body"].get("stream", False)
    return Case(f"line {line}, {request['client']}", request["path"], body, stream=stream)
