# SPDX-License-Identifier: Apache-2.0
"""Samples the target at every node, walks the tree, reports the accepted path as vLLM expects it.

Each node gets the token the target would emit there: the noise is keyed by (seed, position), as in
vLLM without speculation, so a walk emits the very tokens a run without speculation emits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
    get_max_chunk_logits,
)

from ddtree_vllm.sampling.draw import draw_tokens
from ddtree_vllm.sampling.walk import WalkOutput, walk_trees

if TYPE_CHECKING:
    from ddtree_vllm.engine.model_state import DDTreeModelState


class NodeSampler(Sampler):
    """vLLM's sampler, with all that it keeps of requests, drawing as a step of many rows should."""

    def __init__(self, sampler: Sampler) -> None:
        self.__dict__ = vars(sampler)

    def _sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        use_fused_sampler: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if use_fused_sampler:
            return super()._sample_random(
                processed_logits,
                expanded_idx_mapping,
                idx_mapping_np,
                pos,
                top_k,
                top_p,
                use_fused_sampler,
            )
        processed_logits = apply_top_k_top_p(processed_logits, top_k, top_p)
        tokens = draw_tokens(
            processed_logits,
            expanded_idx_mapping,
            self.sampling_states.temperature.gpu,
            self.sampling_states.seeds.gpu,
            pos,
            self.use_fp64_gumbel,
        )
        return tokens, processed_logits


class TreeRejectionSampler(RejectionSampler):
    """Stands in for vLLM's rejection sampler on steps that carry drafts."""

    def __init__(self, sampler: Sampler, state: DDTreeModelState) -> None:
        spec = state.vllm_config.speculative_config
        super().__init__(sampler, spec, state.device)
        self.state = state
        self.node_sampler = NodeSampler(sampler)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Args:
        logits: ``[num_logits, V]``, the target's at every row that can emit a token.
        invalid_drafts: bool ``[num_logits]``, drafts a grammar has already ruled out.
        """
        state, sampler = self.state, self.sampler
        step = state.step
        assert step is not None
        num_reqs = input_batch.num_reqs
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        input_ids, _ = gather_draft_sampled(
            input_batch.input_ids,
            input_batch.positions,
            input_batch.logits_indices,
            input_batch.expanded_idx_mapping,
            input_batch.expanded_local_pos,
            sampler.req_states.prefill_len.gpu,
        )
        sampled, scores = self._sample_nodes(logits, input_batch, input_ids)
        # Fresh tensors: the host still copies them while the next step runs. What the walk counts
        # travels to the host in one more column, which no token ever reaches.
        copied = torch.empty(num_reqs, state.budget + 2, dtype=torch.int64, device=logits.device)
        tokens, tally = copied[:, :-1], copied[:, -1]
        num_sampled = torch.empty(num_reqs, dtype=torch.int32, device=logits.device)
        walk_trees(
            state.tree,
            input_batch.idx_mapping,
            input_batch.cu_num_logits,
            sampled,
            WalkOutput(step.path[:num_reqs], step.path_len[:num_reqs], tokens, num_sampled, tally),
            tree_rows=step.num_rows[:num_reqs],
            invalid_drafts=invalid_drafts,
        )
        logprobs = None
        if scores is not None:
            # vLLM reads the emitted tokens' scores from the first rows of a request.
            rows = path_rows(step.path[:num_reqs], input_batch.cu_num_logits, logits.shape[0])
            several = logits.shape[0] != num_reqs
            logprobs = LogprobsTensors(
                *(of_row[rows] for of_row in scores[:3]),
                cu_num_generated_tokens=input_batch.cu_num_logits_np.tolist() if several else None,
            )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=copied,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=None,
        )

    def _sample_nodes(
        self, logits: torch.Tensor, input_batch: InputBatch, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """The target's token at every row, int64 ``[num_logits]``, and its scores if any are wanted.

        All rows are scored, in vLLM's chunks, although few will be on a path: what is kept of a
        chunk is a few numbers a row, and its processed logits go before those of the next are made.
        """
        sampler = self.sampler
        positions = self.state.tree_positions[input_batch.logits_indices]
        cu_np = input_batch.cu_num_logits_np
        seq_lens_np = input_batch.seq_lens_cpu_upper_bound.numpy()
        wanted = sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        mode = sampler.logprobs_mode
        sampled: list[torch.Tensor] = []
        scores: list[LogprobsTensors] = []
        for start, end in _request_chunks(cu_np, get_max_chunk_logits(logits.shape[1])):
            lo, hi = int(cu_np[start]), int(cu_np[end])
            tokens, processed = self.node_sampler.sample(
                logits[lo:hi],
                input_batch.expanded_idx_mapping[lo:hi],
                input_batch.idx_mapping[start:end],
                input_batch.idx_mapping_np[start:end],
                positions[lo:hi],
                input_ids[lo:hi],
                input_batch.expanded_local_pos[lo:hi],
                seq_lens_np[start:end],
                return_logprobs=wanted is not None,
            )
            sampled.append(tokens)
            if wanted is not None:
                num_logprobs, num_token_ids = wanted
                of_processed = mode in ("processed_logits", "processed_logprobs")
                found = compute_topk_scores(
                    processed if of_processed else logits[lo:hi],
                    num_logprobs,
                    tokens,
                    logprob_token_ids_state=sampler.logprob_token_ids_state,
                    expanded_idx_mapping=input_batch.expanded_idx_mapping[lo:hi],
                    max_per_req_token_ids=num_token_ids,
                    logits_mode=mode in ("raw_logits", "processed_logits"),
                )
                scores.append(found)
        if not scores:
            return _cat(sampled), None
        ids, values, ranks = (_cat([found[i] for found in scores]) for i in range(3))
        return _cat(sampled), LogprobsTensors(ids, values, ranks)


def path_rows(path: torch.Tensor, cu_num_logits: torch.Tensor, num_logits: int) -> torch.Tensor:
    """Which logits row holds the token that request r emits j-th, at row cu_num_logits[r] + j.

    Args:
        path: int32 ``[num_reqs, N + 1]``, local rows, -1 past the path.
        cu_num_logits: int32 ``[num_reqs + 1]``.

    Returns:
        int64 ``[num_logits]``; a row past its request's path names itself.
    """
    row = torch.arange(num_logits, device=path.device)
    request = torch.searchsorted(cu_num_logits, row, right=True) - 1
    first = cu_num_logits[request]
    local = path[request, row - first]
    return torch.where(local >= 0, first + local, row)


def _request_chunks(cu_num_logits: Any, max_logits: int) -> list[tuple[int, int]]:
    """Ranges of requests whose logit rows fit ``max_logits``; a request is never split."""
    num_reqs = len(cu_num_logits) - 1
    chunks, start = [], 0
    while start < num_reqs:
        end = start + 1
        while end < num_reqs and cu_num_logits[end + 1] - cu_num_logits[start] <= max_logits:
            end += 1
        chunks.append((start, end))
        start = end
    return chunks


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
