# SPDX-License-Identifier: Apache-2.0
"""What vLLM prepares for the Gated DeltaNet layers before a step, less what trees do not read.

vLLM copies the blocks of speculative rows to where a captured graph finds them, once for every group
of layers: 48 launches a step on Qwen3.6-27B, each of 2 µs on an H200 with what lies between two
launches (docs/benchmarks). Tree rows find theirs in `engine.step.TreeStep`, which one launch fills for
all groups.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)


class TreeGDNMetadataBuilder(GDNAttentionMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM grants this to its own class alone, for others might keep more for every group. Here is
        # less. The attribute asks for the blocks of prefix caching, which the runner then sets.
        self.supports_update_block_table = (
            self.vllm_config.use_v2_model_runner and self.device.type == "cuda"
        )
        if self.supports_update_block_table:
            self.mamba_aligned_state_indices = None

    def _stage_spec_decode(self, *counts: int) -> bool:
        return False

    def update_block_table(
        self,
        metadata: GDNAttentionMetadata,
        blk_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> GDNAttentionMetadata:
        """The metadata of another group of the same step: of trees alone, the same."""
        if metadata.num_spec_decodes > 0 and metadata.num_prefills == 0:
            return metadata
        return super().update_block_table(metadata, blk_table, slot_mapping)


class TreeGDNBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[TreeGDNMetadataBuilder]:
        return TreeGDNMetadataBuilder
