# SPDX-License-Identifier: Apache-2.0
"""The targets: vLLM's own classes, told that verification needs one recurrent state, not N + 1."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

import ddtree_vllm.gdn.layer  # noqa: F401  (replaces the recurrent layer before a model is built)
from ddtree_vllm.config import uses_trees


class _TreeTarget:
    vllm_config: VllmConfig

    def get_model_state_cls(self) -> type:
        if uses_trees(self.vllm_config):
            from ddtree_vllm.engine.model_state import DDTreeModelState

            return DDTreeModelState
        from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

        return MambaHybridModelState

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Conv and recurrent state of one request. Sizes the cache page, so no draft widens it."""
        if not uses_trees(vllm_config):
            return super().get_mamba_state_shape_from_config(vllm_config)  # type: ignore[misc]
        hf = vllm_config.model_config.hf_text_config
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            vllm_config.parallel_config.tensor_parallel_size,
            hf.linear_num_key_heads,
            hf.linear_num_value_heads,
            hf.linear_key_head_dim,
            hf.linear_value_head_dim,
            hf.linear_conv_kernel_dim,
            0,
        )


class DDTreeQwen3_5ForCausalLM(_TreeTarget, Qwen3_5ForCausalLM):
    """Text target."""


class DDTreeQwen3_5ForConditionalGeneration(_TreeTarget, Qwen3_5ForConditionalGeneration):
    """Multimodal target (M-RoPE)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vllm_config = vllm_config
