# SPDX-License-Identifier: Apache-2.0
"""Limits of vLLM's sampler on one request, told to the client instead of to the worker.

Runner V2 holds these lists in buffers of a fixed size. vLLM 0.32 finds out in the worker that a list
does not fit, and the error ends the engine: one request would end the server.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKEN_IDS = 128


def refuse_what_does_not_fit() -> None:
    """Make vLLM's frontend check requests; a second call changes nothing."""
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    if hasattr(process, "__wrapped__"):
        return

    @functools.wraps(process)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        if self.vllm_config.use_v2_model_runner and request.sampling_params is not None:
            check_request(request.sampling_params)
        return request

    InputProcessor.process_inputs = checked


def check_request(params: Any) -> None:
    """Raise vLLM's validation error (HTTP 400) when a list of ``params`` is longer than its buffer."""
    from vllm.exceptions import VLLMValidationError

    for parameter, length, limit, what in _lengths(params):
        if length > limit:
            raise VLLMValidationError(
                f"{parameter} has {length} {what}; this server takes at most {limit}",
                parameter=parameter,
                value=length,
            )


def _lengths(params: Any) -> Iterator[tuple[str, int, int, str]]:
    from vllm import envs

    yield (
        "allowed_token_ids",
        len(params.allowed_token_ids or ()),
        MAX_ALLOWED_TOKEN_IDS,
        "token ids",
    )
    yield "logit_bias", len(params.logit_bias or ()), MAX_LOGIT_BIASES, "token ids"
    if params.min_tokens > 0:
        yield (
            "stop_token_ids",
            len(params.all_stop_token_ids or ()),
            MAX_STOP_TOKEN_IDS,
            "token ids together with min_tokens",
        )
    # A word counts twice where it has other tokens after a space.
    words = params.bad_words_token_ids or ()
    yield "bad_words", len(words), envs.VLLM_MAX_NUM_BAD_WORDS, "words with their spaced forms"
    yield (
        "bad_words",
        sum(map(len, words)),
        envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
        "tokens in all",
    )
