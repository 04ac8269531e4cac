# SPDX-License-Identifier: Apache-2.0
"""Requests that no server can serve; each has to get an answer that says so."""

from __future__ import annotations

from typing import Any

from api_cases import MODEL


def malformed() -> dict[str, dict[str, Any]]:
    """Arguments of an HTTP POST, by what is wrong with them."""
    fields: dict[str, dict[str, Any]] = {
        "n far too large": {"n": 1_000_000},
        "n of none": {"n": 0},
        "n below zero": {"n": -3},
        "a budget below zero": {"max_tokens": -1},
        "a thinking budget below minus one": {"thinking_token_budget": -7},
        "more tokens than the context": {"max_tokens": 100_000},
        "temperature below zero": {"temperature": -0.5},
        "temperature that is not a number": {"temperature": "warm"},
        "top_p above one": {"top_p": 1.5},
        "top_k below minus one": {"top_k": -9},
        "a penalty out of range": {"presence_penalty": 9},
        "repetition_penalty of zero": {"repetition_penalty": 0},
        "logprobs beyond the limit": {"logprobs": 100_000},
        "prompt_logprobs below minus one": {"prompt_logprobs": -7},
        "min_tokens above max_tokens": {"min_tokens": 9, "max_tokens": 3},
        "an empty stop string": {"stop": [""]},
        "a schema that is none": {"structured_outputs": {"json": {"type": "nonsense"}}},
        "a schema cut off": {"structured_outputs": {"json": '{"type": "obj'}},
        "a regex that is none": {"structured_outputs": {"regex": "(a"}},
        "a grammar that is none": {"structured_outputs": {"grammar": "root ::= ("}},
        "no choice": {"structured_outputs": {"choice": []}},
        "two constraints at once": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "a token id out of range": {"prompt": [5, 1_000_000]},
        "a token id below zero": {"prompt": [5, -1]},
        "no token at all": {"prompt": []},
        "allowed_token_ids out of range": {"allowed_token_ids": [99_999]},
        "allowed_token_ids of none": {"allowed_token_ids": []},
        "more allowed_token_ids than fit": {"allowed_token_ids": list(range(1025))},
        "more stop_token_ids than fit": {"stop_token_ids": list(range(200)), "min_tokens": 2},
        "more bad_words than fit": {"bad_words": [f"word{i}" for i in range(200)]},
        "a prompt of a megabyte": {"prompt": "x = 1\n" * 180_000},
        "a prompt that is a number": {"prompt": 12},
        "logit_bias of a word": {"logit_bias": {"if": 1}},
        "logit_bias out of range": {"logit_bias": {"99999": 1}},
    }
    found = {
        name: {
            "url": "/v1/completions",
            "json": {"model": MODEL, "prompt": "def f(", "max_tokens": 4, "temperature": 0, **body},
        }
        for name, body in fields.items()
    }
    json_type = {"Content-Type": "application/json"}
    bodies = {
        "broken UTF-8": b'{"model": "demo", "prompt": "\xff\xfe\xc3"}',
        "JSON cut off": b'{"model": "demo", "prompt": "x"',
        "not an object": b"[1, 2, 3]",
        "an empty body": b"",
        "deeply nested": b'{"model": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    }
    for name, content in bodies.items():
        found[name] = {"url": "/v1/completions", "content": content, "headers": json_type}
    chats: dict[str, dict[str, Any]] = {
        "messages of none": {"messages": []},
        "a role without a name": {"messages": [{"content": "x"}]},
        "a tool choice that no tool has": {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {}}}],
            "tool_choice": {"type": "function", "function": {"name": "b"}},
        },
    }
    for name, body in chats.items():
        found[name] = {"url": "/v1/chat/completions", "json": {"model": MODEL, **body}}
    return found
