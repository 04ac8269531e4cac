# SPDX-License-Identifier: Apache-2.0
"""Sends cases to a server and brings the answers into a form that can be compared."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from api_cases import MODEL, Case

TIMEOUT_S = 900
# As many as the servers run at once: a batch is a mix of cases.
AT_ONCE = 8
# Scores of a token on two servers differ by 1e-5. Tokens that are ruled out have one score, -9999.
TIE = 1e-4
# What two servers may never agree on.
_FRESH = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "request_id",
    "system_fingerprint",
    "item_id",
    "signature",
}

# How an array of NumPy begins in base64: compared as numbers, it may differ by rounding.
_ARRAY = base64.b64encode(b"\x93NUMPY").decode()


def send_all(url: str, asked: Sequence[tuple[Case, bool]]) -> dict[str, Any]:
    """The answers by case name, those of streamed ones under name + " streamed"."""

    async def run() -> dict[str, Any]:
        gate = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:

            async def one(case: Case, stream: bool) -> Any:
                async with gate:
                    return await (_streamed if stream else _whole)(client, case)

            answers = await asyncio.gather(*(one(*a) for a in asked))
        return {
            case.name + (" streamed" if stream else ""): answer
            for (case, stream), answer in zip(asked, answers, strict=True)
        }

    return asyncio.run(run())


async def _whole(client: httpx.AsyncClient, case: Case) -> Any:
    # Only a stream may have options of streams.
    body = {key: value for key, value in case.body.items() if key != "stream_options"}
    answer = await client.post(case.path, json={"model": MODEL, **body})
    return {"http_status": answer.status_code, **_without_fresh(answer.json())}


async def _streamed(client: httpx.AsyncClient, case: Case) -> Any:
    body = {"model": MODEL, "stream_options": {"include_usage": True}, **case.body, "stream": True}
    chunks: list[dict] = []
    async with client.stream("POST", case.path, json=body) as answer:
        if answer.status_code != 200:
            return {
                "http_status": answer.status_code,
                **_without_fresh(json.loads(await answer.aread())),
            }
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append(json.loads(line.removeprefix("data: ")))
    return {"http_status": 200, **joined(chunks)}


def joined(chunks: Sequence[dict]) -> dict[str, Any]:
    """What a stream said in all: per choice its parts joined, and the usage counted last."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    errors = []
    for chunk in chunks:
        if "error" in chunk:
            errors.append(chunk["error"])
        usage = chunk.get("usage") or usage
        if usage:
            # vLLM's streaming parser counts reasoning tokens by the chunks they came in, which
            # depend on time: the same request twice may give two numbers.
            usage.pop("completion_tokens_details", None)
        for part in chunk.get("choices", ()):
            choice = choices.setdefault(part["index"], {})
            for key, value in part.items():
                if key == "delta":
                    _join_delta(choice, value)
                elif key != "index":
                    _join(choice, key, value)
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage, "errors": errors}


def _join_delta(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value or ():
                calls = choice.setdefault("tool_calls", {})
                known = calls.setdefault(str(call["index"]), {"name": "", "arguments": ""})
                function = call.get("function") or {}
                known["name"] += function.get("name") or ""
                known["arguments"] += function.get("arguments") or ""
        elif key == "role":
            choice["role"] = value or choice.get("role")
        else:
            _join(choice, key, value)


def _join(into: dict[str, Any], key: str, value: Any) -> None:
    known = into.get(key)
    if value is None or value in ("", []):
        into.setdefault(key, None)
    elif known is None:
        into[key] = value
    elif isinstance(value, dict):
        for inner, part in value.items():
            _join(known, inner, part)
    elif isinstance(value, str | list):
        into[key] = known + value
    else:
        into[key] = value


def _without_fresh(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_fresh(v) for k, v in value.items() if k not in _FRESH}
    if isinstance(value, list):
        return [_without_fresh(v) for v in value]
    if isinstance(value, str) and value.startswith(_ARRAY):
        return np.load(io.BytesIO(base64.b64decode(value))).tolist()
    return value


def differences(expected: Any, got: Any, where: str = "", tolerance: float = 2e-3) -> list[str]:
    """Where two answers differ; numbers with a fraction may by ``tolerance``."""
    if isinstance(expected, dict) and isinstance(got, dict):
        found = [
            f"{where}.{key} only {'without speculation' if key in expected else 'with trees'}"
            for key in sorted(expected.keys() ^ got.keys())
        ]
        for key in expected.keys() & got.keys():
            compare = _ranked_differences if key == "top_logprobs" else differences
            found += compare(expected[key], got[key], f"{where}.{key}", tolerance)
        return found
    if isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            return [f"{where}: {len(expected)} entries, with trees {len(got)}: {expected} {got}"]
        return [
            difference
            for i, (a, b) in enumerate(zip(expected, got, strict=True))
            for difference in differences(a, b, f"{where}[{i}]", tolerance)
        ]
    if isinstance(expected, float) and isinstance(got, float):
        close = abs(expected - got) <= tolerance * max(1.0, abs(expected))
        return [] if close else [f"{where}: {expected}, with trees {got}"]
    return [] if expected == got else [f"{where}: {expected!r}, with trees {got!r}"]


def _ranked_differences(expected: Any, got: Any, where: str, tolerance: float) -> list[str]:
    """As ``differences``, where two tokens of one score may change places, or which comes last.

    Of chats: a list of entries with token and score. Of completions: for every position a mapping
    from tokens to scores, or null.
    """
    if not (isinstance(expected, list) and isinstance(got, list)) or len(expected) != len(got):
        return differences(expected, got, where, tolerance)
    if all(isinstance(e, dict) and isinstance(e.get("token"), str) for e in (*expected, *got)):
        sides = [
            {(e["token"], *(e["bytes"] or ())): e["logprob"] for e in side}
            for side in (expected, got)
        ]
        if len(sides[0]) == len(sides[1]) == len(expected):
            return _ranked(*sides, where, tolerance)
        return [  # one text of two tokens
            difference
            for i, (a, b) in enumerate(zip(expected, got, strict=True))
            for difference in differences(a, b, f"{where}[{i}]", tolerance)
        ]
    return [
        difference
        for i, (a, b) in enumerate(zip(expected, got, strict=True))
        for difference in (
            _ranked(a, b, f"{where}[{i}]", tolerance)
            if isinstance(a, dict) and isinstance(b, dict)
            else differences(a, b, f"{where}[{i}]", tolerance)
        )
    ]


def _ranked(expected: dict, got: dict, where: str, tolerance: float) -> list[str]:
    """Scores by token, in the order of the answer: each rank has its score, and its token but for ties."""
    if len(expected) != len(got):
        return [f"{where}: {len(expected)} entries, with trees {len(got)}: {expected} {got}"]
    found = []
    for (token, score), (other, with_trees) in zip(expected.items(), got.items(), strict=True):
        found += differences(score, with_trees, f"{where}, the score of {token!r}", tolerance)
        # A token that is missing had to give way to the last one, one that is there to its neighbour.
        apart = (
            abs(one[here] - one.get(there, min(one.values())))
            for one, here, there in ((expected, token, other), (got, other, token))
        )
        if token != other and max(apart) > TIE:
            found.append(f"{where}: {token!r}, with trees {other!r}: {expected} {got}")
    return found
