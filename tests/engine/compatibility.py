# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md: what tests found, row by row.

A test records what it saw of a feature. An ordinary run holds that against the document; with
--write-compatibility (`make compatibility`) the document is written instead. So it cannot say what
no test has seen, and a run of any part of the tests checks that part of it.
"""

from __future__ import annotations

import re
from pathlib import Path

from request_fields import WITHOUT

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
SAME = "same answer"

# By section: a feature, and what there is to know about it. Every feature is recorded by one test.
FEATURES: dict[str, dict[str, str]] = {
    "Sampling": {
        "greedy": "",
        "temperature and seed": "the same seed gives the same tokens",
        "top_p": "",
        "top_k": "",
        "n > 1": "",
        "presence_penalty": "drafts a chain",
        "frequency_penalty": "drafts a chain",
        "repetition_penalty": "drafts a chain",
        "bad_words": "drafts a chain",
        "allowed_token_ids": "up to 1,024; more are refused with HTTP 400",
        "logit_bias": "HTTP 400",
        "min_p": "HTTP 400",
        "beam search": "",
    },
    "Ends of a request": {
        "stop": "",
        "include_stop_str_in_output": "",
        "stop_token_ids": "with `min_tokens` up to 128, more are refused with HTTP 400",
        "min_tokens": "",
        "ignore_eos": "",
        "max_tokens inside a path": "",
        "stream_interval": "",
        "repetition_detection": "",
        "closed connection": "the request is aborted",
    },
    "Log-probabilities": {
        "logprobs": "",
        "top_logprobs": "",
        "prompt_logprobs": "",
        "logprob_token_ids": "",
        "return_tokens_as_token_ids": "",
    },
    "Prompts": {
        "echo": "",
        "several prompts": "",
        "token ids as prompt": "",
        "truncate_prompt_tokens": "",
        "cache_salt": "",
        "skip_special_tokens": "",
        "suffix": "HTTP 400, without speculation too",
    },
    "Structured output": {
        "json_object": "drafts a chain",
        "json_schema": "drafts a chain",
        "regex": "drafts a chain",
        "choice": "drafts a chain",
        "grammar": "drafts a chain",
        "structural_tag": "drafts a chain",
        "structured output with penalties": "drafts a chain",
        "structured output with n > 1": "drafts a chain",
        "structured output after reasoning": "the constraint starts after the end-of-thinking token",
    },
    "Chat": {
        "chat": "",
        "continue_final_message": "",
        "reasoning": "",
        "reasoning_effort": "",
        "thinking_token_budget": "drafts a chain",
        "usage": "but for a stream's `reasoning_tokens`, which vLLM counts by chunks and time",
        "tool calls: auto": "",
        "tool calls: required": "drafts a chain",
        "tool calls: named": "drafts a chain",
        "tool calls: none": "",
        "tool calls: parallel": "",
        "tool results": "",
    },
    "Other endpoints": {
        "/tokenize": "",
        "/v1/responses": "",
        "/v1/messages": "",
        "/v1/chat/completions/batch": "",
        "/inference/v1/generate": "with `--enable-scale-out`",
        "/generative_scoring": "",
    },
    "Engine": {
        "backend xgrammar": "",
        "backend guidance": "",
        "prefix caching": (
            "with `--prefix-cache-retention-interval` also at boundaries inside a reply; a hit is a "
            "block shorter, as with every drafter of vLLM"
        ),
        "reset_prefix_cache": "",
        "chunked prefill": "",
        "async scheduling": "on and off",
        "preemption": "",
        "images": "`Qwen3_5ForConditionalGeneration`; positions with rows and columns (M-RoPE)",
        "mixed batches": "prefill, chains, trees and sampling in one step",
        "--max-model-len": "reached inside a tree",
        "--max-num-seqs of 1": "",
        "--max-num-seqs of 48": "",
        "num_speculative_tokens_per_batch_size": "",
        "--logprobs-mode": "`processed_logprobs` too",
        "--tool-call-parser qwen3_coder": "of Qwen3.5 and Qwen3.6; `qwen3_xml` is another name of it",
        "--tool-call-parser hermes": "",
        "--scheduling-policy priority": "",
        "--prefix-match-unit": "",
        "--enable-prompt-embeds": "",
        "--quantization fp8": "vLLM has no kernels for it on a CPU, where all else is compared",
        "--tensor-parallel-size": "two processes on a CPU: the same trees on both",
    },
    "Refused at start-up": dict.fromkeys(
        [
            "--pipeline-parallel-size",
            "--data-parallel-size",
            "--decode-context-parallel-size",
            "--prefill-context-parallel-size",
            "--enable-batch-sharded-sampling",
            "draft_tensor_parallel_size",
            "draft_sample_method",
            "rejection_sample_method",
            "--enable-lora",
            "--enable-sleep-mode",
            "--kv-transfer-config",
            "--kv-offloading-size",
            "--ec-transfer-config",
            "--weight-transfer-config",
            "--cpu-offload-gb",
            "--model-impl transformers",
            "--quantization fp8_per_tensor",
            "--kv-cache-dtype fp8",
            "--kv-cache-dtype bfloat16",
            "--mamba-cache-mode all",
            "--mamba-ssm-cache-dtype bfloat16",
            "--mamba-cache-dtype bfloat16",
            "--logits-processors",
            "--watermark-config",
            "--enable-trace-replay",
        ],
        "",
    )
    | {
        "--enable-sleep-mode": "on a GPU: sleep mode, which has not been checked with trees",
        "--kv-cache-dtype bfloat16": "of a model in float32; a model's own type is taken",
        "--mamba-cache-dtype bfloat16": "of a model in float32",
    },
}

_HEAD = """\
# Compatibility

