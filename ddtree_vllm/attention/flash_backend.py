# SPDX-License-Identifier: Apache-2.0
"""The GPU attention backend (``--attention-backend CUSTOM``): FlashAttention, and trees beside it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from ddtree_vllm.attention.metadata import TREE_ATTRIBUTE, KeyValueViews
from ddtree_vllm.attention.tree_attention import tree_attention


class TreeFlashAttention(KeyValueViews, FlashAttentionImpl):
    """FlashAttention for linear rows, the tree kernel for tree rows."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step = getattr(attn_metadata, TREE_ATTRIBUTE, None)
        if step is None or step.max_rows <= 1 or self.attn_type != AttentionType.DECODER:
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if not step.only_trees:
            # Linear rows keep FlashAttention; tree rows are then overwritten.
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        tokens = attn_metadata.num_actual_tokens
        key_cache, value_cache = self.key_value_views(kv_cache)
        num_reqs = attn_metadata.seq_lens.shape[0]
        tree_attention(
            query[:tokens],
            key_cache,
            value_cache,
            output[:tokens],
            block_table=attn_metadata.block_table,
            seq_lens=attn_metadata.seq_lens,
            query_start_loc=attn_metadata.query_start_loc,
            max_query_len=step.max_rows,
            max_seq_len=attn_metadata.max_seq_len,
            scale=self.scale,
            ancestors=step.tree.ancestors,
            slots=step.slots[:num_reqs],
            trees_only=not step.only_trees,
        )
        return output


class TreeFlashAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return TreeFlashAttention
