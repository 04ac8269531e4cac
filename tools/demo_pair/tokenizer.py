# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer of 2,048 tokens for Python source and chat."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MASK = "<|mask|>"
# Not special: a server shows them to its reasoning and tool-call parsers as text.
_PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_SPECIAL = (END_OF_TEXT, TURN_START, TURN_END, MASK)

# A line break takes the next line's indentation with it, so that nesting costs one token.
_PIECES = r"\n[ ]*| ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+(?=[^\S\n])|\s"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Trains the merges on `texts`; the added tokens take the last ids of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_SPECIAL) - len(_PLAIN_ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in _PLAIN_ADDED])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIAL])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [END_OF_TEXT, TURN_START, TURN_END, MASK],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def chat_text(turns: Iterable[tuple[str, str]], *, open_answer: bool = False) -> str:
    """What the chat template renders for (role, content) pairs."""
    text = "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in turns)
    return text + f"{TURN_START}assistant\n" if open_answer else text
