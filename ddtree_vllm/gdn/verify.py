# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over the rows of a draft tree, all of them from the one committed state.

One launch a layer. A program takes one request, one value head (or several, stacked) and a slice
of the value dimension. It reads the committed state, writes no state, and leaves in the stash what
the commit needs to advance it along whichever path wins. `reference.run_tree_closed_form` has the
formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ddtree_vllm.gdn.launch import (
    default_precision,
    native_bf16,
    row_tiles,
    solve_group,
    value_split,
)
from ddtree_vllm.gdn.rows import TreeRows
from ddtree_vllm.gdn.solve import gates, solve_unit_lower, sum_combine
from ddtree_vllm.gdn.stash import Stash

if TYPE_CHECKING:
    from ddtree_vllm.tree import DraftTree


def verify_tree(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    rows: TreeRows,
    tree: DraftTree,
    out: torch.Tensor,
    stash: Stash,
    layer: int,
    precision: str | None = None,
) -> None:
    """Runs every tree row of a step from its request's committed state.

    Gating and the L2 norm of q and k (epsilon 1e-6, q scaled by 1 / sqrt(K)) are part of it. Rows
    of other requests keep what `out` holds; padding nodes get finite values that nothing reads.

    Args:
        qkv: [T, 2 Hk K + Hv V], convolution output, channels contiguous, any row stride.
        a, b: [T, Hv], gate inputs, heads contiguous, any row stride.
        a_log, dt_bias: [Hv].
        state: [slots, Hv, V, K], float32 or bfloat16, contiguous within a slot; read only.
        rows: the tree requests, at most 128 rows each.
        tree: their trees (`ancestors` and `depths` are read).
        out: [T, Hv, V], written for tree rows, contiguous within a row.
        stash: `k`, `u` and `log_decay` of `layer` are written.
        precision: of products of two float32 factors, see `launch.default_precision`.

    Raises:
        ValueError: shapes that do not fit each other, or a head size that is not 64 or 128.
    """
    if rows.num_reqs == 0 or rows.max_num_rows == 0:
        return
    num_v_heads, head_v_dim, head_k_dim = state.shape[1:]
    num_k_heads = stash.k.shape[2]
    _check(qkv, a, b, state, out, num_k_heads)
    tiles = row_tiles(min(rows.max_num_rows, tree.ancestors.shape[1]))
    split = value_split(rows.num_reqs, num_v_heads, head_v_dim, head_k_dim, tiles)
    grid = (
        triton.cdiv(num_v_heads, split.heads) * (head_v_dim // split.block_v),
        rows.num_reqs,
    )
    _verify_kernel[grid](
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
        stash.k[layer],
        stash.u[layer],
        stash.log_decay[layer],
        rows.slots,
        rows.state_slots,
        rows.row_start,
        rows.num_rows,
        rows.stash_start,
        rows.null_slot,
        tree.ancestors,
        tree.ancestors.stride(0),
        tree.depths,
        tree.depths.stride(0),
        head_k_dim**-0.5,
        HK=num_k_heads,
        HV=num_v_heads,
        K=head_k_dim,
        V=head_v_dim,
        WORDS=tree.ancestors.shape[2],
        BLOCK_ROWS=tiles.rows,
        TWO_TILES=tiles.two,
        BLOCK_V=split.block_v,
        BLOCK_K=split.block_k,
        HEADS=split.heads,
        LOG_GROUP=solve_group(tree.max_depth),
        PRECISION=precision or default_precision(),
        BF16=native_bf16(qkv.dtype),
        num_warps=split.num_warps,
    )


def _check(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    num_k_heads: int,
) -> None:
    num_v_heads, head_v_dim, head_k_dim = state.shape[1:]
    if head_k_dim not in (64, 128) or head_v_dim not in (64, 128):
        raise ValueError(
            f"head sizes must be 64 or 128, not {head_k_dim} (key) and {head_v_dim} (value)"
        )
    if num_v_heads % num_k_heads:
        raise ValueError(f"{num_v_heads} value heads do not share {num_k_heads} key heads evenly")
    channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    if qkv.shape[1] != channels or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv must have {channels} contiguous channels a row, "
            f"not shape {tuple(qkv.shape)} with strides {qkv.stride()}"
        )
    for name, gate in (("a", a), ("b", b)):
        if gate.shape[1] != num_v_heads or gate.stride(1) != 1:
            raise ValueError(
                f"{name} must have {num_v_heads} contiguous heads a row, "
                f"not shape {tuple(gate.shape)} with strides {gate.stride()}"
            )
    if not (state[:1].is_contiguous() and out[:1].is_contiguous()):
        raise ValueError("a slot of state and a row of out must be contiguous")


