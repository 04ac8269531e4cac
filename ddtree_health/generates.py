# SPDX-License-Identifier: Apache-2.0
"""Generates: a completion comes back in time, with the known answer."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .report import FAIL, PASS, Result
from .server import Answer, Server


@dataclass(frozen=True)
class Question:
    """Attributes:
    prompt: what the engine continues, greedily.
    expect: text that the continuation has to contain; empty accepts any.
    max_tokens: length of the continuation.
    timeout_s: limit of the whole answer.
    """

    prompt: str
    expect: str = ""
    max_tokens: int = 8
    timeout_s: float = 30.0
    model: str = ""


def ask(server: Server, question: Question) -> Answer:
    model = question.model or next(iter(server.models()), "")
    body = {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": question.max_tokens,
        "temperature": 0,
    }
    return server.post("/v1/completions", body, question.timeout_s)


def judge(question: Question, answer: Answer, steps: float) -> Result:
    """Judges the answer.

    Args:
        steps: steps that the engine made meanwhile.
    """
    data = {"completion_seconds": round(answer.seconds, 3)}
    if answer.silent:
        busy = f"; the engine made {steps:.0f} steps meanwhile: it is busy" if steps else ""
        return Result("generates", FAIL, f"no completion: {answer.body}{busy}", data)
    if answer.status != 200:
        said = " ".join(answer.body.split())[:200]
        return Result("generates", FAIL, f"a completion was answered {answer.status}: {said}", data)
    try:
        body = json.loads(answer.body)
        text = body["choices"][0]["text"]
        tokens = body["usage"]["completion_tokens"]
    except (ValueError, KeyError, IndexError, TypeError):
        return Result("generates", FAIL, "a completion's answer is not of OpenAI's form", data)
    if not tokens:
        return Result("generates", FAIL, "a completion came back empty", data)
    if question.expect not in text:
        why = f"the prompt {question.prompt!r} was continued {text!r}, without {question.expect!r}"
        return Result("generates", FAIL, why, data)
    why = f"{tokens} tokens in {answer.seconds:.2f} s"
    return Result("generates", PASS, why + (", the known ones" if question.expect else ""), data)
