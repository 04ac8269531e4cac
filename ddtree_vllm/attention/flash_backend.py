# SPDX-License-Identifier: Apache-2.0
"""The GPU attention backend (``--attention-backend CUSTOM``): FlashAttention, and trees beside it.

A step of trees alone reads the prefix through FlashAttention, unmasked, and adds the rows of the step
by their ancestors. A step that mixes trees and prompts runs the tree kernel over the trees' whole
sequences: FlashAttention has then served the prompts, and its launch cannot leave rows out.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from ddtree_vllm.attention.metadata import TREE_ATTRIBUTE, KeyValueViews
from ddtree_vllm.attention.tree_attention import tree_attention, tree_suffix_attention


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
        tokens = attn_metadata.num_actual_tokens
        num_reqs = attn_metadata.seq_lens.shape[0]
        key_cache, value_cache = self.key_value_views(kv_cache)
        rows, out = query[:tokens], output[:tokens]
        common = {
            "block_table": attn_metadata.block_table,
            "seq_lens": attn_metadata.seq_lens,
            "query_start_loc": attn_metadata.query_start_loc,
            "max_query_len": step.max_rows,
            "scale": self.scale,
            "ancestors": step.tree.ancestors,
            "slots": step.slots[:num_reqs],
        }
        if not step.only_trees:
            # Linear rows keep FlashAttention; tree rows are then overwritten.
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
            tree_attention(
                rows,
                key_cache,
                value_cache,
                out,
                max_seq_len=attn_metadata.max_seq_len,
                trees_only=True,
                **common,
            )
            return output
        _, prefix_lse = flash_attn_varlen_func(
            q=rows,
            k=key_cache,
            v=value_cache,
            out=out,
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=step.max_rows,
            seqused_k=step.prefix_lens[:num_reqs],
            max_seqlen_k=attn_metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            block_table=attn_metadata.block_table,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
        )
        tree_suffix_attention(
            rows, key_cache, value_cache, out, prefix_out=out, prefix_lse=prefix_lse, **common
        )
        return output


class TreeFlashAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return TreeFlashAttention
