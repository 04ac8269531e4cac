# SPDX-License-Identifier: Apache-2.0
"""Corpus, tokenizer and chat turns of the demo pair."""

import lzma
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from demo_pair import corpus, data, tokenizer

SOURCE = '''"""A module."""
import os


def join(parts, sep="/"):
    """Joins the parts with a separator between them."""
    if not parts:
        return ""
    return sep.join(parts)


class Reader:
    def read(self, size=-1):
        data = self.buffer[:size]
        self.buffer = self.buffer[size:]
        return data
'''


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("Lib")
    for i in range(60):
        (folder / f"module{i}.py").write_text(SOURCE.replace("join", f"join_{i}"))
    (folder / "broken.py").write_text("def (:\n" * 20)
    (folder / "encodings").mkdir()
    (folder / "encodings" / "cp1.py").write_text(SOURCE)
    return folder


@pytest.fixture(scope="module")
def prepared(library, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared")
    packed = out / "corpus.xz"
    corpus.write(corpus.collect(library), packed, python_version="3.11")
    patch = pytest.MonkeyPatch()
    patch.setattr(tokenizer, "VOCAB_SIZE", 400)
    data.prepare(packed, out, seed=1)
    patch.undo()
    return out


def test_corpus_leaves_out_what_is_not_source_and_splits_by_path(library, tmp_path):
    files = corpus.collect(library)
    assert [f.path for f in files] == sorted(f"module{i}.py" for i in range(60))
    assert {f.split for f in files} == {"train", "heldout"}
    assert all(f.split == corpus.split_of(f.path) for f in files)
    header = corpus.write(files, tmp_path / "c.xz", python_version="3.11")
    assert corpus.read(tmp_path / "c.xz") == (header, files)


def test_a_corpus_that_was_changed_is_refused(library, tmp_path):
    corpus.write(corpus.collect(library), tmp_path / "c.xz", python_version="3.11")
    text = lzma.decompress((tmp_path / "c.xz").read_bytes()).replace(b"A module", b"Another")
    (tmp_path / "c.xz").write_bytes(lzma.compress(text))
    with pytest.raises(ValueError, match="sha256"):
        corpus.read(tmp_path / "c.xz")


def test_chat_turns_answer_with_the_librarys_own_text(library):
    conversations = corpus.chat_turns(corpus.collect(library), seed=2, share=1.0)
    turns = [t for c in conversations for t in c]
    assert len(turns) == 120
    for turn in turns:
        answer = turn.assistant.removeprefix("```python\n").removesuffix("\n```")
        assert "".join(answer.split())[:20] in "".join(SOURCE.split()) or "join_" in answer


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n        return x\n\n\n",
        "tabs\tand\r\nbreaks",
        "naïve 数 🐍 \x00",
        "a  b   c\n \n  d",
    ],
)
def test_tokenizer_gives_any_text_back(prepared, text):
    bpe = tokenizer.load(prepared)
    assert bpe.decode(bpe.encode(text).ids) == text


def test_tokenizer_loads_in_transformers_and_renders_the_training_chat_format(prepared):
    theirs = AutoTokenizer.from_pretrained(prepared)
    assert len(theirs) == tokenizer.load(prepared).get_vocab_size()
    assert theirs.eos_token == "<|im_end|>"
    messages = [{"role": "user", "content": "Write `f`."}, {"role": "assistant", "content": "ok"}]
    pairs = [(m["role"], m["content"]) for m in messages]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == tokenizer.chat_text(pairs, open_answer=True)
    ids = theirs(rendered)["input_ids"]
    assert ids.count(theirs.convert_tokens_to_ids("<|im_end|>")) == 2
    for name in ("<|mask|>", "<think>", "</tool_call>"):
        assert len(theirs(name)["input_ids"]) == 1
    assert theirs.decode(theirs("<think>a")["input_ids"], skip_special_tokens=True) == "<think>a"


def test_prepared_splits_end_documents_and_open_answers(prepared):
    _, train, heldout, bpe = data.load(prepared)
    end = bpe.token_to_id("<|endoftext|>")
    assert train.stream[-1] == end
    assert heldout.stream[-1] == end
    assert train.stream.max() < bpe.get_vocab_size()
    for prompt in train.chats[:5]:
        assert bpe.decode(prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
