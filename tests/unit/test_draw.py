# SPDX-License-Identifier: Apache-2.0
"""Tokens drawn from wide blocks of the vocabulary are those that vLLM draws, to the last one."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from ddtree_vllm.sampling.draw import BLOCK, draw_tokens


def batch(
    vocab: int, dtype: torch.dtype, seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Five rows of three requests, one of them greedy, and one row of padding."""
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that the largest is there many times, in one block and in several.
    logits = torch.randint(-3, 4, (6, vocab), generator=generator).to(dtype)
    return {
        "logits": logits.to(device),
        "slots": torch.tensor([2, 2, 0, 1, 1, -1], dtype=torch.int32, device=device),
        "temperatures": torch.tensor([0.0, 1.0, 0.7], device=device),
        "seeds": torch.tensor([11, 7, 1 << 40], dtype=torch.int64, device=device),
        "positions": torch.tensor([5, 6, 5, 9, 10, 0], dtype=torch.int64, device=device),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1000, BLOCK + 1, 3 * BLOCK - 1024])
@pytest.mark.parametrize("use_fp64", [False, True], ids=["float32 noise", "float64 noise"])
def test_tokens_are_those_of_vllms_own_blocks(vocab, dtype, use_fp64, seed, device) -> None:
    rows = batch(vocab, dtype, seed, device)
    wanted = gumbel_sample(
        rows["logits"],
        rows["slots"],
        rows["temperatures"],
        rows["seeds"],
        rows["positions"],
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )
    drawn = draw_tokens(**rows, use_fp64=use_fp64)
    assert drawn.dtype == torch.int64
    assert drawn[:5].tolist() == wanted[:5].tolist()


def test_without_temperature_the_first_of_the_largest_is_drawn(device) -> None:
    logits = torch.zeros(2, 3 * BLOCK, device=device)
    logits[0, [BLOCK + 3, BLOCK + 9, 2 * BLOCK]] = 4.0
    logits[1, -1] = 1.0
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    drawn = draw_tokens(logits, zeros.int(), torch.zeros(1, device=device), zeros, zeros)
    assert drawn.tolist() == [BLOCK + 3, 3 * BLOCK - 1]


def test_another_position_draws_other_noise(device) -> None:
    """Each row would otherwise repeat what the one before drew."""
    rows = 64
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    drawn = draw_tokens(
        torch.zeros(rows, 2 * BLOCK, device=device),
        zeros.int(),
        torch.ones(1, device=device),
        zeros,
        torch.arange(rows, device=device),
    )
    assert len(set(drawn.tolist())) > rows // 2


def test_logits_of_strided_rows_are_refused(device) -> None:
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="must be contiguous, not of stride 2"):
        draw_tokens(
            torch.zeros(1, 8, device=device)[:, ::2], zeros.int(), torch.ones(1), zeros, zeros
        )
