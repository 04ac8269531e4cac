# SPDX-License-Identifier: Apache-2.0
"""Tokens on disk: what `prepare` makes from the corpus, and what training reads."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo_pair import corpus, target, tokenizer

_TOKENIZER_SAMPLE_CHARS = 6_000_000
_MAX_PROMPT = 256


@dataclass(frozen=True)
class TokenSet:
    """The tokens of one split.

    `stream` is int64 [N]: files and conversations in random order, <|endoftext|> after each.
    `chats` holds the prompts of conversations, up to and including the line that opens the answer.
    """

    stream: torch.Tensor
    chats: list[list[int]]

    def windows(self, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """int64 [count, length] at random offsets of the stream, on its device."""
        device = self.stream.device
        last = self.stream.numel() - length
        starts = torch.randint(last, (count, 1), device=device, generator=generator)
        return self.stream[starts + torch.arange(length, device=device)]

    def to(self, device) -> "TokenSet":
        return TokenSet(self.stream.to(device), self.chats)


def prepare(corpus_path: Path, out: Path, *, seed: int) -> dict:
    """Trains the tokenizer, tokenises both splits and writes them to `out`; returns a summary."""
    header, files = corpus.read(corpus_path)
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    train_files = [f for f in files if f.split == "train"]
    sample, chars = [], 0
    for file in rng.sample(train_files, len(train_files)):
        if chars >= _TOKENIZER_SAMPLE_CHARS:
            break
        sample.append(file.text)
        chars += len(file.text)
    bpe = tokenizer.train(sample)
    tokenizer.save(bpe, out, max_length=target.MAX_LENGTH)

    tensors, summary = {}, {"corpus": header, "vocab_size": bpe.get_vocab_size()}
    for split in ("train", "heldout"):
        split_files = [f for f in files if f.split == split]
        documents = [f.text for f in split_files]
        prompts = []
        for turns in corpus.chat_turns(split_files, seed=seed):
            system = [("system", corpus.SYSTEM_PROMPT)] if rng.random() < 0.2 else []
            messages = [m for t in turns for m in (("user", t.user), ("assistant", t.assistant))]
            documents.append(tokenizer.chat_text(system + messages))
            prompts.append(tokenizer.chat_text(system + messages[:-1], open_answer=True))
        rng.shuffle(documents)
        end = bpe.token_to_id(tokenizer.END_OF_TEXT)
        stream = [t for e in bpe.encode_batch(documents) for t in (*e.ids, end)]
        chats = [e.ids for e in bpe.encode_batch(prompts) if len(e.ids) <= _MAX_PROMPT]
        tensors[f"{split}.stream"] = torch.tensor(stream, dtype=torch.int16)
        tensors[f"{split}.chats"] = torch.tensor([t for c in chats for t in c], dtype=torch.int16)
        tensors[f"{split}.chat_lengths"] = torch.tensor([len(c) for c in chats], dtype=torch.int16)
        summary[split] = {
            "documents": len(documents),
            "tokens": len(stream),
            "chat_prompts": len(chats),
            "bytes_per_token": round(sum(len(d.encode()) for d in documents) / len(stream), 3),
        }
    save_file(tensors, out / "tokens.safetensors", metadata={"summary": json.dumps(summary)})
    return summary


def load(folder: Path) -> tuple[dict, TokenSet, TokenSet, Tokenizer]:
    """What `prepare` wrote: its summary, the train and held-out sets, the tokenizer."""
    with safe_open(folder / "tokens.safetensors", "pt") as f:
        summary = json.loads(f.metadata()["summary"])
        tensors = {k: f.get_tensor(k).long() for k in f.keys()}  # noqa: SIM118 (not a dict)
    sets = []
    for split in ("train", "heldout"):
        lengths = tensors[f"{split}.chat_lengths"].tolist()
        chats = [c.tolist() for c in tensors[f"{split}.chats"].split(lengths)]
        sets.append(TokenSet(tensors[f"{split}.stream"], chats))
    return summary, *sets, tokenizer.load(folder)
