# SPDX-License-Identifier: Apache-2.0
"""A real server is stopped while it streams, and others go on asking it."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time

import httpx
import pytest

from ddtree_vllm import drain
from ddtree_vllm.smoke.server import running_server

pytestmark = pytest.mark.timeout(600)
DRAIN_S = 300
TOKENS = 150


def test_a_drain_finishes_streams_and_turns_new_requests_away(tiny_pair, tmp_path):
    target, drafter = tiny_pair

    def command(port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "ddtree_vllm.cli", "serve", str(target)),
            *("--drafter", str(drafter), "--budget", "3"),
            *("--port", str(port), "--host", "127.0.0.1", "--served-model-name", "tiny"),
            *("--max-model-len", "1024", "--max-num-seqs", "4"),
            *("--shutdown-timeout", str(DRAIN_S)),
        ]

    with running_server(command, tmp_path / "server.log") as server:
        server.wait_until_ready(500, lambda: None)
        streamed: list[int] = []
        reasons: list[str | None] = []

        def stream() -> None:
            body = {**ask(TOKENS), "stream": True, "return_token_ids": True}
            url = f"{server.url}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=DRAIN_S) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        [choice] = json.loads(line.removeprefix("data: "))["choices"]
                        streamed.extend(choice["token_ids"])
                        reasons.append(choice["finish_reason"])

        client = threading.Thread(target=stream)
        client.start()
        wait_for(lambda: streamed)
        server.process.terminate()

        answers: list[httpx.Response] = []
        url = f"{server.url}/v1/completions"
        # Refused where nobody listens any more; whoever is connected before gets an answer.
        with contextlib.suppress(httpx.ConnectError):
            while True:
                answers.append(httpx.post(url, json=ask(1), timeout=DRAIN_S))
                if answers[-1].status_code == 503 and client.is_alive():
                    assert httpx.get(f"{server.url}/health").status_code == 200
                time.sleep(0.02)
        client.join(DRAIN_S)

        assert server.process.wait(60) == 0
    # Until the signal is handled, a request is served as ever.
    statuses = [answer.status_code for answer in answers]
    served = statuses.index(503)
    assert statuses == [200] * served + [503] * (len(statuses) - served), statuses
    assert served <= 20
    assert answers[-1].json()["error"]["message"] == drain.REASON
    assert len(streamed) == TOKENS
    assert reasons[-1] == "length"


def ask(tokens: int) -> dict:
    return {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": tokens, "ignore_eos": True}


def wait_for(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
