# SPDX-License-Identifier: Apache-2.0
"""No field of a request to vLLM is missing on docs/compatibility.md, and each with a row is sent."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from api_cases import cases
from compatibility import features
from request_fields import ROWS, WITHOUT
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

COMPLETION, CHAT = set(CompletionRequest.model_fields), set(ChatCompletionRequest.model_fields)
GENERATE = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
NO_ROW = {field for fields in WITHOUT.values() for field in fields}


@pytest.mark.parametrize("field", sorted(COMPLETION | CHAT | GENERATE))
def test_a_field_of_vllm_has_a_row_or_a_reason(field) -> None:
    assert (field in NO_ROW) + (field in ROWS) + (field in features()) == 1
    assert ROWS.get(field) in (None, *features())


def test_nothing_is_listed_that_vllm_does_not_have() -> None:
    assert NO_ROW | ROWS.keys() <= COMPLETION | CHAT | GENERATE


@pytest.mark.parametrize("field", sorted((COMPLETION | CHAT | GENERATE) - NO_ROW))
def test_a_field_with_a_row_is_in_a_request_of_that_row(field) -> None:
    row = ROWS.get(field, field)
    if row.startswith("--"):
        return  # an option of the engine: test_features_engine.py and test_features_refused.py
    sent = {
        name
        for case in cases()
        if case.feature == row
        for name in case.body.keys() | case.body.get("sampling_params", {}).keys()
    }
    assert field in sent | ({"stream"} if any(c.stream for c in cases()) else set())
