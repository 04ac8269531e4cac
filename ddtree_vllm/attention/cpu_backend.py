# SPDX-License-Identifier: Apache-2.0
"""The CPU attention backend: rows that a step marks as a tree attend by ancestry."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from ddtree_vllm.attention.metadata import TREE_ATTRIBUTE, KeyValueViews
from ddtree_vllm.attention.store_kv import store_kv
from ddtree_vllm.attention.tree_attention import tree_attention
from ddtree_vllm.engine.active import is_active


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """Takes the place of ``CPU_ATTN``, for target and drafter, when the engine is active.

    Stock CPU kernels store keys column by column, in a layout that differs per instruction set; this
    one owns its cache layout, which is the GPU's, and runs the GPU's kernels.
    """

    @staticmethod
    def get_impl_cls() -> type:
        from vllm.config import get_current_vllm_config_or_none

        return (
            TreeCPUAttention
            if is_active(get_current_vllm_config_or_none())
            else (CPUAttentionBackendImpl)
        )

    @staticmethod
    def get_builder_cls() -> type:
        return TreeCPUAttentionMetadataBuilder


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        m = common_attn_metadata
        if not is_active(self.vllm_config) or self.is_encoder_only_attention:
            return super().build(common_prefix_len, m, fast_build)
        return CPUAttentionMetadata(
            num_actual_tokens=m.num_actual_tokens,
            max_query_len=m.max_query_len,
            query_start_loc=m.query_start_loc,
            max_seq_len=m.max_seq_len,
            seq_lens=m.seq_lens,
            block_table=m.block_table_tensor,
            slot_mapping=m.slot_mapping,
            scheduler_metadata=None,  # the stock C++ kernel's, which does not run
            causal=m.causal,
        )


class TreeCPUAttention(KeyValueViews, CPUAttentionBackendImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "attention sinks": self.sinks is not None,
            "ALiBi": self.alibi_slopes is not None,
            "logits soft cap": bool(self.logits_soft_cap),
            "an FP8 KV cache": self.is_fp8_kv_cache,
        }
        named = [name for name, present in unsupported.items() if present]
        if named and self.attn_type == AttentionType.DECODER:
            raise ValueError(f"ddtree-vllm's attention does not cover {', '.join(named)}.")

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None or self.attn_type != AttentionType.DECODER:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        tokens = attn_metadata.num_actual_tokens
        key_cache, value_cache = self.key_value_views(kv_cache)
        step = getattr(attn_metadata, TREE_ATTRIBUTE, None)
        num_reqs = attn_metadata.seq_lens.shape[0]
        tree_attention(
            query[:tokens],
            key_cache,
            value_cache,
            output[:tokens],
            block_table=attn_metadata.block_table,
            seq_lens=attn_metadata.seq_lens,
            query_start_loc=attn_metadata.query_start_loc,
            max_query_len=attn_metadata.max_query_len,
            max_seq_len=attn_metadata.max_seq_len,
            scale=self.scale,
            ancestors=None if step is None else step.tree.ancestors,
            slots=None if step is None else step.slots[:num_reqs],
            causal=bool(attn_metadata.causal),
            window=max(self.sliding_window, 0),
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if self.attn_type != AttentionType.DECODER:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        key_cache, value_cache = self.key_value_views(kv_cache)
        store_kv(key, value, key_cache, value_cache, slot_mapping)
