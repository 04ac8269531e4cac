# SPDX-License-Identifier: Apache-2.0
"""A request that vLLM's sampler has no room for is refused, instead of ending the engine."""

from __future__ import annotations

import pytest
from vllm import SamplingParams, envs
from vllm.exceptions import VLLMValidationError

from ddtree_vllm.engine.request_limits import check_request


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids has 1025 token ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.5)}, "logit_bias has 1025 token ids"),
        (
            {"stop_token_ids": list(range(129)), "min_tokens": 1},
            "stop_token_ids has 129 token ids together with min_tokens",
        ),
    ],
)
def test_a_list_longer_than_its_buffer_is_refused_by_name(options, sentence) -> None:
    with pytest.raises(VLLMValidationError, match=sentence):
        check_request(SamplingParams(**options))


def test_bad_words_are_counted_as_tokenised() -> None:
    params = SamplingParams(bad_words=["a"])
    params._bad_words_token_ids = [[1, 2]] * 129
    with pytest.raises(VLLMValidationError, match="bad_words has 129 words"):
        check_request(params)
    params._bad_words_token_ids = [[3] * (envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS + 1)]
    with pytest.raises(VLLMValidationError, match=r"bad_words has [0-9]+ tokens in all"):
        check_request(params)


def test_lists_that_just_fit_are_served() -> None:
    check_request(
        SamplingParams(
            allowed_token_ids=list(range(1024)),
            logit_bias=dict.fromkeys(range(1024), 0.5),
            stop_token_ids=list(range(128)),
            min_tokens=1,
        )
    )
    # Without min_tokens stop tokens never reach the sampler.
    check_request(SamplingParams(stop_token_ids=list(range(4000))))


def test_the_limits_are_vllm_s() -> None:
    from vllm.v1.worker.gpu.sample import logit_bias

    from ddtree_vllm.engine import request_limits as ours

    assert ours.MAX_ALLOWED_TOKEN_IDS == logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS
    assert ours.MAX_LOGIT_BIASES == logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
    assert ours.MAX_STOP_TOKEN_IDS == logit_bias.MAX_NUM_STOP_TOKEN_IDS
