# SPDX-License-Identifier: Apache-2.0
"""Compiles, before the server is ready, what the first batch of trees and prompts would else wait for.

vLLM's own warm-up runs prompts alone, then trees alone, and the capture of CUDA graphs runs trees at
every size that has one. Neither mixes the two. This does, at the sizes between which a kernel may be
cut differently: powers of two. So it leans on two things: launches do not specialise on the size of
a batch, and a step outside a graph has as many rows a tree as its budget has (`row_counts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.warmup import _warmup_block_counter

from ddtree_vllm.attention.metadata import KeyValueViews
from ddtree_vllm.attention.tree_attention import tree_attention
from ddtree_vllm.engine.rows import draft_counts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from ddtree_vllm.engine.model_state import DDTreeModelState

# Long enough to be a prompt: a single token would be padded with drafts and verified as a tree.
PROMPT = [0, 1, 2]


@torch.inference_mode()
def warm_up_mixed_batches(
    runner: GPUModelRunner,
    execute_model: Callable[[SchedulerOutput], Any],
    sample_tokens: Callable[[Any], Any],
) -> None:
    """Run steps that verify trees beside a prompt. Call it before graphs are captured.

    Nothing is left of them but what they compiled: they use blocks that no request owns yet, as
    vLLM's own warm-up does.
    """
    for drafts in sorted({0, *draft_counts(runner.vllm_config)}):
        for size in batch_sizes(runner, drafts):
            _mixed_batch(runner, execute_model, sample_tokens, size, drafts)
    _long_prefixes(runner)


def batch_sizes(runner: GPUModelRunner, drafts: int) -> list[int]:
    """Requests of the steps to run: powers of two and the largest batch, none below two."""
    most = min(runner.max_num_reqs, _room(runner, 0) // (len(PROMPT) + _draft_slots(runner)))
    blocks = sum(_blocks_of_a_request(runner, drafts))
    if blocks:
        most = min(most, (runner.kv_cache_config.num_blocks - 1) // blocks)
    sizes = {1 << i for i in range(1, most.bit_length())} | {most}
    return sorted(size for size in sizes if size >= 2)


def _room(runner: GPUModelRunner, size: int) -> int:
    """Tokens that a step of ``size`` requests can have, as vLLM's scheduler counts them: the drafter
    needs slots for every request in the same buffers."""
    tokens = runner.scheduler_config.max_num_batched_tokens
    return tokens - size * _draft_slots(runner)


def _draft_slots(runner: GPUModelRunner) -> int:
    spec = runner.vllm_config.speculative_config
    assert spec is not None
    return spec.max_num_new_slots_for_drafting


def _blocks_of_a_request(runner: GPUModelRunner, drafts: int) -> list[int]:
    count = _warmup_block_counter(runner)
    tokens = len(PROMPT) + drafts + 1
    return [count(tokens, g.kv_cache_spec) for g in runner.kv_cache_config.kv_cache_groups]


def _mixed_batch(
    runner: GPUModelRunner,
    execute_model: Callable[[SchedulerOutput], Any],
    sample_tokens: Callable[[Any], Any],
    size: int,
    drafts: int,
) -> None:
    """Prompts of ``size - 1`` requests; their trees beside the prompt of one more; then none."""
    next_block = 1  # block 0 is the null block

    def new_request(name: str) -> NewRequestData:
        nonlocal next_block
        groups = []
        for blocks in _blocks_of_a_request(runner, drafts):
            groups.append(list(range(next_block, next_block + blocks)))
            next_block += blocks
        return NewRequestData(
            req_id=name,
            prompt_token_ids=PROMPT,
            mm_features=[],
            sampling_params=SamplingParams(max_tokens=2, temperature=1.0, seed=0),
            pooling_params=None,
            block_ids=tuple(groups),
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=PROMPT,
        )

    def step(output: SchedulerOutput, scheduled: dict[str, int]) -> None:
        output.num_spec_tokens_to_schedule = runner.num_speculative_steps
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        execute_model(output)
        sample_tokens(None)

    decoding = [f"_ddtree_warm_up_{i}_" for i in range(size - 1)]
    joining = "_ddtree_warm_up_joining_"
    prompts = SchedulerOutput.make_empty()
    prompts.scheduled_new_reqs = [new_request(name) for name in decoding]
    step(prompts, dict.fromkeys(decoding, len(PROMPT)))

    mixed = SchedulerOutput.make_empty()
    mixed.scheduled_new_reqs = [new_request(joining)]
    cached = CachedRequestData.make_empty()
    cached.req_ids = decoding
    cached.num_computed_tokens = [len(PROMPT)] * len(decoding)
    cached.num_output_tokens = [1] * len(decoding)
    cached.new_block_ids = [None] * len(decoding)
    mixed.scheduled_cached_reqs = cached
    # The first tree is whole; later ones get what a step has room for.
    room = _room(runner, size) - len(PROMPT) - len(decoding)
    scheduled = {joining: len(PROMPT)}
    for name in decoding:
        given = min(drafts, room)
        room -= given
        scheduled[name] = 1 + given
        if given:
            mixed.scheduled_spec_decode_tokens[name] = [0] * given
    step(mixed, scheduled)

    ended = SchedulerOutput.make_empty()
    ended.finished_req_ids = {*decoding, joining}
    execute_model(ended)


def _long_prefixes(runner: GPUModelRunner) -> None:
    """Attention beside prompts splits long sequences over programs, which short prompts do not show.

    Launched for a request that is no tree, so that nothing is read or written.
    """
    state: DDTreeModelState = runner.model_state
    assert state.step is not None
    context = runner.vllm_config.compilation_config.static_forward_context
    seen = set()
    for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        for layer in (context[name] for name in group.layer_names):
            if not isinstance(getattr(layer, "impl", None), KeyValueViews):
                continue
            if getattr(layer, "is_draft_layer", False):
                continue
            keys, values = layer.impl.key_value_views(layer.kv_cache)
            shape = (keys.shape[1:], keys.stride(), layer.num_heads)
            if shape in seen:
                continue
            seen.add(shape)
            head_size = keys.shape[3]
            for rows in (n for n in state.row_counts if n > 1):
                query = keys.new_zeros(rows, layer.num_heads, head_size)
                integers = torch.zeros(2, dtype=torch.int32, device=runner.device)
                tree_attention(
                    query,
                    keys,
                    values,
                    torch.zeros_like(query),
                    block_table=runner.block_tables.input_block_tables[gid],
                    seq_lens=integers[:1],
                    query_start_loc=integers,
                    max_query_len=rows,
                    max_seq_len=runner.max_model_len,
                    scale=layer.impl.scale,
                    ancestors=state.tree.ancestors,
                    slots=torch.full_like(integers[:1], -1),
                    trees_only=True,
                    num_splits=2,
                )
