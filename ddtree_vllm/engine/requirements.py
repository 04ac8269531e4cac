# SPDX-License-Identifier: Apache-2.0
"""What trees cannot serve exactly, refused by name before the weights load."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.platforms import current_platform

from ddtree_vllm.config import DDTreeConfig
from ddtree_vllm.engine.rows import max_tree_rows
from ddtree_vllm.gdn.launch import num_factors
from ddtree_vllm.gdn.stash import Stash

SUPPORTED_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MAX_BUDGET = 127
# What the attention and Gated DeltaNet kernels are written for.
HEAD_SIZES = (16, 32, 64, 128, 256)
RECURRENT_HEAD_SIZES = (64, 128)
# Compute capabilities that the kernels' tiles are chosen for: A100; A10, A40, RTX 3090; L4, L40S, RTX 4090;
# H100, H200; RTX PRO 6000, RTX 5090. Run on 9.0; on the others compiled for and checked in size.
# Not 10.x: vLLM runs FlashAttention 4 there, whose kernel for heads of 256 takes lengths in whole pages of
# 128, a block table cut to them and no split of the keys. vLLM's own call prepares that
# (`FlashAttentionImpl.forward`), that of `TreeFlashAttention` for the prefix does not.
SUPPORTED_GPUS = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))


class UnsupportedConfigurationError(ValueError):
    """A configuration this plugin would serve wrongly. The message says what to change."""


def check_supported(vllm_config: VllmConfig) -> None:
    """Raise ``UnsupportedConfigurationError`` naming everything that stands in the way.

    Without a speculative configuration the workers run vLLM unchanged, so little is refused.
    """
    reasons = list(_reasons(vllm_config))
    if reasons:
        raise UnsupportedConfigurationError("ddtree-vllm cannot serve this: " + "; ".join(reasons))


def _reasons(vllm_config: VllmConfig) -> Iterator[str]:
    if not vllm_config.use_v2_model_runner:
        yield "Model Runner V1 is selected; set VLLM_USE_V2_MODEL_RUNNER=1"
    spec = vllm_config.speculative_config
    if spec is None:
        return
    model, parallel, cache = (
        vllm_config.model_config,
        vllm_config.parallel_config,
        vllm_config.cache_config,
    )
    architectures = model.architectures or []
    # vLLM may serve the same checkpoint with a class of another name, which knows no tree.
    if model.architecture.startswith("Transformers"):
        yield "--model-impl transformers, whose layers see rows in order; remove it"
    if not set(architectures) & set(SUPPORTED_ARCHITECTURES):
        yield (
            f"the target's architecture {', '.join(architectures) or '(none named)'} is not one of "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if spec.method != "dflash":
        yield f"speculative method {spec.method!r}; DDTree drafts with 'dflash'"
    budget = vllm_config.num_speculative_tokens
    if not 1 <= budget <= MAX_BUDGET:
        yield f"a budget (num_speculative_tokens) of {budget}; it must be 1 to {MAX_BUDGET}"
    config = DDTreeConfig.from_additional_config(vllm_config.additional_config)
    if config.budget != budget:
        yield (
            f"num_speculative_tokens {budget} differs from the budget {config.budget} in "
            "--additional-config; give both the same number"
        )
    if spec.rejection_sample_method != "standard":
        yield (
            f"rejection_sample_method {spec.rejection_sample_method!r}; a tree is walked with "
            "'standard'"
        )
    if spec.draft_sample_method != "greedy":
        yield "draft_sample_method 'probabilistic'; a tree's candidates are chosen with 'greedy'"
    if spec.enable_adaptive_verification:
        yield "adaptive verification, which reorders drafts within a request; switch it off"
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism, which hands on draft tokens but no tree; set its size to 1"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism; set its sizes to 1"
    if parallel.data_parallel_size > 1:
        yield "data parallelism inside one engine; start one engine per replica"
    if spec.draft_parallel_config.tensor_parallel_size != parallel.tensor_parallel_size:
        yield "a drafter on fewer GPUs than the target; remove draft_tensor_parallel_size"
    if parallel.enable_batch_sharded_sampling:
        yield "batch-sharded sampling; switch it off"
    if parallel.use_ubatching:
        yield "dual batch overlap; remove --enable-dbo"
    if vllm_config.lora_config is not None:
        yield "LoRA adapters; remove --enable-lora"
    if vllm_config.kv_transfer_config is not None:
        yield "a KV connector, which reads the cache before the path is committed; remove it"
    if vllm_config.ec_transfer_config is not None:
        yield "an encoder-cache connector, which has not been checked with trees; remove it"
    if vllm_config.weight_transfer_config is not None:
        yield "weight transfer, which would change the target under its drafter; remove it"
    offload = vllm_config.offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        yield "weights kept in CPU memory, not checked with trees; remove the offload options"
    if vllm_config.watermark_config is not None:
        yield "watermarking; remove its configuration"
    if model.enable_sleep_mode:
        yield "sleep mode, which has not been checked with trees; remove --enable-sleep-mode"
    if model.enable_trace_replay or model.return_sampling_mask:
        yield "trace replay or sampling masks; switch them off"
    if model.logits_processors:
        yield "custom logits processors, which may read drafts in row order; remove them"
    if installed := [plugin.name for plugin in entry_points(group="vllm.logits_processors")]:
        yield (
            f"logits processors of installed packages ({', '.join(installed)}), which vLLM loads by "
            "itself; uninstall them"
        )
    if cache.cache_dtype not in ("auto", _name(model.dtype)):
        yield f"KV cache dtype {cache.cache_dtype!r}; use --kv-cache-dtype auto"
    if cache.mamba_cache_mode not in ("none", "align"):
        yield f"mamba cache mode {cache.mamba_cache_mode!r}; use 'align', or 'none' without prefix caching"
    if set(architectures) & set(SUPPORTED_ARCHITECTURES):
        yield from _state_reasons(vllm_config)
    if model.quantization is not None and model.quantization not in ("fp8",):
        yield f"quantization {model.quantization!r}; it has not been checked with trees"
    yield from _kernel_reasons(model.hf_text_config)
    if not current_platform.is_cpu():
        yield from _backend_reasons(vllm_config.attention_config)
    if current_platform.is_cuda():
        yield from _gpu_reasons(vllm_config)
    if envs.VLLM_BATCH_INVARIANT:
        yield "VLLM_BATCH_INVARIANT, whose promise kernels tiled by the batch cannot keep; unset it"
    threshold = vllm_config.scheduler_config.long_prefill_token_threshold
    if 0 < threshold <= budget:
        yield (
            f"--long-prefill-token-threshold {threshold}, below a tree's {budget + 1} rows; raise it "
            f"above {budget} or leave it out"
        )


def _state_reasons(vllm_config: VllmConfig) -> Iterator[str]:
    """A recurrent state that is rounded where it is stored.

    Without speculation that happens once a token, with trees once a step: the tokens would differ.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    window, state = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    if state != torch.float32:
        yield f"a recurrent state in {_name(state)}; use --mamba-ssm-cache-dtype float32"
    if window != model.dtype:
        yield (
            f"convolution windows in {_name(window)} of a model in {_name(model.dtype)}; use "
            "--mamba-cache-dtype auto"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _backend_reasons(attention: Any) -> Iterator[str]:
    """Attention that knows no tree."""
    backends = [attention.backend, *attention.backend_per_kind.values()]
    names = ["auto" if backend is None else backend.name for backend in backends]
    if any(name != "CUSTOM" for name in names):
        yield (
            f"attention backend {', '.join(names)}, whose rows see all rows before them; use "
            "--attention-backend CUSTOM"
        )


def _kernel_reasons(text: Any) -> Iterator[str]:
    """Head sizes that no kernel covers."""
    head_dim = getattr(text, "head_dim", None)
    if head_dim is not None and head_dim not in HEAD_SIZES:
        yield f"attention heads of {head_dim}; the kernels cover {', '.join(map(str, HEAD_SIZES))}"
    for name, what in (("linear_key_head_dim", "key"), ("linear_value_head_dim", "value")):
        size = getattr(text, name, None)
        if size is not None and size not in RECURRENT_HEAD_SIZES:
            yield f"Gated DeltaNet {what} heads of {size}; the kernels cover 64 and 128"


def _gpu_reasons(vllm_config: VllmConfig) -> Iterator[str]:
    """A GPU that the kernels do not fit, or too small for what a step's rows leave behind."""
    capability = current_platform.get_device_capability()
    if capability is not None and tuple(capability) not in SUPPORTED_GPUS:
        served = [f"{major}.{minor}" for major, minor in SUPPORTED_GPUS]
        yield (
            f"a GPU of compute capability {capability.as_version_str()}; use one of "
            f"{', '.join(served[:-1])} or {served[-1]}, or serve without trees (--no-speculation)"
        )
    text = vllm_config.model_config.hf_text_config
    if getattr(text, "linear_num_value_heads", None) is None:
        return  # another architecture, which is refused as such
    if not 1 <= vllm_config.num_speculative_tokens <= MAX_BUDGET:
        return
    rows = max_tree_rows(vllm_config)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    value_heads = text.linear_num_value_heads // ranks
    stash = rows * Stash.bytes_per_row(
        sum(kind == "linear_attention" for kind in text.layer_types),
        text.linear_num_key_heads // ranks,
        value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        vllm_config.model_config.dtype,
    )
    most = vllm_config.scheduler_config.max_num_seqs
    stash += 4 * num_factors(most, vllm_config.num_speculative_tokens + 1, value_heads)
    memory = current_platform.get_device_total_memory()
    room = memory * vllm_config.cache_config.gpu_memory_utilization
    # Beside it go the weights and the caches: half is more than any sensible engine gives.
    if stash > room / 2:
        yield (
            f"{stash / 1e9:.1f} GB for what {rows:,} tree rows of a step leave to the commit, on a GPU "
            f"of {memory / 1e9:.0f} GB; lower --max-num-seqs or --budget"
        )
