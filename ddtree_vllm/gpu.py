# SPDX-License-Identifier: Apache-2.0
"""What the GPU gives a program of a kernel, by which tiles are chosen; and who multiplies matrices on it."""

from __future__ import annotations

import functools
from typing import Any

import torch

LARGE_SHARED_MEMORY = 163 * 1024
"""Bytes that 8.0 gives a block, and the least that the large tiles were fitted to: 9.0 gives 227 KB.
The other GPUs that are served, 8.6, 8.9 and 12.0, give 99 KB."""


@functools.cache
def shared_memory_per_block() -> int:
    """Bytes of shared memory that a block may ask for on the current GPU."""
    return torch.cuda.get_device_properties(None).shared_memory_per_block_optin


LT_ROWS = 128
"""Most rows of a product that cuBLASLt chooses kernels for."""


def choose_blas(rows: int | None) -> None:
    """Have torch ask cuBLASLt for the kernels of products of few rows.

    Of the products of Qwen3.6-27B on an H200 (docs/benchmarks) cuBLAS splits the MLP's second one for
    up to 128 rows and adds the parts in another kernel: 51 us for 64 rows, where cuBLASLt takes one that
    needs 45. The others it makes alike, but for 192 rows, where cuBLASLt's choice is slower. Where that
    was not measured nothing is chosen.

    Args:
        rows: of the products, padding too; None: as it was before the first choice.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return
    before = _blas_before_any_choice()
    few = rows is not None and rows <= LT_ROWS
    torch.backends.cuda.preferred_blas_library("cublaslt" if few else before)


@functools.cache
def _blas_before_any_choice() -> Any:
    """What the environment or torch prefers, asked once, before anything is chosen."""
    return torch.backends.cuda.preferred_blas_library()
