# SPDX-License-Identifier: Apache-2.0
"""Every field that a request to vLLM 0.32 can have: its row of docs/compatibility.md, or why none.

The fields are those of CompletionRequest, ChatCompletionRequest and, for /inference/v1/generate,
SamplingParams. A unit test compares with vLLM's own lists, so that a field nobody thought of shows.
"""

from __future__ import annotations

# Where the row has another name than the field.
ROWS = {
    "messages": "chat",
    "prompt": "token ids as prompt",
    "temperature": "temperature and seed",
    "seed": "temperature and seed",
    "n": "n > 1",
    "max_tokens": "max_tokens inside a path",
    "max_completion_tokens": "chat",
    "use_beam_search": "beam search",
    "length_penalty": "beam search",
    "truncation_side": "truncate_prompt_tokens",
    "spaces_between_special_tokens": "skip_special_tokens",
    "response_format": "json_schema",
    "structured_outputs": "json_schema",
    "tools": "tool calls: auto",
    "tool_choice": "tool calls: required",
    "parallel_tool_calls": "tool calls: parallel",
    "chat_template_kwargs": "reasoning",
    "include_reasoning": "reasoning",
    "add_generation_prompt": "continue_final_message",
    "stream": "greedy",
    "stream_options": "usage",
    "prompt_logprob_token_ids": "/inference/v1/generate",
    "prompt_logprob_start": "/inference/v1/generate",
    "flat_logprobs": "/inference/v1/generate",
    "skip_reading_prefix_cache": "/inference/v1/generate",
    "detokenize": "/inference/v1/generate",
    "prompt_embeds": "--enable-prompt-embeds",
    "priority": "--scheduling-policy priority",
    "watermarking": "--watermark-config",
    "kv_transfer_params": "--kv-transfer-config",
    "ec_transfer_params": "--ec-transfer-config",
    "trace_decode_token_ids": "--enable-trace-replay",
    "vllm_xargs": "--logits-processors",
    "extra_args": "--logits-processors",
}

# What the page says of the fields without a row.
WITHOUT = {
    "Names of a request, a client or a model": ("model", "user", "request_id", "session_id"),
    "Make the prompt, before an engine sees it": (
        "add_special_tokens",
        "documents",
        "chat_template",
        "media_io_kwargs",
        "mm_processor_kwargs",
    ),
    "Say what an answer repeats of the request": ("return_token_ids", "return_prompt_text"),
    "Only for `/render`, which generates nothing": (
        "return_token_offsets",
        "mm_payload",
        "return_mm_kwargs",
    ),
    "Only for mixtures of experts, which the targets are not": ("routed_experts_prompt_start",),
    "Set by vLLM itself": ("output_kind", "output_text_buffer_length", "skip_clone"),
}
