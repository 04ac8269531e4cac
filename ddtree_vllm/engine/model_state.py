# SPDX-License-Identifier: Apache-2.0
"""Model state of a hybrid target verified by trees: plans a step's tree rows, commits the path after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.mamba_utils import get_mamba_group_ids, get_mamba_groups
from vllm.v1.worker.utils import AttentionGroup

from ddtree_vllm.attention.metadata import TREE_ATTRIBUTE
from ddtree_vllm.cache.compact import KVCacheTable, compact_accepted_kv
from ddtree_vllm.config import DDTreeConfig
from ddtree_vllm.engine.positions import to_depth_positions
from ddtree_vllm.engine.rows import draft_counts, max_tree_rows, rows_that_fit
from ddtree_vllm.engine.step import TreeStep
from ddtree_vllm.engine.tree_sampler import TreeRejectionSampler
from ddtree_vllm.gdn.layer import TreeVerification, allocate_stash
from ddtree_vllm.gpu import choose_blas
from ddtree_vllm.tree import DraftTree


class DDTreeModelState(MambaHybridModelState):
    """Owns the draft trees and the description of the step that verifies them.

    Lifetime of a step: ``prepare_attn`` plans the tree rows, ``prepare_inputs`` gives them
    root + depth positions, the layers verify, the sampler walks, ``postprocess_state`` commits the
    path to KV cache and recurrent state. Between steps only ``tree`` is alive.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.ddtree_config = DDTreeConfig.from_additional_config(vllm_config.additional_config)
        self.budget = vllm_config.num_speculative_tokens
        self.tree = DraftTree.allocate(self.max_num_reqs, self.budget, device, self.tree_depth)
        # Rows that a tree request can have, unless vLLM cuts its drafts: what kernels are compiled for.
        self.row_counts = [0, 1, *(drafts + 1 for drafts in draft_counts(vllm_config) if drafts)]
        self.tree_positions = torch.zeros(self.max_num_tokens, dtype=torch.int64, device=device)
        # 1 where a request's trees must stay a chain because its logits depend on the drafts before
        # a row in the order of rows (penalties, bad words, grammar): on a chain that order is the path.
        self.spine_only = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self.step: TreeStep | None = None
        # Allocated with the weights, so that vLLM's memory profile counts it before it sizes the cache.
        self.stash = allocate_stash(vllm_config, max_tree_rows(vllm_config), device)
        self._verification: TreeVerification | None = None
        self._kv_layers: list[tuple[int, KVCacheTable]] = []
        self._slot_mappings: torch.Tensor | None = None

    # -- requests -------------------------------------------------------------------------------

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        # A slot is reused with the tree of its last owner still in it; drafts that vLLM pads a
        # new request with must find no node.
        self.tree.num_nodes[req_index].fill_(0)
        params = new_req_data.sampling_params
        self.spine_only[req_index].fill_(int(params is not None and needs_spine(params)))

    # -- caches ---------------------------------------------------------------------------------

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        context = self.vllm_config.compilation_config.static_forward_context
        groups = get_mamba_groups(kv_cache_config)
        group_ids, spec = get_mamba_group_ids(groups), next(iter(groups))
        self.step = TreeStep(self.tree, len(group_ids), self.max_num_reqs, self.device)
        block_size = spec.block_size if self._align_mode else 0
        self.step.bind_block_tables(
            [block_tables.input_block_tables[gid] for gid in group_ids], block_size
        )
        self._verification = TreeVerification(
            [
                [context[name] for name in kv_cache_config.kv_cache_groups[gid].layer_names]
                for gid in group_ids
            ],
            tree=self.tree,
            step=self.step,
            stash=self.stash,
        )
        self._kv_layers = []
        for gid, group in enumerate(kv_cache_config.kv_cache_groups):
            caches = [
                context[name].impl.key_value_views(context[name].kv_cache)
                for name in group.layer_names
                if isinstance(context[name], Attention)
                and not getattr(context[name], "is_draft_layer", False)
            ]
            if caches:
                self._kv_layers.append((gid, KVCacheTable.build(caches)))

    @property
    def tree_depth(self) -> int:
        """Deepest a draft node can be: the drafter's block less the bonus token, or the budget."""
        spec = self.vllm_config.speculative_config
        return min(drafter_block_size(spec.draft_model_config.hf_config) - 1, self.budget)

    # -- one step -------------------------------------------------------------------------------

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        metadata = super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture=for_capture,
            **kwargs,
        )
        # A graph keeps what is chosen when it is captured.
        choose_blas(input_batch.num_tokens_after_padding)
        step = self.step
        assert step is not None
        is_tree = self._tree_requests(input_batch, for_capture)
        num_reqs_padded = (
            input_batch.num_reqs_after_padding
            if cudagraph_mode == CUDAGraphMode.FULL
            else input_batch.num_reqs
        )
        rows = input_batch.num_scheduled_tokens[: is_tree.shape[0]] * is_tree
        max_rows = int(rows.max(initial=0))
        if not for_capture:  # which stands on blocks that nobody owns, and stashes nothing
            rows = rows_that_fit(rows, self.stash.max_rows)
        if for_capture:
            # Stand-in requests may be as long as a batch; those of a budget below the largest bring
            # fewer rows, and their graph gets smaller tiles.
            max_rows = min(max_rows, self.budget + 1)
        else:
            # An upper bound. Cut drafts (at the end of the context) must not ask for kernels of
            # other tiles than those that were compiled before the server was ready.
            max_rows = min(n for n in self.row_counts if n >= max_rows)
        step.rows_per_request = 0
        # vLLM names no mode when it prepares what a graph is captured with.
        if for_capture or cudagraph_mode == CUDAGraphMode.FULL:
            rows_per_request, rest = divmod(input_batch.num_tokens_after_padding, num_reqs_padded)
            if not rest and rows_per_request <= self.budget + 1:
                step.rows_per_request = rows_per_request
        if cudagraph_mode == CUDAGraphMode.FULL:
            max_rows = max(max_rows, input_batch.num_tokens_after_padding // num_reqs_padded)
        step.plan(
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            input_batch.seq_lens,
            async_tensor_h2d(rows.astype(np.int32), device=self.device),
            input_batch.num_reqs,
            num_reqs_padded,
            max_rows,
        )
        step.only_trees = bool(is_tree.all())
        if not for_capture:
            self._clear_first_states(input_batch, is_tree)
        if for_capture:
            # A capture runs every kernel on stand-in blocks; it must commit nothing.
            step.path_len.zero_()
        self._slot_mappings = slot_mappings
        for layer_metadata in metadata.values():
            setattr(layer_metadata, TREE_ATTRIBUTE, step)
        return metadata

    def _clear_first_states(self, input_batch: InputBatch, is_tree: np.ndarray) -> None:
        """Zeros the recurrent states of trees that begin a sequence: prompts of one token.

        Prefill knows where a sequence starts; a tree starts from what its block holds, which is
        the state of the block's last owner.
        """
        before = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].numpy()
        before = before - input_batch.num_scheduled_tokens[: input_batch.num_reqs]
        first = np.flatnonzero((is_tree > 0) & input_batch.is_prefilling_np & (before <= 0))
        if first.size and self._verification is not None:
            self._verification.clear(async_tensor_h2d(first, device=self.device))

    def _tree_requests(self, input_batch: InputBatch, for_capture: bool) -> np.ndarray:
        """int32 ``[num_reqs]``: 1 where the rows are root plus drafts. The rule is the one by which
        vLLM's recurrent-state metadata tells speculative rows from prefill rows."""
        num_scheduled = input_batch.num_scheduled_tokens[: input_batch.num_reqs]
        if for_capture:
            return np.ones(input_batch.num_reqs, dtype=np.int32)
        prefilling = input_batch.is_prefilling_np
        if input_batch.prefill_runs_as_decode_np is not None:
            prefilling = prefilling & ~input_batch.prefill_runs_as_decode_np
        tree = ~prefilling & (num_scheduled > 0) & (num_scheduled <= self.budget + 1)
        return tree.astype(np.int32)

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, torch.Tensor | None]:
        inputs = super().prepare_inputs(input_batch, req_states)
        num_tokens = input_batch.num_tokens_after_padding
        self.tree_positions[:num_tokens].copy_(input_batch.positions[:num_tokens])
        buffers = [self.tree_positions]
        if self.rope_state is None:
            inputs = {**inputs, "positions": self.tree_positions[:num_tokens]}
        else:
            buffers.append(self.rope_state.positions)
        step = self.step
        if step is not None:  # None while memory is profiled, before the caches exist
            for positions in buffers:
                to_depth_positions(
                    positions,
                    self.tree.depths,
                    step.slots,
                    step.row_start,
                    step.num_rows,
                    step.num_reqs,
                )
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        if self.rope_state is None:
            # Graphs bind the buffer they are captured with: it must be the one real steps fill.
            inputs["positions"] = self.tree_positions[:num_tokens]
        return inputs

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        return sampler, TreeRejectionSampler(sampler, self)

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor | int,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        step = self.step
        assert step is not None
        assert self._verification is not None
        num_reqs = idx_mapping.shape[0]
        # vLLM's own commit serves prefill rows only: tree rows carry one state and no block per node.
        # Their num_accepted_tokens stays 1, so the copy across a block boundary shifts no window.
        if not step.only_trees:
            others = torch.where(step.slots[:num_reqs] < 0, idx_mapping, -1)
            super().postprocess_state(others, num_sampled, num_computed_tokens)
        if num_reqs == 0 or num_computed_tokens is None:
            return
        step.plan_cuts(idx_mapping, num_computed_tokens)
        assert self._slot_mappings is not None
        for gid, table in self._kv_layers:
            compact_accepted_kv(
                table,
                step.path[:num_reqs],
                step.path_len[:num_reqs],
                step.row_start[:num_reqs],
                self._slot_mappings[gid],
            )
        self._verification.commit(num_reqs)


def needs_spine(params: Any) -> bool:
    """Whether a request's logits at a row depend on the drafts before it in row order."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words
        or params.structured_outputs is not None
        or getattr(params, "thinking_token_budget", None) is not None
    )


def drafter_block_size(hf_config: Any) -> int:
    """Tokens a DFlash drafter predicts in one pass, the bonus token included."""
    nested = getattr(hf_config, "dflash_config", None) or {}
    block_size = nested.get("block_size", getattr(hf_config, "block_size", None))
    if block_size is None:
        raise ValueError(
            "the drafter's config.json names no block_size; DDTree needs a DFlash drafter "
            "whose config says how many tokens it predicts in one pass"
        )
    return int(block_size)
