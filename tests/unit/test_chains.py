# SPDX-License-Identifier: Apache-2.0
"""Which requests draft chains, as docs/compatibility.md says: those whose logits depend on row order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from ddtree_vllm.engine.model_state import needs_spine

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from compatibility import FEATURES

NOTES = {feature: note for section in FEATURES.values() for feature, note in section.items()}
PARAMETERS = {
    "presence_penalty": {"presence_penalty": -0.5},
    "frequency_penalty": {"frequency_penalty": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "bad_words": {"bad_words": ["self"]},
    "json_schema": {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
    "json_object": {"structured_outputs": StructuredOutputsParams(json_object=True)},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-z]")},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])},
    "grammar": {"structured_outputs": StructuredOutputsParams(grammar='root ::= "a"')},
    "structural_tag": {"structured_outputs": StructuredOutputsParams(structural_tag="{}")},
    "thinking_token_budget": {"thinking_token_budget": 3},
    "greedy": {"temperature": 0.0},
    "temperature and seed": {"temperature": 0.7, "seed": 3},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "logprobs": {"logprobs": 3},
    "stop_token_ids": {"stop_token_ids": [3]},
    "min_tokens": {"min_tokens": 3},
    "allowed_token_ids": {"allowed_token_ids": [3, 4]},
    "repetition_detection": {},
}


@pytest.mark.parametrize("feature", PARAMETERS)
def test_a_request_drafts_a_chain_where_the_page_says_so(feature) -> None:
    chain = NOTES[feature].startswith("drafts a chain")
    assert needs_spine(SamplingParams(**PARAMETERS[feature])) == chain


def test_every_feature_that_drafts_a_chain_is_among_them_or_a_mix_of_them() -> None:
    mixes = {
        "structured output with penalties",
        "structured output with n > 1",
        "tool calls: required",
        "tool calls: named",
    }
    chains = {feature for feature, note in NOTES.items() if note == "drafts a chain"}
    assert chains - mixes == {f for f in PARAMETERS if NOTES[f] == "drafts a chain"}
