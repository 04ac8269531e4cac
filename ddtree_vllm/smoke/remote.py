# SPDX-License-Identifier: Apache-2.0
"""The smoke test of a server that runs already, by its URL.

Completions, one by one and then all at once, a chat that is streamed, and drafts that are accepted.
Without speculation beside it there is nothing to compare tokens with: what is compared is the same
prompt alone and among others (`--exact`, for float32: in bfloat16 near ties may fall either way).

A single file that needs nothing but Python 3.9, so that it can be sent to a host and run there:

    python3 remote.py --url http://host:8000 --expect Paris
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PROMPTS = ("The capital of France is", "import os\n", "Monday, Tuesday, Wednesday,")


class SmokeError(Exception):
    """The server does not do its part; the message says how."""


@dataclass(frozen=True)
class Completion:
    """What one request gave."""

    text: str
    tokens: int


class Client:
    """A server, by its URL.

    Args:
        url: such as http://127.0.0.1:8000.
        api_key: sent as a bearer token if not empty.
        timeout_s: longest silence of the server within an answer.
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 120.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SmokeError(f"{url} is no HTTP URL, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._parts, self._host, self._timeout_s = parts, parts.hostname, timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """Name of the first model that is served."""
        return str(self._json("GET", "/v1/models")["data"][0]["id"])

    def complete(self, model: str, prompt: str, max_tokens: int) -> Completion:
        """A greedy completion."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = self._json("POST", "/v1/completions", body)
        completion = Completion(answer["choices"][0]["text"], answer["usage"]["completion_tokens"])
        if completion.tokens < 1:
            raise SmokeError(f"nothing was generated for {prompt!r}")
        return completion

    def chat(self, model: str, question: str, max_tokens: int) -> Iterator[str]:
        """Pieces of a streamed answer; raises SmokeError if the stream does not end as it should."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        finished = ""
        with self._answer("POST", "/v1/chat/completions", body) as answer:
            for line in answer:
                data = line.decode().strip()
                if not data.startswith("data:"):
                    continue
                data = data[len("data:") :].strip()
                if data == "[DONE]":
                    if not finished:
                        raise SmokeError("the chat's stream ended without a finish reason")
                    return
                event = json.loads(data)
                if "error" in event:
                    raise SmokeError(f"the chat's stream broke off: {event['error']}")
                for choice in event["choices"]:
                    finished = choice.get("finish_reason") or finished
                    if choice["delta"].get("content"):
                        yield choice["delta"]["content"]
        raise SmokeError("the chat's stream was cut off")

    def speculation(self) -> tuple[float, float]:
        """Drafts and accepted draft tokens so far."""
        with self._answer("GET", "/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return (
            _counter(lines, "vllm:spec_decode_num_drafts_total"),
            _counter(lines, "vllm:spec_decode_num_accepted_tokens_total"),
        )

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._answer(method, path, body) as answer:
            return json.loads(answer.read())

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        https = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        connection = kind(self._host, self._parts.port, timeout=self._timeout_s)
        text = None if body is None else json.dumps(body)
        connection.request(method, self._parts.path.rstrip("/") + path, text, self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SmokeError(f"{path} answered {answer.status}: {answer.read()[:300].decode()}")
        return answer


def examine(
    client: Client,
    prompts: Sequence[str],
    *,
    max_tokens: int = 40,
    expect: str = "",
    exact: bool = False,
    min_acceptance: float = 0.0,
) -> dict[str, Any]:
    """Runs the smoke test; returns its report, with a sentence in `failures` for all that is wrong.

    Args:
        expect: text that the continuation of the first prompt contains.
        exact: a prompt among others has to give the tokens that it gives alone.
        min_acceptance: least tokens per verification step; 0 serves without speculation.
    """
    model = client.model()
    drafts, accepted = client.speculation()
    began = time.monotonic()
    alone = [client.complete(model, prompt, max_tokens) for prompt in prompts]
    alone_s = time.monotonic() - began
    began = time.monotonic()
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda p: client.complete(model, p, max_tokens), prompts))
    together_s = time.monotonic() - began
    pieces = list(client.chat(model, prompts[0], max_tokens))
    after, accepted_after = client.speculation()
    new = after - drafts
    same = sum(a == b for a, b in zip(alone, together))  # noqa: B905 - strict is of Python 3.10
    report: dict[str, Any] = {
        "url": client.url,
        "model": model,
        "prompts": len(prompts),
        "tokens": sum(c.tokens for c in alone + together),
        "alone_s": round(alone_s, 2),
        "together_s": round(together_s, 2),
        "same_alone_and_together": same,
        "chat_pieces": len(pieces),
        "chat": "".join(pieces),
        "tokens_per_step": round(1 + (accepted_after - accepted) / new, 4) if new else 1.0,
    }
    failures = []
    if expect not in alone[0].text:
        failures.append(f"{prompts[0]!r} is continued by {alone[0].text!r}, without {expect!r}")
    if exact and same < len(prompts):
        failures.append(
            f"{len(prompts) - same} of {len(prompts)} prompts differ alone and together"
        )
    if min_acceptance and not new:
        failures.append("nothing was drafted")
    elif report["tokens_per_step"] < min_acceptance:
        failures.append(
            f"{report['tokens_per_step']} tokens a step, less than the {min_acceptance:g} asked for"
        )
    report["failures"] = failures
    return report


def _counter(lines: Sequence[str], name: str) -> float:
    """Sum of a Prometheus counter over its labels."""
    return sum(
        float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the server does its part, 1 if not."""
    parser = argparse.ArgumentParser(description="Smoke test of a server that runs already.")
    parser.add_argument("--url", required=True)
    parser.add_argument(
        "--prompt", action="append", help="may be repeated; the first is held to --expect"
    )
    parser.add_argument("--expect", default="", help="text that the first continuation contains")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument(
        "--exact", action="store_true", help="tokens do not depend on the batch (float32)"
    )
    parser.add_argument(
        "--min-acceptance", type=float, default=0.0, metavar="X", help="tokens a step"
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of a silence")
    parser.add_argument(
        "--api-key-stdin",
        action="store_true",
        help="the API key is the first line of standard input, not VLLM_API_KEY of the environment",
    )
    args = parser.parse_args(arguments)
    return run(
        args.url,
        args.prompt or PROMPTS,
        api_key=sys.stdin.readline().strip() if args.api_key_stdin else None,
        timeout_s=args.timeout,
        max_tokens=args.max_tokens,
        expect=args.expect,
        exact=args.exact,
        min_acceptance=args.min_acceptance,
    )


def run(
    url: str,
    prompts: Sequence[str],
    *,
    api_key: str | None = None,
    timeout_s: float = 120.0,
    report_to: str = "",
    **wanted: Any,
) -> int:
    """`examine`, told to a person.

    Args:
        api_key: None is VLLM_API_KEY of the environment, as vLLM's own.
    """
    if api_key is None:
        api_key = os.environ.get("VLLM_API_KEY", "")
    try:
        client = Client(url, api_key, timeout_s)
        report = examine(client, prompts, **wanted)
    except (SmokeError, OSError, http.client.HTTPException, KeyError, ValueError) as error:
        print(f"smoke: {url}: {error or type(error).__name__}", file=sys.stderr)
        return 1
    text = json.dumps(report, indent=2)
    if report_to:
        with open(report_to, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)
    for sentence in report["failures"]:
        print(f"smoke: {sentence}", file=sys.stderr)
    if not report["failures"]:
        print(f"smoke: passed, {report['tokens_per_step']:.2f} tokens a step")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
