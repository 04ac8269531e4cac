# SPDX-License-Identifier: Apache-2.0
"""The target's token at every row, drawn by vLLM's own kernel from wider blocks of the vocabulary.

vLLM takes 1,024 logits a program. A tree brings 16 or 64 rows a request: at 248,320 logits and 256 rows
that are 62,208 programs, which wait for the row's seed, position and temperature longer than for the
logits. The noise of a token depends on (seed, position, token), not on its block, and of equal values the
first wins within a block as among blocks: blocks of any size draw the same tokens.
"""

from __future__ import annotations

import torch
import triton
from vllm.v1.worker.gpu.sample.gumbel import _gumbel_sample_kernel

BLOCK = 4096
"""Logits of a program, at most. On an H200 (docs/benchmarks) 8,192 were slower where there is noise."""


def draw_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    use_fp64: bool = False,
) -> torch.Tensor:
    """One token a row: of the largest logit plus Gumbel noise, or without noise at temperature 0.

    Args:
        logits: [T, V], float32 or bfloat16, processed and divided by the temperature already; the
            last dimension contiguous.
        slots: int32 [T], each row's request; -1 for padding, which gets a token that nobody reads.
        temperatures: float32 [slots].
        seeds: int64 [slots].
        positions: int64 [T], which together with the seed key the noise.
        use_fp64: noise and comparison in float64, as vLLM does where its sampler is asked to.

    Returns:
        int64 [T].

    Raises:
        ValueError: logits whose last dimension is not contiguous.
    """
    if logits.stride(-1) != 1:
        raise ValueError(
            f"the logits of a row must be contiguous, not of stride {logits.stride(-1)}"
        )
    num_rows, vocab_size = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    num_blocks = triton.cdiv(vocab_size, block)
    tokens = logits.new_empty(num_rows, num_blocks, dtype=torch.int64)
    largest = logits.new_empty(
        num_rows, num_blocks, dtype=torch.float64 if use_fp64 else torch.float32
    )
    _gumbel_sample_kernel[(num_rows, num_blocks)](
        tokens,
        tokens.stride(0),
        largest,
        largest.stride(0),
        None,  # No logits are kept: four arguments of that.
        0,
        0,
        None,
        None,
        0,
        logits,
        logits.stride(0),
        slots.contiguous(),
        seeds,
        positions.contiguous(),
        temperatures,
        vocab_size,
        BLOCK_SIZE=block,
        IS_DRAFTING=False,
        APPLY_TEMPERATURE=False,
        USE_FP64=use_fp64,
        PER_TOKEN_COL=False,
        num_warps=8,
    )
    return tokens.gather(1, largest.argmax(1, keepdim=True)).view(-1)
