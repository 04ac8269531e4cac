# SPDX-License-Identifier: Apache-2.0
"""vLLM's Gated DeltaNet layer, verifying trees from one committed state.

Importing this module puts the layer in the place of vLLM's own for every model built afterwards.
Rows that are not a tree keep vLLM's kernels on a GPU. On a CPU, where vLLM's refuse float32, they go
through ours, with speculation and without, so that both runs share one set of kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from ddtree_vllm.attention.metadata import TREE_ATTRIBUTE
from ddtree_vllm.config import uses_trees
from ddtree_vllm.engine.active import is_active
from ddtree_vllm.gdn.commit import StateTable, commit_paths
from ddtree_vllm.gdn.conv import causal_conv, lay_out_by_taps, tree_causal_conv
from ddtree_vllm.gdn.metadata import TreeGDNBackend
from ddtree_vllm.gdn.operator import gated_delta_net
from ddtree_vllm.gdn.projection import share_weight
from ddtree_vllm.gdn.recurrent import run_sequences
from ddtree_vllm.gdn.stash import Stash
from ddtree_vllm.gdn.verify import verify_tree

if TYPE_CHECKING:
    from ddtree_vllm.engine.step import TreeStep
    from ddtree_vllm.tree import DraftTree

_STOCK_NAME = QwenGatedDeltaNetAttention.__name__
# Physical block 0 of vLLM's caches belongs to nobody.
_NULL_BLOCK = 0


class TreeGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """Takes the place of ``QwenGatedDeltaNetAttention``; stock where the engine is not active."""

    def __init__(
        self,
        config: Any,
        vllm_config: VllmConfig,
        prefix: str = "",
        gqa_interleaved_layout: bool = False,
        reduce_results: bool = True,
    ) -> None:
        super().__init__(config, vllm_config, prefix, gqa_interleaved_layout, reduce_results)
        self.verifies_trees = uses_trees(vllm_config)
        self.serves_all_rows = is_active(vllm_config) and not gqa_interleaved_layout
        self.verification: TreeVerification | None = None
        self.layer_number = -1
        self.state_group = -1
        # Of both products that read the layer's input. No parameter: a checkpoint names their own.
        self.in_proj: torch.Tensor | None
        self.register_buffer("in_proj", None, persistent=False)
        if not self.verifies_trees:
            return
        if gqa_interleaved_layout:
            raise ValueError(
                "ddtree-vllm does not verify trees on the interleaved Gated DeltaNet layout of "
                "Qwen3-Next; serve a Qwen3.5 or Qwen3.6 model, or serve without speculation"
            )
        # A tree needs no state per draft: neither conv columns nor blocks are added for drafts, and
        # the fused kernel, which expects them, stays out.
        self.num_spec = 0
        self.enable_fused_gdn_spec_decode = False
        if not current_platform.is_cuda():
            return  # There vLLM packs each weight for itself.
        lay_out_by_taps(self.conv1d.weight)
        # LoRA wraps each of the two.
        if vllm_config.lora_config is None and not self.disable_tp_for_ba_proj:
            self.in_proj = share_weight((self.in_proj_qkvz, self.in_proj_ba))

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        if self.verifies_trees and spec is not None:
            spec = dataclasses.replace(spec, num_speculative_blocks=0)
        return spec

    def get_attn_backend(self) -> type[AttentionBackend]:
        return TreeGDNBackend if self.verifies_trees else super().get_attn_backend()

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.serves_all_rows:
            return super().forward_cpu(hidden_states)
        mixed_qkv, z, b, a = self._project(hidden_states)
        num_v_heads = self.num_v_heads // self.tp_size
        out = torch.zeros(
            (hidden_states.shape[0], num_v_heads, self.head_v_dim),
            dtype=hidden_states.dtype,
            device=hidden_states.device,
        )
        metadata = self._metadata()
        if metadata is not None:
            self._verify_trees(mixed_qkv, b, a, out, getattr(metadata, TREE_ATTRIBUTE, None))
            self._serve_linear_rows(mixed_qkv, b, a, out, metadata)
        return self._output_projection(out, z.reshape(z.shape[0], -1, self.head_v_dim))

    def forward_cuda(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.in_proj is None:
            return super().forward_cuda(hidden_states)
        mixed_qkv, z, b, a = self._project(hidden_states)
        z = z.reshape(z.shape[0], -1, self.head_v_dim)
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
        gated_delta_net(mixed_qkv, b, a, out, layer_name=_encode_layer_name(self.prefix))
        return self._output_projection(out, z)

    def run_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The convolution and the recurrence, between the projections.

        Args:
            mixed_qkv, b, a: as `_project` gives them.
            out: ``[T, Hv, V]``, written in every row, padding's too: what is never written must not
                be a NaN, which a product that scales its input by the largest would spread.
        """
        step = getattr(self._metadata(), TREE_ATTRIBUTE, None)
        if step is not None and step.rows_per_request * step.num_reqs == out.shape[0]:
            self._verify_trees(mixed_qkv, b, a, out, step, step.rows_per_request)
            return
        out.zero_()
        # vLLM's kernels take the gates' rows to be contiguous.
        self._forward_core(mixed_qkv, b.contiguous(), a.contiguous(), out)

    def _project(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v; the output gate; the gates b and a. Views, channels contiguous.

        Args:
            hidden_states: ``[T, H]``.

        Returns:
            ``[T, 2 Hk K + Hv V]``, ``[T, Hv V]``, ``[T, Hv]`` and ``[T, Hv]``.
        """
        qkv_size = (2 * self.key_dim + self.value_dim) // self.tp_size
        z_size = self.value_dim // self.tp_size
        if self.in_proj is not None:
            num_v_heads = self.num_v_heads // self.tp_size
            merged = torch.nn.functional.linear(hidden_states, self.in_proj)
            used = merged[..., : qkv_size + z_size + 2 * num_v_heads]
            return used.split([qkv_size, z_size, num_v_heads, num_v_heads], dim=-1)
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        mixed_qkv, z = mixed_qkvz.split([qkv_size, z_size], dim=-1)
        b, a = self.split_ba(ba)
        return mixed_qkv, z, b, a

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        metadata = self._metadata() if self.verifies_trees else None
        if metadata is None or metadata.spec_sequence_masks is None:
            return super()._forward_core(mixed_qkv, b, a, core_attn_out)
        self._verify_trees(mixed_qkv, b, a, core_attn_out, getattr(metadata, TREE_ATTRIBUTE, None))
        if metadata.num_prefills > 0:
            self._stock_linear_rows(mixed_qkv, b, a, core_attn_out, metadata)

    def _metadata(self) -> GDNAttentionMetadata | None:
        """This step's metadata of the layer; None in profiling runs."""
        metadata = get_forward_context().attn_metadata
        return metadata.get(self.prefix) if isinstance(metadata, dict) else None

    def _verify_trees(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        step: TreeStep | None,
        rows_per_request: int = 0,
    ) -> None:
        """Outputs of all tree rows, and the stash that lets the accepted path be committed.

        With ``rows_per_request`` zeros in all other rows, see ``verify_tree``.
        """
        if step is None or step.max_rows == 0:
            return
        assert self.verification is not None
        rows = step.tree_rows(self.state_group)
        stash = self.verification.stash
        conv_out = torch.empty_like(mixed_qkv, memory_format=torch.contiguous_format)
        tree_causal_conv(
            mixed_qkv,
            self._conv_weight(),
            self.conv1d.bias,
            self._conv_state(),
            rows,
            step.tree,
            conv_out,
            stash,
            self.layer_number,
        )
        verify_tree(
            conv_out,
            a,
            b,
            self.A_log,
            self.dt_bias,
            self.kv_cache[1],
            rows,
            step.tree,
            out,
            stash,
            self.layer_number,
            rows_per_request=rows_per_request,
        )

    def _serve_linear_rows(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        metadata: GDNAttentionMetadata,
    ) -> None:
        """Prefill chunks, and decoding without speculation, through our sequential kernels."""
        if metadata.non_spec_query_start_loc is None:
            return
        index = metadata.non_spec_token_indx
        tokens = metadata.num_actual_tokens
        if index is None:
            x, a, b = mixed_qkv[:tokens], a[:tokens], b[:tokens]
        else:
            x, a, b = mixed_qkv[index], a[index], b[index]
        if x.shape[0] == 0:
            return
        conv_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        core = torch.empty((x.shape[0], *out.shape[1:]), dtype=out.dtype, device=out.device)
        # Decoding alone: one row a sequence, for which the kernels have nothing to solve.
        max_query_len = x.shape[0] if metadata.num_prefills > 0 else 1
        sequences = (
            metadata.non_spec_state_indices_tensor,
            metadata.non_spec_query_start_loc,
            metadata.has_initial_state,
        )
        causal_conv(
            x,
            self._conv_weight(),
            self.conv1d.bias,
            self._conv_state(),
            *sequences,
            conv_out,
            max_query_len=max_query_len,
            null_slot=_NULL_BLOCK,
        )
        run_sequences(
            conv_out,
            a,
            b,
            self.A_log,
            self.dt_bias,
            self.kv_cache[1],
            *sequences,
            core,
            num_k_heads=self.num_k_heads // self.tp_size,
            max_query_len=max_query_len,
            null_slot=_NULL_BLOCK,
        )
        if index is None:
            out[:tokens] = core
        else:
            out[index] = core

    def _stock_linear_rows(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        metadata: GDNAttentionMetadata,
    ) -> None:
        """Rows beside the trees through vLLM's kernels, as a batch that never had any drafts."""
        index = metadata.non_spec_token_indx
        assert index is not None
        core = torch.empty((index.shape[0], *out.shape[1:]), dtype=out.dtype, device=out.device)
        context = get_forward_context()
        assert isinstance(context.attn_metadata, dict)
        linear = dataclasses.replace(
            metadata,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=index.shape[0],
            spec_query_start_loc=None,
            spec_state_indices_tensor=None,
            spec_sequence_masks=None,
            spec_sequence_masks_cpu=None,
            spec_token_indx=None,
            non_spec_token_indx=None,
            num_accepted_tokens=None,
        )
        context.attn_metadata[self.prefix] = linear
        try:
            super()._forward_core(
                mixed_qkv.index_select(0, index),
                b.index_select(0, index),
                a.index_select(0, index),
                core,
            )
        finally:
            context.attn_metadata[self.prefix] = metadata
        out.index_copy_(0, index.long(), core)

    def _conv_state(self) -> torch.Tensor:
        """``[slots, W - 1, C]`` with contiguous channels."""
        state = self.kv_cache[0]
        return state.transpose(-1, -2) if is_conv_state_dim_first() else state

    def _conv_weight(self) -> torch.Tensor:
        """``[C, W]``. vLLM packs the weight on some CPUs and keeps the plain one beside it."""
        weight = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        if weight is None:
            weight = self.conv1d.weight
        return weight.reshape(weight.shape[0], weight.shape[-1])


def allocate_stash(vllm_config: VllmConfig, max_rows: int, device: torch.device) -> Stash:
    """The stash of all recurrent layers that this process has built.

    Args:
        max_rows: the most tree rows a step can hold, over all its requests.
    """
    budget = vllm_config.num_speculative_tokens
    layers = [
        layer
        for layer in vllm_config.compilation_config.static_forward_context.values()
        if isinstance(layer, TreeGatedDeltaNetAttention)
    ]
    first = layers[0]
    return Stash.allocate(
        num_layers=len(layers),
        max_rows=max_rows,
        num_k_heads=first.num_k_heads // first.tp_size,
        num_v_heads=first.num_v_heads // first.tp_size,
        head_k_dim=first.head_k_dim,
        head_v_dim=first.head_v_dim,
        dtype=vllm_config.model_config.dtype,
        device=device,
        max_reqs=vllm_config.scheduler_config.max_num_seqs,
        max_num_rows=budget + 1,
    )


class TreeVerification:
    """What the recurrent layers of one model share: the stash, and the commit of accepted paths."""

    def __init__(
        self,
        groups: Sequence[Sequence[TreeGatedDeltaNetAttention]],
        tree: DraftTree,
        step: TreeStep,
        stash: Stash,
    ) -> None:
        """Args:
        groups: the layers of each recurrent KV-cache group, which share a block table.
        """
        layers = [layer for group in groups for layer in group]
        self.layers = layers
        self.step = step
        self.tree = tree
        self.stash = stash
        number = 0
        for index, group in enumerate(groups):
            for layer in group:
                layer.verification = self
                layer.layer_number = number
                layer.state_group = index
                number += 1
        self.table = StateTable.build(
            [(layer._conv_state(), layer.kv_cache[1]) for layer in layers],
            groups=[layer.state_group for layer in layers],
        )
        self.conv_width = layers[0].conv_kernel_size

    def clear(self, requests: torch.Tensor) -> None:
        """Zero every layer's state of some requests.

        Args:
            requests: int64 ``[n]``, their places in the batch; each brings tree rows.
        """
        for layer in self.layers:
            # An entry without a block clears the null block, which belongs to nobody.
            slots = self.step.state_slots[layer.state_group, requests].clamp(min=_NULL_BLOCK)
            layer._conv_state().index_fill_(0, slots.long(), 0)
            layer.kv_cache[1].index_fill_(0, slots.long(), 0)

    def commit(self, num_reqs: int) -> None:
        """Advance every layer's state along the accepted paths; keep the state at block boundaries."""
        step = self.step
        keeps_boundaries = step.state_block_size > 0
        # Tables of one group take plain slots.
        groups = slice(None) if self.table.num_groups > 1 else 0
        commit_paths(
            self.table,
            self.stash,
            step.path[:num_reqs],
            step.path_len[:num_reqs],
            step.stash_start[:num_reqs],
            step.state_slots[groups, :num_reqs],
            max_path=self.tree.max_depth + 1,
            conv_width=self.conv_width,
            cut_len=step.cut_len[:num_reqs] if keeps_boundaries else None,
            cut_slots=step.cut_slots[groups, :num_reqs] if keeps_boundaries else None,
            null_slot=_NULL_BLOCK,
        )


# vLLM's registry asserts that a name is new, and models may be imported more than once.
if _STOCK_NAME not in op_registry_oot:
    PluggableLayer.register_oot(TreeGatedDeltaNetAttention, name=_STOCK_NAME)
