# SPDX-License-Identifier: Apache-2.0
"""What the README tells people to type is what the code does."""

import re
import shlex
from pathlib import Path

import pytest

from ddtree_vllm import environment
from ddtree_vllm.cli import CPU_KV_CACHE_BYTES
from ddtree_vllm.config import DDTreeConfig, vllm_options

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(start):
    """Fenced blocks whose text contains `start`, continued lines joined."""
    found = re.findall(r"```\w*\n(.*?)```", README, re.DOTALL)
    return [block.replace("\\\n", " ") for block in found if start in block]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_plain_vllm_commands_are_what_ddtree_vllm_serve_runs(device):
    [command] = [
        b for b in blocks("vllm serve MODEL \\") if ("CPUWorker" in b) == (device == "cpu")
    ]
    words = shlex.split(command)
    start = words.index("vllm")
    variables = dict(word.split("=", 1) for word in words[:start])
    assert variables == environment.engine_variables(device)
    expected = vllm_options("DRAFTER", DDTreeConfig.create(budget=31), device)
    if device == "cpu":
        expected += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    assert words[start:] == ["vllm", "serve", "MODEL", *expected]


def test_the_python_example_runs():
    [example] = blocks("build_draft_tree")
    names: dict = {}
    exec(example, names)
    assert len(names["tree"].parents) == 31
    assert len(names["tree"].prefix(15).parents) == 15


def test_make_targets_that_are_named_exist():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", README)) - {"python"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_that_are_linked_exist():
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (Path(__file__).parents[2] / link).exists(), link
