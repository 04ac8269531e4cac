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
    """Tree rows of a step that the recurrent layers' stash has room for.

    With a budget per batch size: a batch with the drafts it was given at its size one step ago, and
    at most a root of every request that joined since. vLLM can send more: a request that sits out a
    step, at the end of its context say, keeps the drafts of a smaller batch. Its tree is then cut
    (`rows_that_fit`): room for whatever could come would be that of the largest budget for all.
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


def rows_that_fit(num_rows: np.ndarray, capacity: int) -> np.ndarray:
    """How many rows of each tree are verified: all of them, or what a stash has room for.

    Every tree keeps its root, so that every request gets a token; the first ones keep their drafts.

    Args:
        num_rows: ``[num_reqs]``, tree rows of each request, 0 where it brings none.
        capacity: rows of the stash, at least one for each request that brings any.

    Returns:
        int32 ``[num_reqs]``.
    """
    roots = np.minimum(num_rows, 1)
    drafts = num_rows - roots
    room = capacity - roots.sum()
    before = np.cumsum(drafts) - drafts
    return (roots + np.clip(room - before, 0, drafts)).astype(np.int32)
