# SPDX-License-Identifier: Apache-2.0
"""500 requests as clients of a server send them, kept in recorded_requests.jsonl.

    python tests/engine/recorded_requests.py    # writes the file anew

Each line is one HTTP request. The kinds of client below take turns as the weights say. All fit a
context of 512 tokens of the demo pair, and what is sampled has a seed, without which two servers
have nothing to agree on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("recorded_requests.jsonl")
COUNT = 500
SEED = 2026
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

TOPICS = {
    "inventory": ["item", "shelf", "count", "label"],
    "calendar": ["event", "start", "room", "guest"],
    "parser": ["token", "line", "column", "rule"],
    "cache": ["key", "value", "age", "size"],
    "mailer": ["sender", "subject", "body", "queue"],
    "geometry": ["point", "width", "height", "angle"],
    "ledger": ["entry", "amount", "account", "day"],
    "crawler": ["page", "link", "depth", "host"],
}
VERBS = ("add", "remove", "find", "update", "count", "merge", "check", "list")
SYSTEMS = (
    "You are a careful programmer. Answer with code only.",
    "Answer briefly.",
    "You review Python. Name the bug first, then the fix.",
    "Antworte auf Deutsch, höflich und kurz.",
    "You extract data. Never add words of your own.",
)
QUESTIONS = (
    "Write a function that can {verb} an entry by its {a}.",
    "Why is {a} None after I {verb} the {b}?",
    "Rename {a} to {b} in this class.",
    "Add a test for {verb}_{a}.",
    "What does {verb}_{b} return if {a} is empty?",
    "Explain {topic}.{verb} in one sentence.",
    "Übersetze „{verb} the {a}“ ins Deutsche.",
    "{a}, {b} or both? 🤔",
)


class Writer:
    """Words, code and prose of one request, all from one random generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.topic = rng.choice(sorted(TOPICS))
        self.a, self.b = rng.sample(TOPICS[self.topic], 2)
        self.verb = rng.choice(VERBS)

    def question(self) -> str:
        return self.rng.choice(QUESTIONS).format(
            topic=self.topic, verb=self.verb, a=self.a, b=self.b
        )

    def code(self, methods: int = 1) -> str:
        """A class that ends inside its last method."""
        name = self.topic.capitalize()
        lines = [
            f"class {name}:",
            f"    def __init__(self, {self.a}, {self.b}=None):",
            f"        self.{self.a} = {self.a}",
            f"        self.{self.b} = {self.b} or []",
            "",
        ]
        for _ in range(methods):
            verb, field = self.rng.choice(VERBS), self.rng.choice(TOPICS[self.topic])
            lines += [
                f"    def {verb}_{field}(self, {field}):",
                f"        for entry in self.{self.b}:",
                f"            if entry.{field} == {field}:",
                "                return entry",
                "",
            ]
        lines += [f"    def {self.verb}(self, {self.a}):", ""]
        return "\n".join(lines)

    def log(self, lines: int) -> str:
        """What a service wrote: long, repetitive, with numbers in it."""
        return "\n".join(
            f"{self.rng.randrange(24):02}:{self.rng.randrange(60):02} {self.topic} {self.rng.choice(VERBS)} "
            f"{self.a}={self.rng.randrange(1000)}"
            for _ in range(lines)
        )

    def greedy_or_sampled(self) -> dict[str, Any]:
        return {"temperature": 0} if self.rng.random() < 0.5 else self.sampled()

    def sampled(self) -> dict[str, Any]:
        """As model cards recommend it, and as people change it."""
        return {
            "seed": self.rng.randrange(1 << 31),
            **self.rng.choice(
                [
                    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
                    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
                    {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "presence_penalty": 1.5},
                    {"temperature": 1.0},
                    {"temperature": 0.2},
                ]
            ),
        }

    def stream(self) -> dict[str, Any]:
        return self.rng.choice(
            [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]
        )

    def thinking(self, often: float) -> dict[str, Any]:
        return {"chat_template_kwargs": {"enable_thinking": self.rng.random() < often}}


def assistant(w: Writer) -> tuple[str, dict[str, Any]]:
    """A chat window: system prompt, some turns, mostly streamed."""
    messages = [{"role": "system", "content": w.rng.choice(SYSTEMS)}]
    for _ in range(w.rng.randrange(3)):
        messages.append({"role": "user", "content": w.question()})
        messages.append({"role": "assistant", "content": f"Use `{w.verb}_{w.b}`."})
    messages.append({"role": "user", "content": w.question()})
    body = {"messages": messages, "max_tokens": w.rng.choice([8, 12, 20, 32])}
    body |= w.greedy_or_sampled() | w.thinking(0.5) | w.rng.choice([w.stream(), {"stream": True}])
    if w.rng.random() < 0.2:
        body["max_completion_tokens"] = body.pop("max_tokens")
    if w.rng.random() < 0.2:
        body["stop"] = w.rng.choice([["\n\n"], ["Use", "```"]])
    if w.rng.random() < 0.15:
        body["thinking_token_budget"] = w.rng.choice([0, 3, 8])
    return CHAT, body


