# SPDX-License-Identifier: Apache-2.0
"""What the GPU gives a program of a kernel, by which tiles are chosen."""

from __future__ import annotations

import functools

import torch

LARGE_SHARED_MEMORY = 163 * 1024
"""Bytes that 8.0 gives a block, and the least that the large tiles were fitted to: 9.0 gives 227 KB.
The other GPUs that are served, 8.6, 8.9 and 12.0, give 99 KB."""


@functools.cache
def shared_memory_per_block() -> int:
    """Bytes of shared memory that a block may ask for on the current GPU."""
    return torch.cuda.get_device_properties(None).shared_memory_per_block_optin
