# SPDX-License-Identifier: Apache-2.0
"""The text the pair is trained on: Python's standard library, and chat turns made from it."""

import ast
import hashlib
import json
import lzma
import random
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

# Character maps and unicode tables are numbers in a Python file; the rest does not decode or is
# deliberately not Python.
_LEFT_OUT = (
    "site-packages/",
    "encodings/",
    "pydoc_data/",
    "config-",
    "lib2to3/tests/data/",
    "test/cjkencodings/",
    "test/test_unicode",
    "test/bad",
)
_MAX_FILE_BYTES = 200_000
_MAX_LINE_CHARS = 400
_HELD_OUT_ONE_IN = 25

SYSTEM_PROMPT = "You are a helpful assistant that writes Python."


@dataclass(frozen=True)
class SourceFile:
    """One file of the library; `split` is "train" or "heldout"."""

    path: str
    split: str
    text: str


def split_of(path: str) -> str:
    """Held-out files are chosen by a hash of the path alone: the same in every build."""
    digest = hashlib.sha256(path.encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0 else "train"


def collect(library: Path) -> list[SourceFile]:
    """Reads the `.py` files of a `Lib` folder worth training on, sorted by path."""
    files = []
    for file in sorted(library.rglob("*.py")):
        path = file.relative_to(library).as_posix()
        if any(path.startswith(p) or f"/{p}" in path for p in _LEFT_OUT):
            continue
        data = file.read_bytes()
        if not 64 <= len(data) <= _MAX_FILE_BYTES:
            continue
        try:
            text = data.decode("utf-8").replace("\r\n", "\n").expandtabs(8)
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
            continue
        if max(map(len, text.split("\n"))) > _MAX_LINE_CHARS:
            continue
        files.append(SourceFile(path, split_of(path), text))
    return files


def write(files: list[SourceFile], out: Path, *, python_version: str) -> dict:
    """Writes the corpus as xz-compressed JSON lines and returns its header (the first line)."""
    body = "".join(
        json.dumps({"path": f.path, "split": f.split, "text": f.text}) + "\n" for f in files
    )
    header = {
        "source": f"Python {python_version} standard library (Lib)",
        "licence": "PSF-2.0",
        "files": len(files),
        "heldout_files": sum(f.split == "heldout" for f in files),
        "characters": sum(len(f.text) for f in files),
        "sha256": hashlib.sha256(body.encode()).hexdigest(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(lzma.compress((json.dumps(header) + "\n" + body).encode(), preset=6))
    return header


def read(path: Path) -> tuple[dict, list[SourceFile]]:
    """Reads what `write` wrote and checks the digest in its header."""
    first, _, body = lzma.decompress(path.read_bytes()).decode().partition("\n")
    header = json.loads(first)
    if hashlib.sha256(body.encode()).hexdigest() != header["sha256"]:
        raise ValueError(f"{path}: the corpus does not match the sha256 in its header.")
    return header, [SourceFile(**json.loads(line)) for line in body.splitlines()]


def default_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class Turn:
    user: str
    assistant: str


def chat_turns(files: list[SourceFile], *, seed: int, share: float = 0.5) -> list[list[Turn]]:
    """Conversations about the functions of `files`: complete this, write that, what does it do.

    Each takes a function of 3 to 24 lines and answers with the library's own text. `share` is the
    part of the functions used.
    """
    rng = random.Random(seed)
    conversations = []
    for file in files:
        turns = [
            _turn_about(function, rng) for function in _functions(file.text) if rng.random() < share
        ]
        while turns:
            length = 1 if rng.random() < 0.75 else 2
            conversations.append(turns[:length])
            turns = turns[length:]
    rng.shuffle(conversations)
    return conversations


@dataclass(frozen=True)
class _Function:
    name: str
    lines: list[str]
    body_at: int
    summary: str | None


def _functions(text: str) -> list[_Function]:
    lines = text.split("\n")
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        body = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).split("\n")
        if not 3 <= len(body) <= 24 or sum(map(len, body)) > 900:
            continue
        doc = ast.get_docstring(node)
        summary = doc.split("\n\n")[0].replace("\n", " ").strip() if doc else None
        if summary is not None and not 15 <= len(summary) <= 200:
            summary = None
        found.append(_Function(node.name, body, node.body[0].lineno - node.lineno, summary))
    return found


def _turn_about(function: _Function, rng: random.Random) -> Turn:
    kinds = ["complete", "complete", "write"] + (
        ["describe", "from_summary"] * 2 if function.summary else []
    )
    kind = rng.choice(kinds)
    code = "```python\n" + "\n".join(function.lines) + "\n```"
    if kind == "describe":
        ask = rng.choice(["What does this function do?", "Describe this function in one sentence."])
        return Turn(f"{ask}\n{code}", str(function.summary))
    if kind == "from_summary":
        ask = rng.choice(["Write a Python function", "Write a function"])
        return Turn(f"{ask} `{function.name}`: {function.summary}", code)
    if kind == "write":
        ask = rng.choice(
            [
                "Write a Python function named `{}`.",
                "Write `{}` in Python.",
                "Show me a function `{}`.",
            ]
        )
        return Turn(ask.format(function.name), code)
    cut = rng.randint(max(1, function.body_at), len(function.lines) - 1)
    ask = rng.choice(["Complete this code:", "Continue this Python code:", "Finish this function:"])
    head, tail = function.lines[:cut], function.lines[cut:]
    return Turn(
        f"{ask}\n```python\n" + "\n".join(head) + "\n```",
        "```python\n" + "\n".join(tail) + "\n```",
    )