def editor(w: Writer) -> tuple[str, dict[str, Any]]:
    """Completion at the cursor: short, cold, with stops, some cancelled by a stop soon."""
    body = {
        "prompt": w.code(w.rng.randrange(1, 4)),
        "max_tokens": w.rng.choice([4, 10, 16, 24]),
        "stop": w.rng.choice([["\n\n", "\nclass ", "\ndef "], ["\n"], "return", []]),
        **w.stream(),
    }
    body |= w.rng.choice([{"temperature": 0}, {"temperature": 0.2, "seed": 1, "top_p": 0.95}])
    if w.rng.random() < 0.2:
        body["include_stop_str_in_output"] = True
    if w.rng.random() < 0.2:
        body |= {"stop_token_ids": w.rng.sample(range(260, 2040), 40), "min_tokens": 3}
    return COMPLETIONS, body


def _tools(w: Writer) -> list[dict[str, Any]]:
    def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    return [
        tool("search", {"query": {"type": "string", "maxLength": 8}}),
        tool(f"{w.verb}_{w.a}", {w.a: {"type": "integer"}, "how": {"enum": ["all", "one"]}}),
    ]


def agent(w: Writer) -> tuple[str, dict[str, Any]]:
    """Tools, with results of earlier calls in the history."""
    tools = _tools(w)
    messages: list[dict[str, Any]] = [{"role": "user", "content": w.question()}]
    if w.rng.random() < 0.5:
        arguments = json.dumps({"query": w.a})
        call = {
            "id": "call_0",
            "type": "function",
            "function": {"name": "search", "arguments": arguments},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": w.log(2)})
    named = {"type": "function", "function": {"name": "search"}}
    choice = w.rng.choice(["auto", "auto", "required", named, "none"])
    body = {"messages": messages, "tools": tools, "tool_choice": choice}
    body |= {"max_tokens": 12 if choice in ("auto", "none") else 44}
    body |= w.greedy_or_sampled() | w.thinking(0.2) | w.stream()
    if w.rng.random() < 0.3:
        body["parallel_tool_calls"] = False
    return CHAT, body


def extraction(w: Writer) -> tuple[str, dict[str, Any]]:
    """Rows out of a log, as a JSON schema says."""
    schema = {
        "type": "object",
        "properties": {
            w.a: {"type": "integer"},
            w.b: {"type": "string", "maxLength": 8},
            "kind": {"enum": sorted(w.rng.sample(VERBS, 3))},
        },
        "required": [w.a, "kind"],
        "additionalProperties": False,
    }
    text = f"Extract the first line.\n{w.log(w.rng.randrange(1, 5))}"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 28}
    formats: list[dict[str, Any]] = [
        {"type": "json_schema", "json_schema": {"name": w.topic, "schema": schema, "strict": True}},
        {"type": "json_object"},
    ]
    if w.rng.random() < 0.8:
        body["response_format"] = w.rng.choice([formats[0], formats[0], formats[1]])
    else:
        body["structured_outputs"] = {"json": schema}
    return CHAT, body | w.greedy_or_sampled() | w.thinking(0.1) | w.stream()


def classifier(w: Writer) -> tuple[str, dict[str, Any]]:
    """One of a few answers, with its log-probabilities."""
    constraint = w.rng.choice(
        [
            {"choice": ["bug", "feature", "question"]},
            {"choice": ["yes", "no", "not yet", "né"]},
            {"regex": "[1-5]( of 5)?"},
            {"grammar": 'root ::= word (" " word)?\nword ::= "good" | "bad" | "odd"'},
        ]
    )
    body = {
        "messages": [
            {"role": "system", "content": "Classify."},
            {"role": "user", "content": w.question()},
        ],
        "structured_outputs": constraint,
        "max_tokens": 10,
        "logprobs": True,
        "top_logprobs": w.rng.randrange(6),
    }
    return CHAT, body | w.greedy_or_sampled() | w.thinking(0.1) | w.stream()


