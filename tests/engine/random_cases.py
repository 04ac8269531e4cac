# SPDX-License-Identifier: Apache-2.0
"""Random requests as clients send them: any mix of the parameters that a server with trees serves."""

from __future__ import annotations

import random
from typing import Any

from api_cases import GRAMMAR, SCHEMA, TOOLS, Case

from ddtree_vllm.smoke.prompts import PROMPTS

MAX_TOKENS = (1, 2, 4, 7, 9, 12)
FEATURE = "random"


def random_case(rng: random.Random) -> Case:
    """One request; ``rng`` may be hypothesis's, which then finds the simplest that fails."""
    body: dict[str, Any] = {"max_tokens": rng.choice(MAX_TOKENS), **_sampling(rng)}
    constrained = rng.random() < 0.3
    # With a reasoning parser a completion's constraint waits for a thinking that never ends.
    chat = constrained or rng.random() < 0.4
    tools = chat and not constrained and rng.random() < 0.3
    if constrained:
        body |= _constraint(rng)
        # vLLM answers 500, speculation or not, where the two leave no token.
        body.pop("allowed_token_ids", None)
        body["max_tokens"] = 16
    if rng.random() < 0.3:
        body |= _end(rng)
        if constrained:
            # Nor does vLLM serve stop tokens that a constraint needs as text.
            body.pop("stop_token_ids", None)
    text = _text(rng)
    if chat:
        thinks = rng.random() < (0.2 if constrained else 0.5)
        body |= {
            "messages": [{"role": "user", "content": text}],
            "chat_template_kwargs": {"enable_thinking": thinks},
        }
        if thinks and rng.random() < 0.4:
            body["thinking_token_budget"] = rng.choice([-1, 0, 1, 3, 6])
        if rng.random() < 0.1:
            body["include_reasoning"] = False
            if constrained:
                # The constraint then holds from the first token, and vLLM's budget forces one that ends
                # a thinking: the grammar rejects it, and vLLM answers 500, speculation or not.
                body.pop("thinking_token_budget", None)
        if rng.random() < 0.1:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
            body["messages"].append({"role": "assistant", "content": "def"})
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": rng.randrange(4)}
        if tools:
            body |= {"tools": TOOLS, "tool_choice": rng.choice(["auto", "required", "none"])}
            body["max_tokens"] = 20
            body["parallel_tool_calls"] = rng.random() < 0.7
    else:
        body |= {"prompt": _prompt(rng, text), "return_token_ids": True}
        if rng.random() < 0.3:
            body["logprobs"] = rng.randrange(4)
        if rng.random() < 0.15:
            body["echo"] = True
    if body.get("logprobs") and rng.random() < 0.2:
        body["logprob_token_ids"] = sorted(rng.sample(range(2040), rng.randrange(1, 4)))
    stream = rng.random() < 0.5
    if stream and rng.random() < 0.2:
        body["stream_interval"] = rng.choice([2, 5])
    if not stream and rng.random() < 0.1:  # vLLM does not stream them
        body["prompt_logprobs"] = rng.randrange(3)
    body |= _seldom(rng)
    if "min_tokens" in body:
        body["min_tokens"] = min(body["min_tokens"], body["max_tokens"])
    if "echo" in body and "logprobs" in body and body.get("n", 1) > 1:
        # Where the first parts of two choices meet in one message, vLLM drops the scores of the second
        # one's prompt and ends the stream with an error, speculation or not.
        stream = False
        body.pop("stream_interval", None)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Case(FEATURE, path, body, stream=stream)


def _prompt(rng: random.Random, text: str) -> Any:
    """Text, token ids, or two of either."""
    if rng.random() < 0.8:
        return text
    ids = [rng.randrange(4, 2000) for _ in range(rng.randrange(1, 40))]
    return rng.choice([ids, [text, text[: len(text) // 2 + 1]], [ids, ids[: len(ids) // 2 + 1]]])


def _text(rng: random.Random) -> str:
    text = rng.choice(PROMPTS)
    start = rng.randrange(len(text) - 20)
    return text[start : start + rng.randrange(4, 120)]


def _sampling(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        body: dict[str, Any] = {"temperature": 0}
    else:
        body = {"temperature": rng.choice([0.5, 0.8, 1.0, 1.5]), "seed": rng.randrange(1 << 31)}
        if rng.random() < 0.4:
            body["top_p"] = rng.choice([0.5, 0.9, 0.95])
        if rng.random() < 0.4:
            body["top_k"] = rng.choice([1, 5, 40])
        if rng.random() < 0.2:
            body["n"] = 2
    if rng.random() < 0.3:
        names = ["presence_penalty", "frequency_penalty", "repetition_penalty"]
        for name in rng.sample(names, rng.choice([1, 1, 2, 3])):
            body[name] = rng.choice([0.7, 1.2, 1.8])
    if rng.random() < 0.15:
        body["bad_words"] = rng.sample(["self", " in", "return", " =", "def", "item"], 3)
    if rng.random() < 0.1:
        body["allowed_token_ids"] = sorted(rng.sample(range(2040), 300))
    return body


def _constraint(rng: random.Random) -> dict[str, Any]:
    return rng.choice(
        [
            {"response_format": {"type": "json_object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "entry", "schema": SCHEMA},
                }
            },
            {"structured_outputs": {"regex": "[a-z_]{2,9}\\([a-z]{0,4}\\)"}},
            {"structured_outputs": {"choice": ["yes", "no", "not yet"]}},
            {"structured_outputs": {"grammar": GRAMMAR}},
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<call>",
                        "content": {"type": "regex", "pattern": "[a-z]{1,6}"},
                        "end": "</call>",
                    },
                }
            },
        ]
    )


def _end(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if rng.random() < 0.5:
        body["stop"] = rng.sample(["self", "(", "\n", "import", " ", ":", ",", "zzz", "é"], 2)
        body["include_stop_str_in_output"] = rng.random() < 0.4
    if rng.random() < 0.4:
        body["stop_token_ids"] = rng.sample(range(2040), 100)
    if rng.random() < 0.4:
        body["min_tokens"] = rng.choice([0, 1, 1, 4])
    if rng.random() < 0.2:
        body["ignore_eos"] = True
    if rng.random() < 0.3:
        sizes = {"max_pattern_size": rng.choice([1, 3]), "min_pattern_size": 1, "min_count": 2}
        body["repetition_detection"] = sizes
    return body


def _seldom(rng: random.Random) -> dict[str, Any]:
    """What changes the prompt or how the answer is written down."""
    body: dict[str, Any] = {}
    if rng.random() < 0.06:
        side = rng.choice(["left", "right"])
        body |= {"truncate_prompt_tokens": rng.randrange(1, 30), "truncation_side": side}
    if rng.random() < 0.06:
        body["cache_salt"] = rng.choice(["a", "b"])
    if rng.random() < 0.06:
        body |= {"skip_special_tokens": False, "spaces_between_special_tokens": rng.random() < 0.5}
    if rng.random() < 0.06:
        body["return_tokens_as_token_ids"] = True
    return body
