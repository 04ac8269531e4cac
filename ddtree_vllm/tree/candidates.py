# SPDX-License-Identifier: Apache-2.0
"""The best candidates of each draft position: top-k and log-softmax in one read of the logits.

At a vocabulary of 248,320 the logits are by far the largest thing the drafter leaves behind, so
they are read once: each program reduces one stretch of the vocabulary to its k best candidates and
its share of the softmax's denominator, and a second, small kernel merges the stretches of a row.

A candidate is compared as one integer: its logit, as an integer of the same order, above its
inverted token id. So equal logits go to the lower id, and the result does not depend on the tiling.
Between stretches that integer has 64 bits. Within one, bfloat16 logits leave room for the id in 32,
which makes the k passes over the stretch three times cheaper.
"""

import torch

from ddtree_vllm.tree._interpreter import INTERPRETED, require_runnable

# isort: split
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def _chunk_candidates_kernel(
    logits_ptr,  # [M, V]
    logits_stride,
    keys_ptr,  # int64 [M, chunks, K]
    max_ptr,  # float32 [M, chunks]
    sum_ptr,  # float32 [M, chunks]: sum of exp(logit - max)
    M,
    V,
    num_chunks,
    K: tl.constexpr,
    IS_BF16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,  # <= 65536
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    chunk = tl.program_id(1)
    token = chunk * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    in_rows = row < M
    valid = in_rows[:, None] & (token < V)
    at = logits_ptr + row.to(tl.int64)[:, None] * logits_stride + token
    logit = tl.load(at, mask=valid, other=-float("inf")).to(tl.float32)
    logit = tl.where(logit == 0, 0.0, logit)  # -0 ties with +0

    peak = tl.max(logit, axis=1)
    # Where every logit is -inf the sum is 0, not NaN.
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    share = tl.sum(tl.exp(logit - shift[:, None]), axis=1)
    stat_at = row * num_chunks + chunk
    tl.store(max_ptr + stat_at, peak, mask=in_rows)
    tl.store(sum_ptr + stat_at, share, mask=in_rows)

    bits = logit.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if IS_BF16:
        # The low half of `ordered` only repeats the sign.
        lowest = -0x80000000
        key = (ordered & -0x10000) | (0xFFFF - tl.arange(0, BLOCK_V)[None, :])
    else:
        lowest = -0x8000000000000000
        key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    key = tl.where(valid, key, lowest)
    for rank in range(K):
        best = tl.max(key, axis=1)
        key = tl.where(key == best[:, None], lowest, key)
        if IS_BF16:
            best_ordered = (best & -0x10000) | ((best >> 31) & 0xFFFF)
            best_token = chunk * BLOCK_V + (0xFFFF - (best & 0xFFFF))
            wide = (best_ordered.to(tl.int64) << 32) | (0x7FFFFFFF - best_token).to(tl.int64)
            best = tl.where(best == lowest, -0x8000000000000000, wide)
        tl.store(keys_ptr + (row.to(tl.int64) * num_chunks + chunk) * K + rank, best, mask=in_rows)


@triton.jit(do_not_specialize=["M"])
def _merge_candidates_kernel(
    keys_ptr,  # int64 [M, chunks, K]
    max_ptr,  # float32 [M, chunks]
    sum_ptr,  # float32 [M, chunks]
    log_probs_ptr,  # float32 [M, K]
    tokens_ptr,  # int64 [M, K]
    M,
    num_chunks,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,  # >= chunks
    BLOCK_CK: tl.constexpr,  # >= chunks * K
    BLOCK_K: tl.constexpr,  # >= K
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = row < M

    chunk = tl.arange(0, BLOCK_C)[None, :]
    is_chunk = in_rows[:, None] & (chunk < num_chunks)
    stat_at = row[:, None] * num_chunks + chunk
    peaks = tl.load(max_ptr + stat_at, mask=is_chunk, other=-float("inf"))
    shares = tl.load(sum_ptr + stat_at, mask=is_chunk, other=0.0)
    peak = tl.max(peaks, axis=1)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    denominator = tl.sum(shares * tl.exp(peaks - shift[:, None]), axis=1)

    lowest = -0x8000000000000000
    candidate = tl.arange(0, BLOCK_CK)[None, :]
    is_candidate = in_rows[:, None] & (candidate < num_chunks * K)
    key_at = row.to(tl.int64)[:, None] * num_chunks * K + candidate
    key = tl.load(keys_ptr + key_at, mask=is_candidate, other=lowest)
    ranks = tl.arange(0, BLOCK_K)[None, :]
    top = tl.full([BLOCK_M, BLOCK_K], lowest, tl.int64)
    for rank in range(K):
        best = tl.max(key, axis=1)
        top = tl.where(ranks == rank, best[:, None], top)
        key = tl.where(key == best[:, None], lowest, key)

    ordered = (top >> 32).to(tl.int32)
    logit = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    token = 0x7FFFFFFF - (top & 0x7FFFFFFF)
    # The peak's own term makes the sum at least 1, unless every logit is -inf. So this is never
    # above 0, and sorted as the logits are.
    log_sum = tl.log(tl.where(denominator == 0, 1.0, denominator))
    log_prob = (logit - shift[:, None]) - log_sum[:, None]
    out_at = row[:, None] * K + ranks
    is_out = in_rows[:, None] & (ranks < K)
    tl.store(log_probs_ptr + out_at, log_prob, mask=is_out)
    tl.store(tokens_ptr + out_at, token, mask=is_out)


def top_k_log_probs(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable tokens of each row and their log-probabilities.

    Log-softmax is in float32 over the whole row; equal logits are ordered by lower token id, so the
    result is a function of the logits alone. Never waits for the device. A row with NaN gets NaN
    log-probabilities, of which the tree builder makes no nodes. Cost grows with k: meant for k up
    to a few dozen.

    Args:
        logits: float [M, V], rows of stride-1 elements, over the *global* vocabulary.
        k: 1 to V.

    Returns:
        log_probs: float32 [M, k], sorted downwards, at most 0.
        tokens: int64 [M, k].

    Raises:
        ValueError: `logits` is not such a matrix or k is out of range.
    """
    require_runnable(logits, "logits")
    if logits.ndim != 2 or not logits.is_floating_point() or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be a float matrix [M, V] with stride-1 rows, not {logits.dtype} "
            f"{list(logits.shape)} with strides {list(logits.stride())}."
        )
    num_rows, vocab_size = logits.shape
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k must be between 1 and the vocabulary size {vocab_size}, not {k}.")

    log_probs = torch.empty(num_rows, k, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, k, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return log_probs, tokens

    # On a GPU one warp per stretch needs no barriers and is fastest, until the merge would have to
    # hold too many candidates. The interpreter pays per operation: few and large ones.
    stretch, warps = (1024, 1) if k <= 16 and not INTERPRETED else (4096, 4)
    block_v = min(stretch, triton.next_power_of_2(vocab_size))
    block_m = min(64, triton.next_power_of_2(num_rows)) if INTERPRETED else 1
    num_chunks = triton.cdiv(vocab_size, block_v)
    keys = torch.empty(num_rows, num_chunks, k, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    shares = torch.empty_like(peaks)
    row_blocks = triton.cdiv(num_rows, block_m)
    _chunk_candidates_kernel[(row_blocks, num_chunks)](
        logits,
        logits.stride(0),
        keys,
        peaks,
        shares,
        num_rows,
        vocab_size,
        num_chunks,
        K=k,
        IS_BF16=logits.dtype == torch.bfloat16,
        BLOCK_M=block_m,
        BLOCK_V=block_v,
        num_warps=warps,
    )
    _merge_candidates_kernel[(row_blocks,)](
        keys,
        peaks,
        shares,
        log_probs,
        tokens,
        num_rows,
        num_chunks,
        K=k,
        BLOCK_M=block_m,
        BLOCK_C=triton.next_power_of_2(num_chunks),
        BLOCK_CK=triton.next_power_of_2(num_chunks * k),
        BLOCK_K=triton.next_power_of_2(k),
        num_warps=4,
    )
    return log_probs, tokens


def top_k_log_probs_reference(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_k_log_probs` in plain PyTorch, log-softmax in float64. Returns float64, int64 [M, k]."""
    # A stable sort keeps the lower id first among equal logits.
    order = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :k]
    return logits.double().log_softmax(dim=1).gather(1, order), order