def evaluation(w: Writer) -> tuple[str, dict[str, Any]]:
    """A harness: scores of given text, or short answers to token ids."""
    prompt = f"Q: {w.question()}\nA: {w.verb} the {w.b}"
    form = w.rng.randrange(4)
    if form == 0:
        return COMPLETIONS, {
            "prompt": prompt,
            "max_tokens": w.rng.choice([0, 1]),
            "echo": True,
            "logprobs": w.rng.choice([1, 5]),
            "temperature": 0,
        }
    if form == 1:
        ids = [w.rng.randrange(4, 2040) for _ in range(w.rng.randrange(1, 60))]
        return COMPLETIONS, {"prompt": ids, "max_tokens": 9, "return_token_ids": True} | (
            w.greedy_or_sampled()
        )
    if form == 2:
        return COMPLETIONS, {
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 0,
            "prompt_logprobs": w.rng.randrange(3),
            "logprobs": 1,
        }
    return COMPLETIONS, {
        "prompt": [prompt, w.code(), w.question()],
        "max_tokens": w.rng.choice([3, 9]),
        "temperature": 0,
        "logprobs": 0,
        **w.stream(),
    }


def best_of_several(w: Writer) -> tuple[str, dict[str, Any]]:
    """Several samples of one prompt, to be ranked by their log-probabilities."""
    n = w.rng.choice([2, 3, 4])
    if w.rng.random() < 0.5:
        return COMPLETIONS, {"prompt": w.code(), "n": n, "max_tokens": 10, "logprobs": 1} | (
            w.sampled() | w.stream()
        )
    body = {"messages": [{"role": "user", "content": w.question()}], "n": n, "max_tokens": 12}
    if w.rng.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": 2}
    return CHAT, body | w.sampled() | w.thinking(0.3) | w.stream()


def long_context(w: Writer) -> tuple[str, dict[str, Any]]:
    """A document that several requests share, and a question behind it."""
    # Few of them: the prefix cache has met most of them before.
    document = Writer(random.Random(w.rng.randrange(6)))
    text = document.code(w.rng.choice([3, 5]))
    if w.rng.random() < 0.5:
        return COMPLETIONS, {"prompt": text, "max_tokens": w.rng.choice([8, 40])} | (
            w.greedy_or_sampled() | w.stream()
        )
    messages = [{"role": "user", "content": f"{text}\n\n{w.question()}"}]
    body = {"messages": messages, "max_tokens": 16}
    return CHAT, body | w.greedy_or_sampled() | w.thinking(0.3) | w.stream()


def rewriter(w: Writer) -> tuple[str, dict[str, Any]]:
    """Against repetition: penalties and words that must not come."""
    body: dict[str, Any] = {"prompt": w.log(w.rng.randrange(2, 6)), "max_tokens": 24}
    body |= w.greedy_or_sampled() | w.stream()
    for name, values in {
        "presence_penalty": [0.6, 1.5, -0.5],
        "frequency_penalty": [0.3, 1.0],
        "repetition_penalty": [1.05, 1.3],
    }.items():
        if w.rng.random() < 0.5:
            body[name] = w.rng.choice(values)
    if w.rng.random() < 0.4:
        body["bad_words"] = [w.topic, " self", w.a]
    if w.rng.random() < 0.3:
        body["repetition_detection"] = {"max_pattern_size": 6, "min_count": 3}
    if w.rng.random() < 0.3:
        body["ignore_eos"] = True
    return COMPLETIONS, body


def restricted(w: Writer) -> tuple[str, dict[str, Any]]:
    """A caller that reckons in tokens."""
    first = w.rng.randrange(200, 900)
    body = {
        "prompt": w.code(),
        "max_tokens": 12,
        "allowed_token_ids": list(range(first, first + w.rng.choice([2, 90, 700]))),
        "return_token_ids": True,
    }
    if w.rng.random() < 0.4:
        body |= {"stop_token_ids": [first, first + 1], "min_tokens": w.rng.randrange(6)}
    if w.rng.random() < 0.3:
        body |= {"logprobs": 1, "return_tokens_as_token_ids": True}
    return COMPLETIONS, body | w.greedy_or_sampled() | w.stream()


# How many of a hundred requests each kind of client sends.
CLIENTS: dict[Callable[[Writer], tuple[str, dict[str, Any]]], int] = {
    assistant: 22,
    editor: 18,
    agent: 12,
    extraction: 9,
    classifier: 7,
    evaluation: 8,
    best_of_several: 7,
    long_context: 7,
    rewriter: 6,
    restricted: 4,
}


def written() -> Iterator[dict[str, Any]]:
    """What the file holds, one request after another."""
    rng = random.Random(SEED)
    turns = [client for client, weight in CLIENTS.items() for _ in range(weight * COUNT // 100)]
    rng.shuffle(turns)
    for client in turns:
        path, body = client(Writer(rng))
        yield {"client": client.__name__, "path": path, "body": {"model": "demo", **body}}


def recorded() -> list[dict[str, Any]]:
    """The requests of the file."""
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    lines = (json.dumps(request, ensure_ascii=False) + "\n" for request in written())
    FILE.write_text("".join(lines), encoding="utf-8")
