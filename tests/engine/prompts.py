# SPDX-License-Identifier: Apache-2.0
"""Prompts for the demo pair: windows of Python source, which is what it was trained to continue."""

from __future__ import annotations

import functools
import random
import sysconfig
from pathlib import Path

MODULES = [
    "abc",
    "argparse",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "cmd",
    "codecs",
    "colorsys",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "enum",
    "fileinput",
    "fnmatch",
    "fractions",
    "functools",
    "getopt",
    "glob",
    "graphlib",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "imaplib",
    "inspect",
    "io",
    "ipaddress",
    "json/decoder",
    "keyword",
    "linecache",
    "locale",
    "logging/handlers",
    "mailbox",
    "mimetypes",
    "netrc",
    "numbers",
    "operator",
    "optparse",
    "pathlib",
    "pickle",
    "pprint",
    "queue",
    "quopri",
    "random",
    "reprlib",
    "sched",
    "secrets",
    "selectors",
    "shelve",
    "shlex",
    "shutil",
    "statistics",
    "string",
    "stringprep",
    "subprocess",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "token",
    "trace",
    "traceback",
    "types",
    "uuid",
    "weakref",
    "zipapp",
]


@functools.cache
def _tokenizer(target: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def source_prompts(
    target: Path, count: int, rng: random.Random, longest: int = 150
) -> list[list[int]]:
    """``count`` token-id prompts of 4 to ``longest`` tokens, cut from the running Python's library."""
    tokenizer = _tokenizer(target)
    library = Path(sysconfig.get_path("stdlib"))
    prompts = []
    while len(prompts) < count:
        text = (library / f"{rng.choice(MODULES)}.py").read_text(encoding="utf-8")
        start = rng.randrange(max(1, len(text) - 2000))
        ids = tokenizer.encode(text[start : start + 2000], add_special_tokens=False)
        length = rng.randrange(4, longest + 1)
        if len(ids) >= length:
            prompts.append(ids[:length])
    return prompts