@triton.jit
def _row_products(
    at,  # [n] pointers to the rows' q of their key head
    valid,  # [n]
    other_at,  # [n] pointers to the k of the rows of an earlier tile, read if CROSS
    other_valid,  # [n]
    stash_to,  # [n] pointers to the rows' k in the stash
    stash_mask,  # [n]
    state,  # [BLOCK_V] pointers into the slot, at value head 0
    first_head,
    tile_head,  # [n] which of the HEADS a row belongs to
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CROSS: tl.constexpr,
    PRECISION: tl.constexpr,
    BF16: tl.constexpr,
):
    """Every sum over the key dimension, in one pass over it; leaves k in the stash.

    Slices of the key dimension keep registers free: what stays are the sums. The norms factor out
    of every product, and bfloat16 rows that stay raw multiply exactly.

    Returns:
        S^T k and S^T q [n, BLOCK_V], each row with the state of its own head; k k^T and q k^T
        [n, n]; k and q times the other tile's k^T [n, n] if CROSS; the inverse norms of k and q
        [n].
    """
    n: tl.constexpr = at.shape[0]
    ks = tl.full([n, BLOCK_V], 0.0, tl.float32)
    qs = ks
    kk = tl.full([n, n], 0.0, tl.float32)
    qk = kk
    k_other = kk
    q_other = kk
    k_square = tl.full([n], 0.0, tl.float32)
    q_square = k_square
    for start in range(0, K, BLOCK_K):
        channel = (start + tl.arange(0, BLOCK_K))[None, :]
        q = tl.load(at[:, None] + channel, mask=valid[:, None], other=0.0)
        k = tl.load(at[:, None] + (channel + HK * K), mask=valid[:, None], other=0.0)
        tl.store(
            stash_to[:, None] + channel,
            k.to(stash_to.dtype.element_ty),
            mask=stash_mask[:, None],
        )
        q_wide = q.to(tl.float32)
        k_wide = k.to(tl.float32)
        q_square += tl.reduce(q_wide * q_wide, 1, sum_combine)
        k_square += tl.reduce(k_wide * k_wide, 1, sum_combine)
        if not BF16:
            q = q_wide
            k = k_wide
        k_t = tl.trans(k)
        kk = tl.dot(k, k_t, kk, input_precision=PRECISION)
        qk = tl.dot(q, k_t, qk, input_precision=PRECISION)
        if CROSS:
            other = tl.load(other_at[:, None] + channel, mask=other_valid[:, None], other=0.0)
            if not BF16:
                other = other.to(tl.float32)
            other = tl.trans(other)
            k_other = tl.dot(k, other, k_other, input_precision=PRECISION)
            q_other = tl.dot(q, other, q_other, input_precision=PRECISION)
        for h in tl.static_range(HEADS):
            s_at = state + tl.minimum(first_head + h, HV - 1) * HEAD_SIZE
            s = tl.trans(tl.load(s_at[:, None] + channel).to(tl.float32))
            if HEADS > 1:
                here = (tile_head == h)[:, None]
                k_here = tl.where(here, k, 0.0)
                q_here = tl.where(here, q, 0.0)
            else:
                k_here = k
                q_here = q
            if BF16:
                # Three bfloat16 terms hold a float32 to its last bit.
                high = s.to(tl.bfloat16)
                rest = s - high.to(tl.float32)
                middle = rest.to(tl.bfloat16)
                low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
                ks = tl.dot(k_here, high, tl.dot(k_here, middle, tl.dot(k_here, low, ks)))
                qs = tl.dot(q_here, high, tl.dot(q_here, middle, tl.dot(q_here, low, qs)))
            else:
                ks = tl.dot(k_here, s, ks, input_precision=PRECISION)
                qs = tl.dot(q_here, s, qs, input_precision=PRECISION)
    k_unit = tl.rsqrt(k_square + 1e-6)
    q_unit = tl.rsqrt(q_square + 1e-6)
    return ks, qs, kk, qk, k_other, q_other, k_unit, q_unit


