# SPDX-License-Identifier: Apache-2.0
"""Requests of the OpenAI-compatible API, by the feature that each one is about.

Every case is sent to a server without speculation and to one with trees. Where it says nothing
else, the two must answer the same: a completion, or the same refusal.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ddtree_vllm.smoke.prompts import PROMPTS

MODEL = "demo"
TOKENS = 8
# Long enough that a constrained text ends by itself.
CONSTRAINED_TOKENS = 20


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        feature: row of docs/compatibility.md that it stands for.
        path: of the endpoint.
        body: without the model's name.
        stream: whether it is sent streamed too.
        holds: pattern at the start of what is said, where a constraint says so: one that nobody applies
            would give the same answer twice.
        calls: how many of the tool ``add`` the parser must find.
        refused: where vLLM refuses the feature under speculation, a word of the sentence; the
            server without speculation then serves it.
        unserved: where vLLM refuses it without speculation too, a word of the sentence.
    """

    feature: str
    path: str
    body: dict[str, Any]
    stream: bool = False
    refused: str | None = None
    holds: str | None = None
    calls: int = 0
    unserved: str | None = None
    number: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        return f"{self.feature} {self.number}"


def cases(tool_parser: str = "qwen3_coder") -> list[Case]:
    """All cases. The first of a feature, number 1, is what the fast suite sends."""
    found = [
        *_sampling(),
        *_ends(),
        *_scores(),
        *_prompts(),
        *_constrained(),
        *_chat(),
        *_tools(tool_parser),
        *_other_endpoints(),
    ]
    counts: Counter[str] = Counter()
    for case in found:
        counts[case.feature] += 1
        object.__setattr__(case, "number", counts[case.feature])
    return found


def completion(feature: str, number: int = 0, *, stream: bool = False, **body: Any) -> Case:
    """A completion of one of the smoke test's prompts; greedy unless the body says otherwise."""
    refused, unserved = body.pop("refused", None), body.pop("unserved", None)
    defaults = {"prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": 0}
    return Case(
        feature,
        "/v1/completions",
        {**defaults, "return_token_ids": True, **body},
        stream,
        refused,
        unserved=unserved,
    )


def chat(feature: str, text: str, *, stream: bool = False, **body: Any) -> Case:
    """A chat of one user turn; greedy, without thinking unless the body says otherwise."""
    refused, holds = body.pop("refused", None), body.pop("holds", None)
    calls = body.pop("calls", 0)
    defaults = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    return Case(
        feature, "/v1/chat/completions", {**defaults, **body}, stream, refused, holds, calls
    )


def _sampling() -> list[Case]:
    def sampled(feature: str, number: int, **body: Any) -> Case:
        return completion(feature, number, **{"temperature": 1.0, "seed": 70 + number, **body})

    return [
        *(completion("greedy", i, stream=i < 2) for i in range(4)),
        sampled("temperature and seed", 0, stream=True),
        sampled("temperature and seed", 1, temperature=0.4),
        sampled("top_p", 2, top_p=0.7),
        sampled("top_k", 3, top_k=5),
        sampled("top_k", 4, top_k=12, top_p=0.9, temperature=1.4),
        sampled("n > 1", 5, n=2, stream=True),
        sampled("n > 1", 6, n=3, temperature=0.6),
        completion("presence_penalty", 0, presence_penalty=1.2),
        sampled("presence_penalty", 1, presence_penalty=-0.8),
        completion("frequency_penalty", 1, frequency_penalty=0.9),
        completion("repetition_penalty", 2, repetition_penalty=1.3),
        sampled("repetition_penalty", 3, repetition_penalty=1.2, frequency_penalty=0.5),
        completion("bad_words", 0, bad_words=["self", " return", "item", "def push"]),
        sampled("bad_words", 6, bad_words=["self.host", "host", "import"]),
        completion("allowed_token_ids", 0, allowed_token_ids=list(range(0, 2040, 2))),
        sampled("allowed_token_ids", 5, allowed_token_ids=list(range(5, 600))),
        completion("logit_bias", 0, logit_bias={"300": 5.0}, refused="logit_bias"),
        completion("min_p", 0, temperature=1.0, seed=3, min_p=0.1, refused="min_p"),
        completion("beam search", 0, use_beam_search=True, n=2, max_tokens=4, length_penalty=0.6),
        completion("beam search", 1, use_beam_search=True, n=3, max_tokens=5, stop=["("]),
    ]


