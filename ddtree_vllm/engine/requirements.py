# SPDX-License-Identifier: Apache-2.0
"""What trees cannot serve exactly, refused by name before the weights load."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import VllmConfig

from ddtree_vllm.config import DDTreeConfig

SUPPORTED_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MAX_BUDGET = 127


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
    if parallel.enable_batch_sharded_sampling:
        yield "batch-sharded sampling; switch it off"
    if parallel.use_ubatching:
        yield "dual batch overlap; remove --enable-dbo"
    if vllm_config.lora_config is not None:
        yield "LoRA adapters; remove --enable-lora"
    if vllm_config.kv_transfer_config is not None:
        yield "a KV connector, which reads the cache before the path is committed; remove it"
    if vllm_config.watermark_config is not None:
        yield "watermarking; remove its configuration"
    if model.enable_sleep_mode:
        yield "sleep mode, which has not been checked with trees; remove --enable-sleep-mode"
    if model.enable_trace_replay or model.return_sampling_mask:
        yield "trace replay or sampling masks; switch them off"
    if model.logits_processors:
        yield "custom logits processors, which may read drafts in row order; remove them"
    if cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        yield f"KV cache dtype {cache.cache_dtype!r}; use --kv-cache-dtype auto"
    if cache.mamba_cache_mode not in ("none", "align"):
        yield f"mamba cache mode {cache.mamba_cache_mode!r}; use 'align', or 'none' without prefix caching"
    if model.quantization is not None and model.quantization not in ("fp8",):
        yield f"quantization {model.quantization!r}; it has not been checked with trees"
