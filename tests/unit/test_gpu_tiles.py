# SPDX-License-Identifier: Apache-2.0
"""Tiles by a GPU's shared memory: those that were measured stay.

What smaller ones compute is in the tests of each kernel, whether they fit in tests/kernels.
"""

import pytest
import torch

from ddtree_preflight import gpus as preflight_gpus
from ddtree_vllm import gpu
from ddtree_vllm.attention import tiles
from ddtree_vllm.attention.tiles import Tiles, choose_suffix_tiles, choose_tiles
from ddtree_vllm.engine import requirements
from ddtree_vllm.gdn import conv, launch
from ddtree_vllm.gdn.launch import CommitTiles, ValueSplit, row_tiles, value_split

SMALL = 99 * 1024  # 8.6, 8.9, 12.0
LARGE = [163 * 1024, 227 * 1024]  # 8.0; 9.0


@pytest.fixture
def on_gpu_with(monkeypatch):
    """Has launchers choose as on a GPU with so many bytes of shared memory for a block."""

    def stand_in(shared_memory: int) -> None:
        monkeypatch.setattr(conv, "interpreting", lambda: False)
        for module in (tiles, launch):
            monkeypatch.setattr(module, "interpreting", lambda: False)
            monkeypatch.setattr(module, "shared_memory_per_block", lambda: shared_memory)

    return stand_in


@pytest.mark.parametrize("shared_memory", LARGE)
def test_tiles_that_were_measured_stay(on_gpu_with, shared_memory):
    """Query heads in groups of 6, of 256, as in Qwen3.6-27B; and of 128."""
    on_gpu_with(shared_memory)
    bf16 = torch.bfloat16
    assert choose_tiles(5, 6, 256, bf16, 4096) == Tiles(32, 64, 16, 4, 2)
    assert choose_tiles(8, 6, 256, bf16, 4096) == Tiles(64, 64, 16, 4, 2)
    assert choose_tiles(32, 6, 256, bf16, 4096) == Tiles(128, 64, 32, 8, 2)
    assert choose_tiles(128, 6, 256, bf16, 4096) == Tiles(128, 64, 64, 8, 2)
    assert choose_tiles(8, 4, 128, bf16, 4096) == Tiles(32, 64, 16, 4, 3)
    assert choose_tiles(64, 4, 128, bf16, 4096) == Tiles(128, 128, 64, 8, 2)
    assert choose_suffix_tiles(64, 6, 256, bf16) == Tiles(32, 64, 64, 4, 1)
    assert choose_suffix_tiles(64, 4, 128, bf16) == Tiles(64, 128, 64, 4, 1)
    assert value_split(1, 48, 128, 128, row_tiles(128)) == ValueSplit(32, 128)
    assert value_split(4, 48, 128, 128, row_tiles(128)) == ValueSplit(32, 128)
    assert value_split(4, 48, 128, 128, row_tiles(64)) == ValueSplit(32, 128)
    assert value_split(8, 48, 128, 128, row_tiles(64)) == ValueSplit(64, 32)
    assert value_split(16, 48, 128, 128, row_tiles(32)) == ValueSplit(64, 32)
    assert launch.longest_chunk() == 32
    assert launch.commit_tiles(128, 3, 10240) == CommitTiles(16, 1024)
    assert conv._tree_tiles(64, 10240) == (2, 512, 2)
    assert conv._sequence_tiles(64, 10240) == (16, 128)


def test_tiles_for_99_kb_are_smaller_where_the_measured_ones_do_not_fit(on_gpu_with):
    on_gpu_with(SMALL)
    bf16 = torch.bfloat16
    assert choose_tiles(5, 6, 256, bf16, 4096) == Tiles(32, 64, 16, 4, 2)
    assert choose_tiles(8, 6, 256, bf16, 4096) == Tiles(64, 32, 16, 8, 2)
    assert choose_tiles(128, 6, 256, bf16, 4096) == Tiles(64, 32, 64, 8, 2)
    assert choose_tiles(64, 4, 128, bf16, 4096) == Tiles(64, 64, 64, 8, 2)
    assert choose_suffix_tiles(64, 6, 256, bf16) == Tiles(32, 32, 64, 4, 1)
    assert value_split(1, 48, 128, 128, row_tiles(128)) == ValueSplit(32, 32)
    assert value_split(16, 48, 128, 128, row_tiles(128)) == ValueSplit(32, 32)
    assert value_split(16, 48, 128, 128, row_tiles(32)) == ValueSplit(64, 32)
    assert launch.longest_chunk() == 16


@pytest.mark.parametrize(
    ("capability", "rows", "chosen"),
    [
        ((9, 0), [1], ["cublaslt"]),
        ((9, 0), [128, 129, 64], ["cublaslt", "as it was", "cublaslt"]),
        ((9, 0), [64, None], ["cublaslt", "as it was"]),
        ((9, 0), [4096], ["as it was"]),
        ((8, 9), [64, 4096], []),
        ((12, 0), [64], []),
        (None, [64], []),
    ],
)
def test_products_of_few_rows_are_cublaslts_where_that_was_measured(
    monkeypatch, capability, rows, chosen
):
    got = []

    def preferred(library=None):
        if library is not None:
            got.append(library)
        return got[-1] if got else "as it was"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    gpu._blas_before_any_choice.cache_clear()
    for number in rows:
        gpu.choose_blas(number)
    gpu._blas_before_any_choice.cache_clear()
    assert got == chosen


def test_the_role_preflight_refuses_the_gpus_that_the_engine_refuses():
    """It runs on the host's Python, without the engine beside it."""
    engine = tuple(".".join(map(str, capability)) for capability in requirements.SUPPORTED_GPUS)
    assert engine == preflight_gpus.CAPABILITIES
