# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a prompt, without those of the drafts that its last token may bring along.

A prompt's last token that is scheduled alone, since the prompt has no other or the prefix cache holds
the rest, is padded with drafts beside running trees. vLLM 0.32 takes all of its rows for prompt tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker


class TreePromptLogprobsWorker(PromptLogprobsWorker):
    """Stands in for vLLM's."""

    def compute_prompt_logprobs(
        self,
        logits_fn: Any,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        all_token_ids: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        prompt_lens: np.ndarray,
    ) -> dict[str, LogprobsTensors]:
        found = super().compute_prompt_logprobs(
            logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
        )
        if not found:
            return found
        past_the_prompt = (
            input_batch.num_computed_prefill_tokens_np
            + input_batch.num_scheduled_tokens
            - prompt_lens[input_batch.idx_mapping_np]
        )
        extra = dict(zip(input_batch.req_ids, past_the_prompt.tolist(), strict=True))
        return {
            name: scores
            for name, all_scores in found.items()
            if (scores := without_last(all_scores, extra[name])) is not None
        }


def without_last(scores: LogprobsTensors, rows: int) -> LogprobsTensors | None:
    """Scores but for their last ``rows``; None where none is left, as vLLM says it."""
    if rows <= 0:
        return scores
    left = scores.logprobs.shape[0] - rows
    if left <= 0:
        return None
    return LogprobsTensors(
        scores.logprob_token_ids[:left],
        scores.logprobs[:left],
        scores.selected_token_ranks[:left],
    )