What becomes of vLLM's features under draft trees. `make compatibility` writes this page from what
the tests see; every test run checks the rows it comes by.

*Same answer*: tests compare tokens, text, log-probabilities, finish reasons, usage and the joined
deltas of streams with the same vLLM without speculation, float32 on a CPU. *Refused*: with the
sentence that the client or the one who starts the server gets. *Drafts a chain*: what the
target says at a node would depend on the order of rows, so such a request's tree has no branches;
other requests of the batch keep theirs. *Accepted, not compared*: it
starts, and nothing here has seen its answers.
"""


class Compatibility:
    """The document of this run."""

    def __init__(self, write: bool) -> None:
        self.write = write

    def record(self, feature: str, found: str = SAME) -> None:
        """Hold what was found against the document, or put it there."""
        assert feature in features(), f"{feature!r} is not in FEATURES"
        if self.write:
            DOCUMENT.write_text(_page(_read() | {feature: found}), encoding="utf-8")
            return
        written = _read().get(feature)
        assert written == found, (
            f"docs/compatibility.md says of {feature!r}: {written!r}, but this run found {found!r}; "
            "`make compatibility` writes the page anew"
        )


def features() -> list[str]:
    """Every feature there is a row for."""
    return [feature for section in FEATURES.values() for feature in section]


def _page(rows: dict[str, str]) -> str:
    parts = [_HEAD]
    for section, entries in FEATURES.items():
        lines = [
            f"| {_cell(feature)} | {rows[feature]} | {note} |\n"
            for feature, note in entries.items()
            if feature in rows
        ]
        if lines:
            parts += [f"\n## {section}\n\n| | found | |\n| --- | --- | --- |\n", *lines]
    parts += ["\n## Fields without a row\n\nEvery other field of a request has one.\n\n"]
    for why, fields in WITHOUT.items():
        parts.append(f"- {why}: {', '.join(f'`{field}`' for field in fields)}\n")
    return "".join(parts)


def _cell(feature: str) -> str:
    return (
        f"`{feature}`"
        if re.fullmatch(r"[a-z]+(_[a-z]+)+|/[a-z0-9/_]+|--[a-z0-9-]+( [a-z0-9_]+)?", feature)
        else feature
    )


def _read() -> dict[str, str]:
    if not DOCUMENT.exists():
        return {}
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .*\|$", DOCUMENT.read_text(encoding="utf-8"), re.M)
    return {feature.strip("`"): found for feature, found in rows if feature != "---"}
