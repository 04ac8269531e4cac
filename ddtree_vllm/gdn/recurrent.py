# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over ordinary sequences: prefill chunks and plain decode.

vLLM's own CPU kernel refuses float32, so on a CPU the plugin's layer serves these rows here, and a
run without speculation goes through the same arithmetic as one with it. The chunked form (Yang et
al., arXiv 2412.06464, section 3.3): a chunk of rows is a tree that is a chain. A program takes one
sequence, one value head and a slice of the value dimension, and carries the state from chunk to
chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_vllm.gdn.launch import (
    MIN_ROWS,
    default_precision,
    interpreting,
    longest_chunk,
    stacked_heads,
)
from ddtree_vllm.gdn.solve import invert_unit_lower, log_decay, sum_combine, update_rate


def run_sequences(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    out: torch.Tensor,
    num_k_heads: int,
    max_query_len: int,
    null_slot: int = -1,
    precision: str | None = None,
) -> None:
    """Runs every sequence of a batch and advances its state.

    Args:
        qkv: [T, 2 Hk K + Hv V], convolution output, channels contiguous, any row stride.
        a, b: [T, Hv], gate inputs, heads contiguous, any row stride.
        a_log, dt_bias: [Hv].
        state: [slots, Hv, V, K], float32 or bfloat16, contiguous within a slot; advanced in place.
        state_slots: int32 or int64 [R]; a sequence whose slot is not above `null_slot` is skipped.
        query_start_loc: int32 [R + 1], rows of sequence r are query_start_loc[r] up to [r + 1].
        has_initial_state: bool [R], False starts from zeros; None: all have one.
        out: [T, Hv, V], contiguous within a row.
        max_query_len: the most rows of a sequence; known on the host.
        precision: of products of two float32 factors, see `launch.default_precision`.
    """
    num_v_heads, head_v_dim, head_k_dim = state.shape[1:]
    num_reqs = state_slots.shape[0]
    if num_reqs == 0 or max_query_len == 0:
        return
    block_rows = min(longest_chunk(), max(MIN_ROWS, triton.next_power_of_2(max_query_len)))
    block_v = head_v_dim if interpreting() else min(head_v_dim, 32)
    heads = stacked_heads(num_v_heads, block_rows) if interpreting() else 1
    grid = (triton.cdiv(num_v_heads, heads) * (head_v_dim // block_v), num_reqs)
    _sequence_kernel[grid](
        qkv,
        qkv.stride(0),
        a,
        a.stride(0),
        b,
        b.stride(0),
        a_log,
        dt_bias,
        state,
        state.stride(0),
        out,
        out.stride(0),
        state_slots,
        query_start_loc,
        has_initial_state,
        null_slot,
        head_k_dim**-0.5,
        HK=num_k_heads,
        HV=num_v_heads,
        K=head_k_dim,
        V=head_v_dim,
        HAS_INITIAL=has_initial_state is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_V=block_v,
        HEADS=heads,
        # One row has nothing to solve.
        SINGLE_ROW=max_query_len == 1,
        ROW_BITS=(block_rows - 1).bit_length(),
        PRECISION=precision or default_precision(),
        num_warps=4,
    )


@triton.jit
def _sequence_kernel(
    qkv_ptr,  # [T, 2 HK K + HV V]
    qkv_stride,
    a_ptr,  # [T, HV]
    a_stride,
    b_ptr,  # [T, HV]
    b_stride,
    a_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV]
    state_ptr,  # [slots, HV, V, K]
    state_stride,
    out_ptr,  # [T, HV, V]
    out_stride,
    state_slots_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    has_initial_ptr,  # [R]
    null_slot,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HEADS: tl.constexpr,
    SINGLE_ROW: tl.constexpr,
    ROW_BITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    req = tl.program_id(1)
    state_slot = tl.load(state_slots_ptr + req).to(tl.int64)
    row_start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    num_rows = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - row_start
    if (num_rows <= 0) | (state_slot <= null_slot):
        return
    v_splits: tl.constexpr = V // BLOCK_V
    v_split = (tl.program_id(0) % v_splits).to(tl.int64)
    first_head = (tl.program_id(0) // v_splits).to(tl.int64) * HEADS

    # Rows of a chunk are stacked by head, as in verification, and so are the states: state row s is
    # value column s % BLOCK_V of value head s // BLOCK_V. `own` picks a row's head among them.
    stacked = tl.arange(0, HEADS * BLOCK_ROWS).to(tl.int64)
    state_row = tl.arange(0, HEADS * BLOCK_V).to(tl.int64)
    if HEADS == 1:
        local = stacked
        head = first_head
        state_head = first_head
        v_of_state = v_split * BLOCK_V + state_row
        in_heads = head < HV
        state_mask = (state_row >= 0)[:, None]
        seen = local[:, None] >= local[None, :]
    else:
        local = stacked % BLOCK_ROWS
        tile_head = stacked // BLOCK_ROWS
        head = first_head + tile_head
        state_head = first_head + state_row // BLOCK_V
        v_of_state = v_split * BLOCK_V + state_row % BLOCK_V
        in_heads = head < HV
        state_mask = (state_head < HV)[:, None]
        same_head = tile_head[:, None] == tile_head[None, :]
        seen = same_head & (local[:, None] >= local[None, :])
        own = tile_head[:, None] == tl.arange(0, HEADS)[None, :]
        own_wide = own.to(tl.float32)[:, :, None]
    # Rows of different heads differ in a higher bit.
    level = (stacked[:, None] ^ stacked[None, :]).to(tl.int32)
    head = tl.minimum(head, HV - 1)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)

    k_channel = tl.arange(0, K)[None, :]
    v_channel = (v_split * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    state = (
        state_ptr
        + (state_slot * state_stride + state_head * (V * K) + v_of_state * K)[:, None]
        + k_channel
    )
    s = tl.load(state, mask=state_mask, other=0.0).to(tl.float32)
    if HAS_INITIAL:
        s = tl.where(tl.load(has_initial_ptr + req) != 0, s, 0.0)

    q_channel = (head // (HV // HK)) * K
    for start in range(0, num_rows, BLOCK_ROWS):
        valid = (local < num_rows - start) & in_heads
        mask = valid[:, None]
        row = row_start + start + local
        at = row * qkv_stride
        q_at = qkv_ptr + (at + q_channel)[:, None] + k_channel
        q = tl.load(q_at, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(q_at + HK * K, mask=mask, other=0.0).to(tl.float32)
        v_at = qkv_ptr + (at + (2 * HK * K + head * V))[:, None] + v_channel
        v = tl.load(v_at, mask=mask, other=0.0).to(tl.float32)
        q *= (scale * tl.rsqrt(tl.reduce(q * q, 1, sum_combine) + 1e-6))[:, None]
        k *= tl.rsqrt(tl.reduce(k * k, 1, sum_combine) + 1e-6)[:, None]
        a = tl.load(a_ptr + (row * a_stride + head), mask=valid, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + (row * b_stride + head), mask=valid, other=0.0).to(tl.float32)
        g = tl.where(valid, log_decay(a, a_log, dt_bias), 0.0).to(tl.float64)
        beta = update_rate(b)[:, None]

        decay = tl.reduce(tl.where(seen, g[None, :], 0.0), 1, sum_combine)
        gap = tl.where(seen, decay[:, None] - decay[None, :], -float("inf"))
        ratio = tl.exp(gap.to(tl.float32))
        growth = tl.exp(decay.to(tl.float32))[:, None]
        s_t = tl.trans(s)
        ks = tl.dot(k, s_t, input_precision=PRECISION)
        qs = tl.dot(q, s_t, input_precision=PRECISION)
        if HEADS > 1:
            ks = tl.reshape(ks, [HEADS * BLOCK_ROWS, HEADS, BLOCK_V]) * own_wide
            qs = tl.reshape(qs, [HEADS * BLOCK_ROWS, HEADS, BLOCK_V]) * own_wide
            ks = tl.reduce(ks, 1, sum_combine)
            qs = tl.reduce(qs, 1, sum_combine)
        u = beta * (v - growth * ks)
        k_t = tl.trans(k)
        if not SINGLE_ROW:
            kk = tl.dot(k, k_t, input_precision=PRECISION)
            inner = invert_unit_lower(beta * ratio * kk, level, ROW_BITS, PRECISION)
            u -= tl.dot(inner, u, input_precision=PRECISION)
        qk = tl.dot(q, k_t, input_precision=PRECISION)
        o = growth * qs + tl.dot(ratio * qk, u, input_precision=PRECISION)
        out = out_ptr + (row * out_stride + head * V)[:, None] + v_channel
        tl.store(out, o.to(out_ptr.dtype.element_ty), mask=mask)

        # The chunk's whole decay: rows past the end add nothing to it.
        if HEADS == 1:
            total = tl.reduce(g, 0, sum_combine)
            state_growth = tl.exp(total.to(tl.float32))
        else:
            total = tl.reduce(tl.where(same_head, g[None, :], 0.0), 1, sum_combine)
            by_head = tl.reduce(tl.where(own, g[:, None], 0.0), 0, sum_combine)
            by_head = tl.broadcast_to(by_head[:, None], [HEADS, BLOCK_V])
            by_head = tl.exp(by_head.to(tl.float32))
            state_growth = tl.reshape(by_head, [HEADS * BLOCK_V])[:, None]
        weight = tl.where(valid, tl.exp((total - decay).to(tl.float32)), 0.0)
        u *= weight[:, None]
        if HEADS > 1:
            u = tl.reshape(u[:, None, :] * own_wide, [HEADS * BLOCK_ROWS, HEADS * BLOCK_V])
        s = state_growth * s + tl.dot(tl.trans(u), k, input_precision=PRECISION)
    tl.store(state, s.to(state_ptr.dtype.element_ty), mask=state_mask)
