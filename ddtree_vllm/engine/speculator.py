# SPDX-License-Identifier: Apache-2.0
"""DFlash drafting (arXiv 2602.06036) that ends in a tree instead of a chain (arXiv 2604.12989)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from ddtree_vllm.cache.linearise import linearise_rows
from ddtree_vllm.config import DDTreeConfig
from ddtree_vllm.engine.model_state import DDTreeModelState, drafter_block_size
from ddtree_vllm.gpu import choose_blas
from ddtree_vllm.tree import build_draft_trees, make_policy, top_k_log_probs


class DDTreeSpeculator(DFlashSpeculator):
    """Runs the drafter once over its block and builds every request's tree on the device.

    vLLM knows one number, ``num_speculative_tokens``: here it is the node budget N, which sizes
    drafts, KV slots and graphs. The drafter needs another, the depth L of its block. So the stock
    class is given a configuration that says L, and what it returns is resized to N.
    """

    _speculator_name = "DDTree"

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.budget: int = vllm_config.num_speculative_tokens
        super().__init__(_with_draft_depth(vllm_config), device)
        self.depth: int = self.num_speculative_steps
        config = DDTreeConfig.from_additional_config(vllm_config.additional_config)
        self.top_k = min(config.top_k, self.vocab_size)
        if config.policy != "static":  # whose nodes may have ranks beyond their number
            self.top_k = min(self.top_k, self.budget)
        self.policy = make_policy(
            config.policy,
            budget=self.budget,
            depth=self.depth,
            candidates=self.top_k,
            device=device,
            static_tree=config.static_tree,
        )
        self.draft_tokens = torch.zeros(
            self.max_num_reqs, self.budget, dtype=torch.int64, device=device
        )
        # Request slot whose tree each draft row builds; -1 builds none. Read inside the graph.
        self.tree_slots = torch.full((self.max_num_reqs,), -1, dtype=torch.int32, device=device)
        self.tree_state: DDTreeModelState | None = None

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: Any,
        block_tables: BlockTables,
        *args: Any,
    ) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        assert isinstance(model_state, DDTreeModelState)
        self.tree_state = model_state

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        # A captured draft stores the context of a full verify: N + 1 rows a request, not L + 1.
        return min(num_reqs * (self.budget + 1), self.max_num_tokens)

    def capture(self) -> None:
        self.tree_slots.fill_(-1)
        # The target's graphs, captured before, had one chosen by their rows.
        choose_blas(None)
        super().capture()

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        num_reqs = input_batch.num_reqs
        self.tree_slots.fill_(-1)
        if not dummy_run and self.tree_state is not None:
            self.tree_slots[:num_reqs].copy_(input_batch.idx_mapping)
            step = self.tree_state.step
            assert step is not None
            # From here on everything reads an ordinary accepted prefix.
            rows = aux_hidden_states if aux_hidden_states else [last_hidden_states]
            linearise_rows(
                rows, step.path[:num_reqs], step.path_len[:num_reqs], step.row_start[:num_reqs]
            )
        return super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *args,
            dummy_run=dummy_run,
            **kwargs,
        )

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        masked = hidden_states[self.sample_indices[: num_reqs * self.depth]]
        logits = self.compute_draft_logits(masked, 0)
        log_probs, tokens = top_k_log_probs(logits, self.top_k)
        if self.tree_state is None:  # memory profiling, before the caches and the trees exist
            return
        build_draft_trees(
            self.tree_state.tree,
            log_probs.view(num_reqs, self.depth, self.top_k),
            tokens.view(num_reqs, self.depth, self.top_k),
            self.tree_slots[:num_reqs],
            self.policy,
            spine_only=self.tree_state.spine_only,
            out_tokens=self.draft_tokens[:num_reqs],
        )


def _with_draft_depth(vllm_config: VllmConfig) -> VllmConfig:
    """A copy of the configuration whose speculative tokens are the drafter's depth.

    A budget below the drafter's block shortens the query as vLLM's own chain does: a node cannot
    be deeper than the number of nodes, and vLLM reserves KV slots for the budget only.
    """
    spec = copy.copy(vllm_config.speculative_config)
    block_size = drafter_block_size(spec.draft_model_config.hf_config)
    spec.num_speculative_tokens = min(block_size - 1, vllm_config.num_speculative_tokens)
    config = copy.copy(vllm_config)
    config.speculative_config = spec
    return config
