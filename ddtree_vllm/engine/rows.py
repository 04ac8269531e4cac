# SPDX-License-Identifier: Apache-2.0
"""How many tree rows a step can hold."""

from __future__ import annotations

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup


def draft_counts(vllm_config: VllmConfig) -> list[int]:
    """How many drafts a tree request can be given, ascending: the budget, or those per batch size."""
    budget = vllm_config.num_speculative_tokens
    schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    if not schedule:
        return [budget]
    most = vllm_config.scheduler_config.max_num_seqs
    budgets = build_dynamic_sd_schedule_lookup(schedule, most, budget)
    return sorted({budget, *budgets[1 : most + 1]})


def max_tree_rows(vllm_config: VllmConfig) -> int:
    """The most tree rows a step of served requests can hold: what the recurrent layers' stash is for.

    With a budget per batch size, a batch carries the drafts it was given at its size one step ago,
    and every request that joined since at most its root.
    """
    scheduler = vllm_config.scheduler_config
    most = scheduler.max_num_seqs
    budget = vllm_config.num_speculative_tokens
    schedule = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
    if schedule:
        # vLLM's own reading: the last entry goes on, and so does one before a gap.
        budgets = build_dynamic_sd_schedule_lookup(schedule, most, budget)
        rows = most + max(n * (budgets[n] + 1) for n in range(1, most + 1))
    else:
        rows = most * (budget + 1)
    return min(rows, scheduler.max_num_batched_tokens)


def requests_that_fit(num_rows: np.ndarray, capacity: int) -> int:
    """How many requests, from the first on, have all their rows in a stash of ``capacity`` rows.

    Args:
        num_rows: ``[num_reqs]``, tree rows of each request.
    """
    return int(np.searchsorted(np.cumsum(num_rows), capacity, side="right"))