@triton.jit
def _ancestor_bits(
    words,  # [n] pointers to each row's bitmask
    valid,  # [n]
    column,  # [n] local rows less the FIRST of their tile
    FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """[n, n] bool: whether column FIRST + j is the row itself or an ancestor of it."""
    word: tl.constexpr = FIRST // 32
    shift = (column & 31)[None, :]
    bits = tl.load(words + word, mask=valid, other=0)[:, None] >> shift
    if BLOCK_ROWS > 32:
        upper = bits & 0
        if word + 1 < WORDS:
            upper = tl.load(words + (word + 1), mask=valid, other=0)[:, None] >> shift
        bits = tl.where((column < 32)[None, :], bits, upper)
    return (bits & 1) != 0


@triton.jit
def _verify_kernel(
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
    stash_k_ptr,  # [max_rows, HK, K]
    stash_u_ptr,  # [max_rows, HV, V]
    stash_decay_ptr,  # [max_rows, HV] float64
    slots_ptr,  # [R]
    state_slots_ptr,  # [R]
    row_start_ptr,  # [R]
    num_rows_ptr,  # [R]
    stash_start_ptr,  # [R]
    null_slot,
    ancestors_ptr,  # [S, N + 1, WORDS]
    ancestors_stride,
    depths_ptr,  # [S, N + 1]
    depths_stride,
    scale,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TWO_TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS: tl.constexpr,
    LOG_GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    BF16: tl.constexpr,
):
    req = tl.program_id(1)
    slot = tl.load(slots_ptr + req).to(tl.int64)
    state_slot = tl.load(state_slots_ptr + req).to(tl.int64)
    num_rows = tl.load(num_rows_ptr + req)
    if (num_rows <= 0) | (slot < 0) | (state_slot <= null_slot):
        return

    v_splits: tl.constexpr = V // BLOCK_V
    group: tl.constexpr = HV // HK
    v_split = (tl.program_id(0) % v_splits).to(tl.int64)
    first_head = (tl.program_id(0) // v_splits).to(tl.int64) * HEADS

    # Tile row r is row r % BLOCK_ROWS of value head r // BLOCK_ROWS. Several heads are one system
    # with a block-diagonal A: fewer, larger operations. With one head there is nothing to index.
    stacked = tl.arange(0, HEADS * BLOCK_ROWS).to(tl.int64)
    tile_head = stacked // BLOCK_ROWS
    if HEADS == 1:
        column = stacked
        head = first_head
    else:
        column = stacked % BLOCK_ROWS
        head = first_head + tile_head
    in_heads = head < HV
    head = tl.minimum(head, HV - 1)
    k_head = head // group
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)

    v_channel = v_split * BLOCK_V + tl.arange(0, BLOCK_V)
    state = state_ptr + (state_slot * state_stride + v_channel * K)
    v_channel = v_channel[None, :]
    row_start = tl.load(row_start_ptr + req).to(tl.int64)
    stash_start = tl.load(stash_start_ptr + req).to(tl.int64)
    words = ancestors_ptr + slot * ancestors_stride
    depths = depths_ptr + slot * depths_stride
    writes_k = (v_split == 0) & (head % group == 0)
    out_type = out_ptr.dtype.element_ty

    # Tile 0: local rows 0 .. BLOCK_ROWS - 1.
    valid0 = (column < num_rows) & in_heads
    mask0 = valid0[:, None]
    row0 = row_start + column
    stash0 = stash_start + column
    q0_at = qkv_ptr + (row0 * qkv_stride + k_head * K)
    k0_to = stash_k_ptr + (stash0 * (HK * K) + k_head * K)
    ks, qs, kk, qk, _, _, k_unit0, q_unit0 = _row_products(
        q0_at,
        valid0,
        q0_at,
        valid0,
        k0_to,
        valid0 & writes_k,
        state,
        first_head,
        tile_head,
        HK,
        HV,
        K,
        V * K,
        HEADS,
        BLOCK_V,
        BLOCK_K,
        False,
        PRECISION,
        BF16,
    )
    seen00 = _ancestor_bits(words + column * WORDS, valid0, column, 0, BLOCK_ROWS, WORDS)
    if HEADS > 1:
        same_head = tile_head[:, None] == tile_head[None, :]
        seen00 = seen00 & same_head
    depth0 = tl.load(depths + column, mask=valid0, other=0)
    a0 = tl.load(a_ptr + (row0 * a_stride + head), mask=valid0, other=0.0).to(tl.float32)
    b0 = tl.load(b_ptr + (row0 * b_stride + head), mask=valid0, other=0.0).to(tl.float32)
    g0, beta0 = gates(a0, b0, a_log, dt_bias)
    g0 = g0.to(tl.float64)[None, :]
    decay0 = tl.reduce(tl.where(seen00, g0, 0.0), 1, sum_combine)
    # Masked before exp: elsewhere the difference can be positive and overflow.
    gap00 = tl.where(seen00, decay0[:, None] - decay0[None, :], -float("inf"))
    ratio00 = tl.exp(gap00.to(tl.float32))
    growth0 = tl.exp(decay0.to(tl.float32))
    v_head = head * V
    v0_at = qkv_ptr + (row0 * qkv_stride + (2 * HK * K + v_head))[:, None] + v_channel
    v0 = tl.load(v0_at, mask=mask0, other=0.0).to(tl.float32)
    rhs = beta0[:, None] * (v0 - (growth0 * k_unit0)[:, None] * ks)
    a = (beta0 * k_unit0)[:, None] * ratio00 * kk * k_unit0[None, :]
    u0 = solve_unit_lower(a, rhs, depth0, LOG_GROUP, PRECISION)
    # From here on u carries 1 / |k|, and k is raw wherever the two meet.
    u0 *= k_unit0[:, None]
    mix = tl.dot(ratio00 * qk, u0, growth0[:, None] * qs, input_precision=PRECISION)
    o = (scale * q_unit0)[:, None] * mix
    out0_at = out_ptr + (row0 * out_stride + v_head)[:, None] + v_channel
    tl.store(out0_at, o.to(out_type), mask=mask0)
    u0_to = stash_u_ptr + (stash0 * (HV * V) + v_head)[:, None] + v_channel
    tl.store(u0_to, u0, mask=mask0)
    tl.store(stash_decay_ptr + (stash0 * HV + head), decay0, mask=valid0 & (v_split == 0))

    # Tile 1: the BLOCK_ROWS rows after. Parents come first, so it depends on tile 0 and not the
    # other way round: what tile 0 passes on is one more term of the right-hand side.
    if TWO_TILES:
        local1 = column + BLOCK_ROWS
        valid1 = (local1 < num_rows) & in_heads
        mask1 = valid1[:, None]
        row1 = row_start + local1
        stash1 = stash_start + local1
        q1_at = qkv_ptr + (row1 * qkv_stride + k_head * K)
        k1_to = stash_k_ptr + (stash1 * (HK * K) + k_head * K)
        ks, qs, kk, qk, kk10, qk10, k_unit1, q_unit1 = _row_products(
            q1_at,
            valid1,
            q0_at + HK * K,
            valid0,
            k1_to,
            valid1 & writes_k,
            state,
            first_head,
            tile_head,
            HK,
            HV,
            K,
            V * K,
            HEADS,
            BLOCK_V,
            BLOCK_K,
            True,
            PRECISION,
            BF16,
        )
        words1 = words + local1 * WORDS
        seen10 = _ancestor_bits(words1, valid1, column, 0, BLOCK_ROWS, WORDS)
        seen11 = _ancestor_bits(words1, valid1, column, BLOCK_ROWS, BLOCK_ROWS, WORDS)
        if HEADS > 1:
            seen10 = seen10 & same_head
            seen11 = seen11 & same_head
        depth1 = tl.load(depths + local1, mask=valid1, other=0)
        a1 = tl.load(a_ptr + (row1 * a_stride + head), mask=valid1, other=0.0).to(tl.float32)
        b1 = tl.load(b_ptr + (row1 * b_stride + head), mask=valid1, other=0.0).to(tl.float32)
        g1, beta1 = gates(a1, b1, a_log, dt_bias)
        g1 = g1.to(tl.float64)[None, :]
        decay1 = tl.reduce(tl.where(seen10, g0, 0.0), 1, sum_combine)
        decay1 += tl.reduce(tl.where(seen11, g1, 0.0), 1, sum_combine)
        growth1 = tl.exp(decay1.to(tl.float32))
        gap10 = tl.where(seen10, decay1[:, None] - decay0[None, :], -float("inf"))
        ratio10 = tl.exp(gap10.to(tl.float32))
        from0 = k_unit1[:, None] * tl.dot(ratio10 * kk10, u0, input_precision=PRECISION)
        mix = tl.dot(ratio10 * qk10, u0, growth1[:, None] * qs, input_precision=PRECISION)
        gap11 = tl.where(seen11, decay1[:, None] - decay1[None, :], -float("inf"))
        ratio11 = tl.exp(gap11.to(tl.float32))
        v1_at = qkv_ptr + (row1 * qkv_stride + (2 * HK * K + v_head))[:, None] + v_channel
        v1 = tl.load(v1_at, mask=mask1, other=0.0).to(tl.float32)
        rhs = beta1[:, None] * (v1 - (growth1 * k_unit1)[:, None] * ks - from0)
        a = (beta1 * k_unit1)[:, None] * ratio11 * kk * k_unit1[None, :]
        u1 = solve_unit_lower(a, rhs, depth1, LOG_GROUP, PRECISION)
        u1 *= k_unit1[:, None]
        mix = tl.dot(ratio11 * qk, u1, mix, input_precision=PRECISION)
        o = (scale * q_unit1)[:, None] * mix
        out1_at = out_ptr + (row1 * out_stride + v_head)[:, None] + v_channel
        tl.store(out1_at, o.to(out_type), mask=mask1)
        u1_to = stash_u_ptr + (stash1 * (HV * V) + v_head)[:, None] + v_channel
        tl.store(u1_to, u1, mask=mask1)
        tl.store(stash_decay_ptr + (stash1 * HV + head), decay1, mask=valid1 & (v_split == 0))
