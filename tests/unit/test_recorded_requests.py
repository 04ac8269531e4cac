# SPDX-License-Identifier: Apache-2.0
"""The 500 recorded requests are well-formed, varied, and what their script writes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from recorded_requests import CHAT, CLIENTS, COUNT, recorded, written

ROOT = Path(__file__).parents[2]
CONTEXT = 512  # of the servers that the requests are sent to


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    return recorded()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "demo" / "target")


def test_the_file_is_what_the_script_writes(requests) -> None:
    assert requests == list(written())
    assert len(requests) == COUNT == 500


def test_hardly_any_request_is_there_twice(requests) -> None:
    assert len({str(request["body"]) for request in requests}) >= 490


def test_every_request_is_one_that_vllm_takes(requests) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for request in requests:
        kind = ChatCompletionRequest if request["path"] == CHAT else CompletionRequest
        assert set(request["body"]) <= set(kind.model_fields), request
        parsed = kind.model_validate(request["body"])
        parsed.to_sampling_params(16, {})
        # What is drawn without a seed is drawn anew by each server.
        assert parsed.temperature == 0 or parsed.seed is not None, request


def test_every_request_fits_the_context(requests, tokenizer) -> None:
    template = (ROOT / "tests" / "engine" / "qwen_like.jinja").read_text(encoding="utf-8")
    for request in requests:
        body = request["body"]
        if request["path"] == CHAT:
            text = tokenizer.apply_chat_template(
                body["messages"],
                tools=body.get("tools"),
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
            longest = len(tokenizer.encode(text))
        else:
            prompt = body["prompt"]
            several = (
                prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
            )
            longest = max(
                len(tokenizer.encode(one)) if isinstance(one, str) else len(one) for one in several
            )
        most = body.get("max_tokens", body.get("max_completion_tokens"))
        assert 1 <= longest <= CONTEXT - most, (longest, request)


def test_every_kind_of_client_and_parameter_is_there(requests) -> None:
    clients = Counter(request["client"] for request in requests)
    assert set(clients) == {client.__name__ for client in CLIENTS}
    assert min(clients.values()) >= 20
    fields = Counter(field for request in requests for field in request["body"])
    for field, least in {
        "stream": 200,
        "seed": 200,
        "stop": 60,
        "tools": 40,
        "response_format": 20,
        "structured_outputs": 30,
        "logprobs": 80,
        "n": 30,
        "presence_penalty": 20,
        "frequency_penalty": 10,
        "repetition_penalty": 10,
        "bad_words": 5,
        "allowed_token_ids": 20,
        "stop_token_ids": 10,
        "min_tokens": 10,
        "thinking_token_budget": 10,
        "repetition_detection": 5,
        "include_stop_str_in_output": 5,
        "prompt_logprobs": 5,
        "echo": 5,
    }.items():
        assert fields[field] >= least, (field, fields[field])
