# SPDX-License-Identifier: Apache-2.0
"""A vLLM server as a child process, and the `openai` client that talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "smoke"
STOP_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 600
POLL_S = 0.5


class ServerError(Exception):
    """The server does not do its part; the message says how, with the end of its log."""


@dataclass(frozen=True)
class Completion:
    """What one request gave."""

    token_ids: tuple[int, ...]
    text: str


class Server:
    """A server of one model, reached over HTTP on the loopback interface."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self, timeout: float, progress: Callable[[], None]) -> None:
        """Returns once /health answers; raises ServerError when it ends first or takes too long."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code is not None:
                raise ServerError(f"the server ended with exit code {code}; {self._log_tail()}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                if self._get("/health") is not None:
                    return
            progress()
            time.sleep(POLL_S)
        raise ServerError(f"the server was not ready after {timeout:.0f} s; {self._log_tail()}")

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
    ) -> list[Completion]:
        """Sends all prompts at once; returns their completions in order."""
        import openai

        async def send() -> list[Completion]:
            async with openai.AsyncOpenAI(
                base_url=f"{self.url}/v1",
                api_key="none",
                timeout=REQUEST_TIMEOUT_S,
                max_retries=0,
            ) as client:
                answers = await asyncio.gather(
                    *(
                        client.completions.create(
                            model=MODEL_NAME,
                            prompt=prompt,
                            max_tokens=max_tokens,
                            temperature=temperature,
                            seed=seed,
                            extra_body={"return_token_ids": True},
                        )
                        for prompt in prompts
                    )
                )
            completions = []
            for answer in answers:
                choice = answer.choices[0]
                ids = (choice.model_extra or {}).get("token_ids")
                if not ids:
                    raise ServerError(f"an answer has no token ids: {choice}")
                completions.append(Completion(tuple(ids), choice.text))
            return completions

        try:
            return asyncio.run(send())
        except openai.OpenAIError as error:
            raise ServerError(f"a request failed: {error}; {self._log_tail()}") from None

    def tokens_per_step(self) -> float:
        """Tokens per verification step so far: the accepted drafts, and one token on top."""
        metrics = (self._get("/metrics") or b"").decode()
        drafts = counter(metrics, "vllm:spec_decode_num_drafts_total")
        accepted = counter(metrics, "vllm:spec_decode_num_accepted_tokens_total")
        if not drafts:
            raise ServerError(f"the server counted no drafts; {self._log_tail()}")
        return 1 + accepted / drafts

    def _get(self, path: str) -> bytes | None:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read() if answer.status == 200 else None

    def _log_tail(self, lines: int = 40) -> str:
        with self.log.open(errors="replace") as file:
            tail = "".join(deque(file, lines))
        return f"the end of {self.log}:\n{tail}"


@contextlib.contextmanager
def running_server(command: Callable[[int], list[str]], log: Path) -> Iterator[Server]:
    """A server on a free port, its output in `log`; stopped by its process id at the end.

    Args:
        command: what serves on a port of the loopback interface.
    """
    port = free_port()
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        # Without a GPU vLLM pins the worker's threads to the first cores, the same for every server.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command(port),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**quiet, **os.environ},
        )
        try:
            yield Server(process, port, log)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def counter(metrics: str, name: str) -> float:
    """Sum of a Prometheus counter over its labels."""
    pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
    return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))