def _ends() -> list[Case]:
    return [
        completion("stop", 0, stop="self"),
        completion("stop", 1, stop=["assert", "queue."], stream=True),
        completion("stop", 6, stop=["\n"], temperature=1.0, seed=9),
        completion("include_stop_str_in_output", 0, stop="self", include_stop_str_in_output=True),
        completion(
            "include_stop_str_in_output",
            1,
            stop=["assert", "queue."],
            include_stop_str_in_output=True,
            stream=True,
        ),
        completion("stop_token_ids", 2, stop_token_ids=list(range(300, 1190, 7))),
        completion("stop_token_ids", 5, stop_token_ids=list(range(300, 900, 6)), stream=True),
        completion("min_tokens", 0, stop_token_ids=list(range(256, 780, 5)), min_tokens=5),
        completion("min_tokens", 3, min_tokens=12, max_tokens=24),
        completion("ignore_eos", 3, ignore_eos=True, max_tokens=24),
        *(completion("max_tokens inside a path", 0, max_tokens=n) for n in (6, 1, 2, 3, 5, 8, 11)),
        completion("max_tokens inside a path", 1, max_tokens=7, stream=True),
        completion("stream_interval", 1, stream=True, stream_interval=4, max_tokens=14),
        completion("stream_interval", 2, stream=True, stream_interval=3, stop="self", logprobs=1),
        completion(
            "repetition_detection",
            3,
            max_tokens=24,
            repetition_detection={"max_pattern_size": 4, "min_count": 2},
        ),
    ]


def _scores() -> list[Case]:
    return [
        completion("logprobs", 0, logprobs=0),
        completion("logprobs", 1, logprobs=1, stream=True),
        completion("logprobs", 2, logprobs=5, temperature=1.0, seed=4),
        completion("logprobs", 4, logprobs=3, presence_penalty=0.7),
        completion("logprobs", 5, logprobs=2, n=2, temperature=0.9, seed=8, stream=True),
        chat("top_logprobs", "def area(self):", logprobs=True, top_logprobs=4, stream=True),
        chat("top_logprobs", "import os", logprobs=True, top_logprobs=0),
        completion("prompt_logprobs", 3, prompt_logprobs=2),
        completion("prompt_logprobs", 4, prompt_logprobs=0, logprobs=2),
        chat("prompt_logprobs", "import sys", prompt_logprobs=1),
        completion("return_tokens_as_token_ids", 6, logprobs=1, return_tokens_as_token_ids=True),
        chat("logprob_token_ids", "import io", logprob_token_ids=[44, 300], logprobs=True),
        completion("logprob_token_ids", 1, logprob_token_ids=[44, 300], logprobs=2, stream=True),
    ]


def _prompts() -> list[Case]:
    return [
        completion("echo", 2, echo=True),
        completion("echo", 3, echo=True, logprobs=1),
        completion("echo", 4, echo=True, stream=True),
        completion("echo", 4, echo=True, max_tokens=0, logprobs=1),
        completion("several prompts", prompt=list(PROMPTS[:3]), stream=True),
        completion("several prompts", prompt=list(PROMPTS[2:4]), n=2, temperature=0.8, seed=5),
        completion("token ids as prompt", prompt=[282, 300, 40, 500, 12, 600]),
        completion("token ids as prompt", prompt=[[7], [282, 300, 40], [900, 2, 4, 6]]),
        *(
            completion("truncate_prompt_tokens", 1, truncate_prompt_tokens=16, truncation_side=side)
            for side in ("left", "right")
        ),
        completion("cache_salt", 1, cache_salt="one client's own"),
        completion(
            "skip_special_tokens",
            3,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            allowed_token_ids=list(range(2030, 2048)),
            ignore_eos=True,
        ),
        completion("skip_special_tokens", 3, skip_special_tokens=False, max_tokens=24),
        completion("suffix", 0, suffix="    return item", unserved="suffix"),
        # Split between tokens: a character of several bytes comes in parts.
        completion("token ids as prompt", prompt=[230, 151], allowed_token_ids=BYTES, stream=True),
        completion("echo", prompt="naïve ∑ 🦙 “x”", echo=True, logprobs=1, stream=True),
    ]


