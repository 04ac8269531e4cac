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
    split = value_split(rows.num_reqs, num_v_heads, head_v_dim, tiles.rows)
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
def _load_rows(
    at,  # [n] pointers to the rows' q of their key head
    valid,  # [n]
    HK: tl.constexpr,
    K: tl.constexpr,
    BF16: tl.constexpr,
):
    """q and k [n, K] as the convolution gave them, and the inverses of their norms [n].

    The norms factor out of every product, and bfloat16 rows that stay raw multiply exactly.
    """
    at = at[:, None] + tl.arange(0, K)[None, :]
    q = tl.load(at, mask=valid[:, None], other=0.0)
    k = tl.load(at + HK * K, mask=valid[:, None], other=0.0)
    q_wide = q.to(tl.float32)
    k_wide = k.to(tl.float32)
    q_unit = tl.rsqrt(tl.reduce(q_wide * q_wide, 1, sum_combine) + 1e-6)
    k_unit = tl.rsqrt(tl.reduce(k_wide * k_wide, 1, sum_combine) + 1e-6)
    if BF16:
        return q, k, q_unit, k_unit
    else:
        return q_wide, k_wide, q_unit, k_unit


@triton.jit
def _state_products(
    q,  # [n, K]
    k,  # [n, K]
    state,  # [BLOCK_V, K] pointers into the slot, at value head 0
    first_head,
    tile_head,  # [n] which of the HEADS a row belongs to
    HV: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BF16: tl.constexpr,
):
    """S^T k and S^T q [n, BLOCK_V], each row with the state of its own head."""
    for h in tl.static_range(HEADS):
        s = tl.load(state + tl.minimum(first_head + h, HV - 1) * HEAD_SIZE).to(tl.float32)
        s = tl.trans(s)
        if BF16:
            # Three bfloat16 terms hold a float32 to its last bit.
            high = s.to(tl.bfloat16)
            rest = s - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            ks_head = tl.dot(k, high, tl.dot(k, middle, tl.dot(k, low)))
            qs_head = tl.dot(q, high, tl.dot(q, middle, tl.dot(q, low)))
        else:
            ks_head = tl.dot(k, s, input_precision=PRECISION)
            qs_head = tl.dot(q, s, input_precision=PRECISION)
        if HEADS == 1:
            ks = ks_head
            qs = qs_head
        else:
            here = (tile_head == h).to(tl.float32)[:, None]
            if h == 0:
                ks = ks_head * here
                qs = qs_head * here
            else:
                ks += ks_head * here
                qs += qs_head * here
    return ks, qs


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

    k_channel = tl.arange(0, K)[None, :]
    v_channel = v_split * BLOCK_V + tl.arange(0, BLOCK_V)
    state = state_ptr + (state_slot * state_stride + v_channel * K)[:, None] + k_channel
    v_channel = v_channel[None, :]
    row_start = tl.load(row_start_ptr + req).to(tl.int64)
    stash_start = tl.load(stash_start_ptr + req).to(tl.int64)
    words = ancestors_ptr + slot * ancestors_stride
    depths = depths_ptr + slot * depths_stride
    writes_k = (v_split == 0) & (head % group == 0)
    k_type = stash_k_ptr.dtype.element_ty
    out_type = out_ptr.dtype.element_ty

    # Tile 0: local rows 0 .. BLOCK_ROWS - 1.
    valid0 = (column < num_rows) & in_heads
    mask0 = valid0[:, None]
    row0 = row_start + column
    stash0 = stash_start + column
    q0_at = qkv_ptr + (row0 * qkv_stride + k_head * K)
    q0, k0, q_unit0, k_unit0 = _load_rows(q0_at, valid0, HK, K, BF16)
    k0_to = stash_k_ptr + (stash0 * (HK * K) + k_head * K)[:, None] + k_channel
    tl.store(k0_to, k0.to(k_type), mask=(valid0 & writes_k)[:, None])
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
    ks0, qs0 = _state_products(
        q0, k0, state, first_head, tile_head, HV, V * K, HEADS, PRECISION, BF16
    )
    v_head = head * V
    v0_at = qkv_ptr + (row0 * qkv_stride + (2 * HK * K + v_head))[:, None] + v_channel
    v0 = tl.load(v0_at, mask=mask0, other=0.0).to(tl.float32)
    kk = tl.dot(k0, tl.trans(k0), input_precision=PRECISION)
    rhs = beta0[:, None] * (v0 - (growth0 * k_unit0)[:, None] * ks0)
    a = (beta0 * k_unit0)[:, None] * ratio00 * kk * k_unit0[None, :]
    u0 = solve_unit_lower(a, rhs, depth0, LOG_GROUP, PRECISION)
    # From here on u carries 1 / |k|, and k is raw wherever the two meet.
    u0 *= k_unit0[:, None]
    qk = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    mix = tl.dot(ratio00 * qk, u0, input_precision=PRECISION)
    o = (scale * q_unit0)[:, None] * (growth0[:, None] * qs0 + mix)
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
        q1, k1, q_unit1, k_unit1 = _load_rows(q1_at, valid1, HK, K, BF16)
        k1_to = stash_k_ptr + (stash1 * (HK * K) + k_head * K)[:, None] + k_channel
        tl.store(k1_to, k1.to(k_type), mask=(valid1 & writes_k)[:, None])
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
        ks1, qs1 = _state_products(
            q1, k1, state, first_head, tile_head, HV, V * K, HEADS, PRECISION, BF16
        )
        gap10 = tl.where(seen10, decay1[:, None] - decay0[None, :], -float("inf"))
        ratio10 = tl.exp(gap10.to(tl.float32))
        kk = tl.dot(k1, tl.trans(k0), input_precision=PRECISION)
        from0 = k_unit1[:, None] * tl.dot(ratio10 * kk, u0, input_precision=PRECISION)
        qk = tl.dot(q1, tl.trans(k0), input_precision=PRECISION)
        mix = tl.dot(ratio10 * qk, u0, input_precision=PRECISION)
        gap11 = tl.where(seen11, decay1[:, None] - decay1[None, :], -float("inf"))
        ratio11 = tl.exp(gap11.to(tl.float32))
        v1_at = qkv_ptr + (row1 * qkv_stride + (2 * HK * K + v_head))[:, None] + v_channel
        v1 = tl.load(v1_at, mask=mask1, other=0.0).to(tl.float32)
        kk = tl.dot(k1, tl.trans(k1), input_precision=PRECISION)
        rhs = beta1[:, None] * (v1 - (growth1 * k_unit1)[:, None] * ks1 - from0)
        a = (beta1 * k_unit1)[:, None] * ratio11 * kk * k_unit1[None, :]
        u1 = solve_unit_lower(a, rhs, depth1, LOG_GROUP, PRECISION)
        u1 *= k_unit1[:, None]
        qk = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        mix += tl.dot(ratio11 * qk, u1, input_precision=PRECISION)
        o = (scale * q_unit1)[:, None] * (growth1[:, None] * qs1 + mix)
        out1_at = out_ptr + (row1 * out_stride + v_head)[:, None] + v_channel
        tl.store(out1_at, o.to(out_type), mask=mask1)
        u1_to = stash_u_ptr + (stash1 * (HV * V) + v_head)[:, None] + v_channel
        tl.store(u1_to, u1, mask=mask1)
        tl.store(stash_decay_ptr + (stash1 * HV + head), decay1, mask=valid1 & (v_split == 0))