# Of bytes that are no characters by themselves.
BYTES = list(range(130, 256))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer"},
        "kind": {"enum": ["file", "folder"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= call (", " call)*
call ::= name "(" [0-9]{1,3} ")"
name ::= "push" | "pop" | "append"
"""


def _constrained() -> list[Case]:
    """As chats: with a reasoning parser a constraint waits for the end of thinking, and a completion
    has none."""

    def constrained(
        feature: str, number: int, holds: str, *, stream: bool = False, **body: Any
    ) -> Case:
        body = {"max_tokens": CONSTRAINED_TOKENS, **body}
        return chat(feature, PROMPTS[number], stream=stream, holds=holds, **body)

    entry = r'\{\s*"name"'
    schema = {"type": "json_schema", "json_schema": {"name": "entry", "schema": SCHEMA}}
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<entry>",
            "content": {"type": "json_schema", "json_schema": SCHEMA},
            "end": "</entry>",
        },
    }
    method = "(def|class) [a-z_]{3,12}\\(self\\)"
    answers = ["yes, it is", "no", "not now"]
    calls = r"(push|pop|append)\([0-9]"
    seeded = {"temperature": 1.0, "seed": 21}
    return [
        constrained("json_object", 0, r"\{", response_format={"type": "json_object"}, stream=True),
        constrained("json_object", 1, r"\{", response_format={"type": "json_object"}, **seeded),
        constrained("json_schema", 2, entry, response_format=schema, stream=True),
        constrained("json_schema", 4, entry, structured_outputs={"json": SCHEMA}, **seeded),
        constrained("regex", 0, method, structured_outputs={"regex": method}),
        constrained(
            "regex",
            1,
            "[0-9]{6}",
            structured_outputs={"regex": "[0-9]{6,9}x"},
            logprobs=True,
            top_logprobs=2,
        ),
        constrained("choice", 2, f"({'|'.join(answers)})$", structured_outputs={"choice": answers}),
        constrained(
            "choice",
            3,
            "alpha(bet)?$",
            structured_outputs={"choice": ["alpha", "alphabet"]},
            stream=True,
            **seeded,
        ),
        constrained("grammar", 4, calls, structured_outputs={"grammar": GRAMMAR}),
        constrained(
            "grammar", 5, calls, structured_outputs={"grammar": GRAMMAR}, stream=True, **seeded
        ),
        constrained("structural_tag", 6, f"<entry>{entry}", response_format=tag, stream=True),
        constrained(
            "structured output with penalties",
            5,
            entry,
            structured_outputs={"json": SCHEMA},
            frequency_penalty=0.8,
            repetition_penalty=1.1,
        ),
        constrained(
            "structured output with n > 1",
            6,
            "[a-z]{5,14}",
            structured_outputs={"regex": "[a-z]{5,14}\\.py"},
            n=2,
            **seeded,
        ),
    ]


def _chat() -> list[Case]:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    # Any of these may come next, and the third ends the thinking: with a seed it comes soon.
    soon = {"allowed_token_ids": [*range(15, 25), 2041], "temperature": 2.0}
    end_of_thinking = {**thinking, **soon}
    digits = {"structured_outputs": {"regex": "[0-9]{5}"}}
    return [
        chat("chat", "def push(self, item):", stream=True),
        chat("chat", "Write a test for a queue.", temperature=1.0, seed=6, stream=True),
        chat("chat", "import re", n=2, temperature=0.7, seed=2, stream=True),
        chat("chat", "class Point:", max_completion_tokens=9, max_tokens=None),
        chat("chat", "import json", stop=["\n"]),
        chat("chat", "import json", return_token_ids=True, stream=True),
        chat(
            "chat",
            "",
            messages=[
                {"role": "system", "content": "You write Python."},
                {"role": "user", "content": [{"type": "text", "text": "A class"}]},
                {"role": "assistant", "content": "class A:"},
                {"role": "user", "content": "Go on."},
            ],
        ),
        chat(
            "continue_final_message",
            "",
            messages=[
                {"role": "user", "content": "A class"},
                {"role": "assistant", "content": "class Stack:\n    def"},
            ],
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        *(
            chat("reasoning_effort", "import re", reasoning_effort=effort, chat_template_kwargs={})
            for effort in ("none", "high")
        ),
        chat("echo", "import re", echo=True),
        chat("reasoning", "def push(self, item):", stream=True, **thinking),
        *(
            chat("reasoning", "Count.", seed=seed, stream=True, **end_of_thinking)
            for seed in range(3)
        ),
        chat("reasoning", "Count.", seed=0, include_reasoning=False, **end_of_thinking),
        *(
            chat(
                "structured output after reasoning",
                "Count.",
                seed=seed,
                stream=seed == 0,
                **end_of_thinking,
                **digits,
            )
            for seed in range(4)
        ),
        chat(
            "thinking_token_budget", "import re", thinking_token_budget=4, stream=True, **thinking
        ),
        chat(
            "thinking_token_budget",
            "import re",
            thinking_token_budget=3,
            response_format={"type": "json_object"},
            **thinking,
        ),
        chat(
            "usage",
            "import os",
            stream=True,
            n=2,
            seed=1,
            temperature=0.6,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
    ]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "maxLength": 6}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
]
# What a model that calls tools says, by the parser that reads it. The demo target never would, so
# requests force it.
CALLS = {
    # Qwen3.5 and Qwen3.6. A space before each < but the first and the last.
    "qwen3_coder": (
        "<tool_call> <function=add> <parameter=a>[0-9]{1,2} </parameter>"
        " <parameter=b>1 </parameter> </function>\n</tool_call>"
    ),
    "hermes": (
        '<tool_call>\n\\{"name":"add","arguments":\\{"a":[0-9]{1,2},"b":1\\}\\}\n</tool_call>'
    ),
}
# Of the demo target: <tool_call>, </tool_call> and two ends of text. Without "<", which is 27, only the
# first two can begin and end a call: the parsers of streams look for them. " <" is a token of its own,
# the only way on for what begins with a space once the space alone, 220, is gone.
TOOL_TOKENS, ENDS = (2042, 2043), (2044, 2046)
NO_LESS = [token for token in (*range(1000), *TOOL_TOKENS, *ENDS) if token not in (27, 220)]


def _calls(parser: str, count: int) -> dict[str, Any]:
    """Makes the target say ``count`` calls."""
    return {
        "structured_outputs": {"regex": "\\n".join([CALLS[parser]] * count)},
        "allowed_token_ids": NO_LESS,
        "max_tokens": 72 * count,
    }


def _tools(parser: str) -> list[Case]:
    def with_tools(feature: str, text: str, *, stream: bool = True, **body: Any) -> Case:
        return chat(feature, text, **{"tools": TOOLS, "max_tokens": 48, "stream": stream, **body})

    named = {"type": "function", "function": {"name": "read"}}
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": json.dumps({"a": 1, "b": 2})},
    }
    return [
        with_tools("tool calls: auto", "Add 1 and 2.", calls=1, **_calls(parser, 1)),
        with_tools("tool calls: auto", "Add 1 and 2."),
        with_tools(
            "tool calls: auto",
            "Add.",
            tools=[{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS],
        ),
        with_tools("tool calls: required", "Read a file.", tool_choice="required"),
        with_tools(
            "tool calls: required", "Add.", tool_choice="required", temperature=1.0, seed=12
        ),
        with_tools("tool calls: named", "Read a file.", tool_choice=named),
        with_tools("tool calls: none", "Read a file.", tool_choice="none", max_tokens=TOKENS),
        with_tools(
            "tool calls: parallel",
            "Read.",
            tool_choice="required",
            parallel_tool_calls=False,
        ),
        with_tools(
            "tool calls: parallel", "Add 1 and 2, then 3 and 4.", calls=2, **_calls(parser, 2)
        ),
        with_tools(
            "tool results",
            "",
            messages=[
                {"role": "user", "content": "Add 1 and 2."},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": "3"},
            ],
            max_tokens=TOKENS,
        ),
    ]


def _other_endpoints() -> list[Case]:
    return [
        Case("/tokenize", "/tokenize", {"prompt": PROMPTS[0]}),
        Case("/tokenize", "/tokenize", {"messages": [{"role": "user", "content": "import os"}]}),
        Case("/tokenize", "/detokenize", {"tokens": [282, 300, 40, 500]}),
        *(
            Case(
                "/inference/v1/generate",
                "/inference/v1/generate",
                {"token_ids": [282, 300, 40, 500], "sampling_params": {"max_tokens": 8, **params}},
            )
            for params in (
                {"temperature": 0, "logprobs": 2, "flat_logprobs": True, "detokenize": False},
                {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.8, "n": 2},
                {
                    "temperature": 0,
                    "prompt_logprob_token_ids": [[1, 2], [3, 4]],
                    "prompt_logprob_start": 1,
                    "skip_reading_prefix_cache": True,
                },
            )
        ),
        Case(
            "/generative_scoring",
            "/generative_scoring",
            {"query": "def f(", "items": ["a", "self"], "label_token_ids": [300, 301]},
        ),
        Case(
            "/v1/chat/completions/batch",
            "/v1/chat/completions/batch",
            {
                "messages": [[{"role": "user", "content": text}] for text in ("import", "def f(")],
                "max_tokens": TOKENS,
                "temperature": 0,
            },
        ),
        Case(
            "/v1/responses",
            "/v1/responses",
            {"input": "def push(self, item):", "max_output_tokens": TOKENS, "temperature": 0},
        ),
        Case(
            "/v1/messages",
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "def push(self, item):"}],
                "max_tokens": TOKENS,
                "temperature": 0,
            },
        ),
    ]
