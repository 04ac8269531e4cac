# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over the rows of a draft tree, all of them from the one committed state.

Two launches a layer. The first works on what rows have to do with each other, once a request and
value head: the inverse of the rows' triangular system, and the weights that mix their updates into
the outputs. The second takes a slice of the value dimension besides: it reads the committed state,
solves by a product, writes no state, and leaves in the stash what the commit needs to advance it
along whichever path wins. `reference.run_tree_closed_form` has the formulas.

In one launch every value slice would invert the system anew, which took longer than all the rest. On
a GPU that can, the second kernel reads the state while the first one still runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ddtree_vllm.gdn.launch import (
    ROW_FACTORS,
    default_precision,
    factor_split,
    native_bf16,
    overlapping,
    row_tiles,
    value_split,
)
from ddtree_vllm.gdn.rows import TreeRows
from ddtree_vllm.gdn.solve import (
    exact_dot,
    invert_blocks,
    log_decay,
    sum_combine,
    update_rate,
)
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
    rows_per_request: int = 0,
) -> None:
    """Runs every tree row of a step from its request's committed state.

    Gating and the L2 norm of q and k (epsilon 1e-6, q scaled by 1 / sqrt(K)) are part of it. Rows
    of other requests keep what `out` holds; padding nodes get finite values that nothing reads.
    With `rows_per_request` all other rows get zeros.

    Args:
        qkv: [T, 2 Hk K + Hv V], convolution output, channels contiguous, any row stride.
        a, b: [T, Hv], gate inputs, heads contiguous, any row stride.
        a_log, dt_bias: [Hv].
        state: [slots, Hv, V, K], float32 or bfloat16, contiguous within a slot; read only.
        rows: the tree requests, at most 128 rows each.
        tree: their trees (`ancestors` is read).
        out: [T, Hv, V], written for tree rows, contiguous within a row.
        stash: `k`, `u` and `log_decay` of `layer` are written, `factors` is overwritten.
        precision: of products of two float32 factors, see `launch.default_precision`.
        rows_per_request: rows of every entry, of a step in which entry r has rows
            r * rows_per_request on, whether skipped or not; 0 where that is not so.

    Raises:
        ValueError: shapes that do not fit each other, a head size that is not 64 or 128, or a stash
            made for fewer requests or rows of a request; `rows_per_request` that are not the step's.
    """
    if rows.num_reqs == 0 or rows.max_num_rows == 0:
        return
    num_v_heads, head_v_dim, head_k_dim = state.shape[1:]
    num_k_heads = stash.k.shape[2]
    _check(qkv, a, b, state, out, num_k_heads)
    tiles = row_tiles(min(rows.max_num_rows, tree.ancestors.shape[1]))
    factor = factor_split(rows.num_reqs, num_v_heads, tiles)
    split = value_split(rows.num_reqs, num_v_heads, head_v_dim, head_k_dim, tiles)
    head_programs = triton.cdiv(num_v_heads, factor.heads)
    needed = rows.num_reqs * head_programs * factor.numel
    if needed > stash.factors.numel():
        raise ValueError(
            f"{rows.num_reqs} requests of up to {rows.max_num_rows} rows need {needed} factors; "
            f"the stash was made for {stash.factors.numel()}"
        )
    if rows_per_request and not (
        rows_per_request <= rows.max_num_rows and rows_per_request * rows.num_reqs == out.shape[0]
    ):
        raise ValueError(
            f"{rows.num_reqs} requests of {rows_per_request} rows, up to {rows.max_num_rows}, are not "
            f"the {out.shape[0]} rows of the step"
        )
    which = (rows.slots, rows.state_slots, rows.row_start, rows.num_rows, rows.stash_start)
    shape = {
        "HK": num_k_heads,
        "HV": num_v_heads,
        "K": head_k_dim,
        "BLOCK_ROWS": tiles.rows,
        "TWO_TILES": tiles.two,
        "HEADS": factor.heads,
        "ROW_FACTORS": ROW_FACTORS,
        "PRECISION": precision or default_precision(),
        "BF16": native_bf16(qkv.dtype),
        "OVERLAP": overlapping(),
    }
    if overlapping():
        shape["launch_pdl"] = True
    _verify_factor_kernel[head_programs, rows.num_reqs, factor.pairs](
        qkv,
        qkv.stride(0),
        a,
        a.stride(0),
        b,
        b.stride(0),
        a_log,
        dt_bias,
        stash.factors,
        stash.k[layer],
        stash.log_decay[layer],
        *which,
        rows.null_slot,
        head_k_dim**-0.5,
        tree.ancestors,
        tree.ancestors.stride(0),
        WORDS=tree.ancestors.shape[2],
        BLOCK_K=min(factor.block_k, head_k_dim),
        num_warps=factor.num_warps,
        **shape,
    )
    _verify_apply_kernel[head_programs * (head_v_dim // split.block_v), rows.num_reqs](
        qkv,
        qkv.stride(0),
        state,
        state.stride(0),
        out,
        out.stride(0),
        stash.factors,
        stash.u[layer],
        *which,
        rows.null_slot,
        rows_per_request,
        V=head_v_dim,
        BLOCK_V=split.block_v,
        BLOCK_K=split.block_k,
        num_warps=4,
        **shape,
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
def _ancestor_bits(
    words,  # [n] pointers to each row's bitmask
    valid,  # [n]
    column,  # [n] local rows less the FIRST of their tile
    FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    AXIS: tl.constexpr,
):
    """[n, n] bool: whether row FIRST + j is row i itself or an ancestor of it, with i along AXIS."""
    word: tl.constexpr = FIRST // 32
    shift = tl.expand_dims(column & 31, AXIS)
    bits = tl.expand_dims(tl.load(words + word, mask=valid, other=0), 1 - AXIS) >> shift
    if BLOCK_ROWS > 32:
        upper = bits & 0
        if word + 1 < WORDS:
            found = tl.load(words + (word + 1), mask=valid, other=0)
            upper = tl.expand_dims(found, 1 - AXIS) >> shift
        bits = tl.where(tl.expand_dims(column < 32, AXIS), bits, upper)
    return (bits & 1) != 0


@triton.jit
def _tile_decay(
    a_ptr,  # [T, HV]
    a_stride,
    a_log,
    dt_bias,
    row,  # [n] rows of tile 0 among the step's
    column,  # [n] their local rows
    head,
    num_rows,
    in_heads,
    same_head,  # [n, n]
    words,  # pointer to the request's bitmasks
    scratch,  # [n] pointers to 2 n floats of this program
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Sum of the log-decay along the path to each row of tile TILE, [n] float64."""
    local = column + TILE * BLOCK_ROWS
    valid = (local < num_rows) & in_heads
    n: tl.constexpr = column.shape[0]
    # A thread adds up whole rows of its own, out of memory: from registers it would either ask the
    # other threads for every term or work out all of them itself.
    for earlier in tl.static_range(TILE + 1):
        there = (column + earlier * BLOCK_ROWS < num_rows) & in_heads
        at = a_ptr + ((row + earlier * BLOCK_ROWS) * a_stride + head)
        a = tl.load(at, mask=there, other=0.0).to(tl.float32)
        tl.store(scratch + earlier * n, log_decay(a, a_log, dt_bias))
    tl.debug_barrier()
    decay = tl.full([n], 0.0, tl.float64)
    for earlier in tl.static_range(TILE + 1):
        seen = _ancestor_bits(
            words + local * WORDS, valid, column, earlier * BLOCK_ROWS, BLOCK_ROWS, WORDS, 1
        )
        if HEADS > 1:
            seen = seen & same_head
        g = tl.load(scratch + earlier * n).to(tl.float64)
        decay += tl.reduce(tl.where(seen, g[:, None], 0.0), 0, sum_combine)
    return decay


@triton.jit
def _verify_factor_kernel(
    qkv_ptr,  # [T, 2 HK K + HV V]
    qkv_stride,
    a_ptr,  # [T, HV]
    a_stride,
    b_ptr,  # [T, HV]
    b_stride,
    a_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV]
    factors_ptr,  # [R, head programs, pairs, 2 n + ROW_FACTORS, n]
    stash_k_ptr,  # [max_rows, HK, K]
    stash_decay_ptr,  # [max_rows, HV] float64
    slots_ptr,  # [R]
    state_slots_ptr,  # [R]
    row_start_ptr,  # [R]
    num_rows_ptr,  # [R]
    stash_start_ptr,  # [R]
    null_slot,
    scale,
    ancestors_ptr,  # [S, N + 1, WORDS]
    ancestors_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TWO_TILES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS: tl.constexpr,
    ROW_FACTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BF16: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Factors of one pair of row tiles: two of n x n, n = HEADS * BLOCK_ROWS.

    With one tile that pair is (0, 0); with two there are (0, 0), (1, 1) and (1, 0): rows of tile 1
    see those of tile 0, never the other way round, as parents come first. The first factor of a
    tile with itself is N of (I + A)^-1 = I - N; of (1, 0) it is A itself. The second mixes updates
    into outputs. Both take updates that carry 1 / |k|, but for N. Then come, for each row, what the
    right-hand side takes of v and of S^T k, 1 / |k|, and what the output takes of S^T q. Leaves k
    and the log-decays in the stash.
    """
    if OVERLAP:
        # In this order: the second kernel reads what the convolution wrote without waiting for it.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    req = tl.program_id(1)
    pair = tl.program_id(2)
    slot = tl.load(slots_ptr + req).to(tl.int64)
    state_slot = tl.load(state_slots_ptr + req).to(tl.int64)
    num_rows = tl.load(num_rows_ptr + req)
    tile = tl.minimum(pair, 1)
    if (num_rows <= tile * BLOCK_ROWS) | (slot < 0) | (state_slot <= null_slot):
        return
    group: tl.constexpr = HV // HK
    n: tl.constexpr = HEADS * BLOCK_ROWS
    first_head = tl.program_id(0).to(tl.int64) * HEADS

    # Tile row r is row r % BLOCK_ROWS of value head r // BLOCK_ROWS. Several heads are one system
    # with a block-diagonal A: fewer, larger operations. With one head there is nothing to index.
    stacked = tl.arange(0, n).to(tl.int64)
    if HEADS == 1:
        column = stacked
        head = first_head
        same_head = True
    else:
        column = stacked % BLOCK_ROWS
        tile_head = stacked // BLOCK_ROWS
        head = first_head + tile_head
        same_head = tile_head[:, None] == tile_head[None, :]
    in_heads = head < HV
    head = tl.minimum(head, HV - 1)
    k_head = head // group
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    row0 = tl.load(row_start_ptr + req).to(tl.int64) + column
    stash_row = tl.load(stash_start_ptr + req).to(tl.int64) + column
    words = ancestors_ptr + slot * ancestors_stride

    local = column
    row = row0
    if TWO_TILES:
        local += tile * BLOCK_ROWS
        row += tile * BLOCK_ROWS
        stash_row += tile * BLOCK_ROWS
    valid = (local < num_rows) & in_heads
    stash_mask = (valid & (head % group == 0))[:, None]
    if TWO_TILES:
        stash_mask = stash_mask & (pair < 2)
        # The columns' tile: 0, 1, 0.
        other_tile = pair % 2
        other_row = row0 + other_tile * BLOCK_ROWS
        other_valid = (column + other_tile * BLOCK_ROWS < num_rows) & in_heads
        other_at = qkv_ptr + (other_row * qkv_stride + (HK + k_head) * K)
    at = qkv_ptr + (row * qkv_stride + k_head * K)
    stash_to = stash_k_ptr + (stash_row * (HK * K) + k_head * K)

    # The norms factor out of every product, and bfloat16 rows that stay raw multiply exactly.
    kk = tl.full([n, n], 0.0, tl.float32)
    qk = kk
    square = tl.full([n], 0.0, tl.float32)
    q_square = square
    other_square = square
    for start in range(0, K, BLOCK_K):
        channel = (start + tl.arange(0, BLOCK_K))[None, :]
        q = tl.load(at[:, None] + channel, mask=valid[:, None], other=0.0)
        k = tl.load(at[:, None] + (channel + HK * K), mask=valid[:, None], other=0.0)
        tl.store(stash_to[:, None] + channel, k.to(stash_k_ptr.dtype.element_ty), mask=stash_mask)
        wide = k.to(tl.float32)
        q_wide = q.to(tl.float32)
        square += tl.reduce(wide * wide, 1, sum_combine)
        q_square += tl.reduce(q_wide * q_wide, 1, sum_combine)
        if not BF16:
            q = q_wide
            k = wide
        if TWO_TILES:
            other = tl.load(other_at[:, None] + channel, mask=other_valid[:, None], other=0.0)
            other_wide = other.to(tl.float32)
            other_square += tl.reduce(other_wide * other_wide, 1, sum_combine)
            if not BF16:
                other = other_wide
            other = tl.trans(other)
        else:
            other = tl.trans(k)
        kk = tl.dot(k, other, kk, input_precision=PRECISION)
        qk = tl.dot(q, other, qk, input_precision=PRECISION)

    program = req.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    factor = factors_ptr + (program * tl.num_programs(2) + pair) * ((2 * n + ROW_FACTORS) * n)
    row_factors = factor + (2 * n * n + stacked)
    decay0 = _tile_decay(
        a_ptr,
        a_stride,
        a_log,
        dt_bias,
        row0,
        column,
        head,
        num_rows,
        in_heads,
        same_head,
        words,
        row_factors,
        0,
        BLOCK_ROWS,
        WORDS,
        HEADS,
    )
    seen = _ancestor_bits(words + column * WORDS, valid, column, 0, BLOCK_ROWS, WORDS, 0)
    decay = decay0
    other_decay = decay0
    other_unit = tl.rsqrt(square + 1e-6)
    if TWO_TILES:
        other_unit = tl.rsqrt(other_square + 1e-6)
        if tile == 1:
            decay = _tile_decay(
                a_ptr,
                a_stride,
                a_log,
                dt_bias,
                row0,
                column,
                head,
                num_rows,
                in_heads,
                same_head,
                words,
                row_factors,
                1,
                BLOCK_ROWS,
                WORDS,
                HEADS,
            )
            at_words = words + local * WORDS
            seen = _ancestor_bits(at_words, valid, column, 0, BLOCK_ROWS, WORDS, 0)
            if pair == 1:
                other_decay = decay
                seen = _ancestor_bits(at_words, valid, column, BLOCK_ROWS, BLOCK_ROWS, WORDS, 0)
    if HEADS > 1:
        seen = seen & same_head
    # Masked before exp: elsewhere the difference can be positive and overflow.
    gap = tl.where(seen, decay[:, None] - other_decay[None, :], -float("inf"))
    ratio = tl.exp(gap.to(tl.float32))
    b = tl.load(b_ptr + (row * b_stride + head), mask=valid, other=0.0).to(tl.float32)
    rate = update_rate(b)
    unit = tl.rsqrt(square + 1e-6)
    out_unit = scale * tl.rsqrt(q_square + 1e-6)
    if TWO_TILES:
        # The updates of tile 0 carry 1 / |k| when tile 1 takes them.
        other_unit = tl.where(pair == 2, 1.0, other_unit)
    a = (rate * unit)[:, None] * ratio * kk * other_unit[None, :]

    at = stacked[:, None] * n + stacked[None, :]
    tl.store(factor + at, a)
    tl.store(factor + (at + n * n), out_unit[:, None] * ratio * qk)
    growth = tl.exp(decay.to(tl.float32))
    # All threads have read what was here.
    tl.debug_barrier()
    tl.store(row_factors, rate)
    tl.store(row_factors + n, rate * growth * unit)
    tl.store(row_factors + 2 * n, unit)
    tl.store(row_factors + 3 * n, growth * out_unit)
    tl.store(stash_decay_ptr + (stash_row * HV + head), decay, mask=valid & (pair < 2))
    if pair < 2:
        tl.debug_barrier()
        invert_blocks(factor, n, BLOCK_ROWS, PRECISION)


@triton.jit
def _apply_tile(
    row,  # [n] the tile's rows among the step's
    stash_row,  # [n]
    valid,  # [n]
    factors,  # [n, n] pointers into the factors of tile 0 with itself
    u0,  # [n, BLOCK_V] what tile 0 returned, used if TILE is 1
    row_factors,  # [n] pointers to the first row factors of tile 0
    qkv_ptr,
    qkv_stride,
    state,  # [BLOCK_V] pointers into the slot, at value head 0
    out_ptr,
    out_stride,
    stash_u_ptr,
    first_head,
    tile_head,  # [n] which of the HEADS a row belongs to
    head,
    v_channel,  # [1, BLOCK_V]
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS: tl.constexpr,
    ROW_FACTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BF16: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Writes a tile's outputs and updates; returns the updates [n, BLOCK_V], which carry 1 / |k|."""
    n: tl.constexpr = row.shape[0]
    mask = valid[:, None]
    at = qkv_ptr + row * qkv_stride
    q_at = (at + (head // (HV // HK)) * K)[:, None]
    # S^T k and S^T q, each row with the state of its own head. Slices of the key dimension keep
    # registers free: what stays are the sums.
    ks = tl.full([n, BLOCK_V], 0.0, tl.float32)
    qs = ks
    for start in range(0, K, BLOCK_K):
        channel = (start + tl.arange(0, BLOCK_K))[None, :]
        q = tl.load(q_at + channel, mask=mask, other=0.0)
        k = tl.load(q_at + (channel + HK * K), mask=mask, other=0.0)
        if not BF16:
            q = q.to(tl.float32)
            k = k.to(tl.float32)
        for h in tl.static_range(HEADS):
            s_at = state + tl.minimum(first_head + h, HV - 1) * (V * K)
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
    if OVERLAP and TILE == 0:
        # Up to here nothing came from the first kernel.
        tl.extra.cuda.gdc_wait()
    pair: tl.constexpr = (2 * n + ROW_FACTORS) * n
    own = factors + TILE * pair
    row_factors += TILE * pair
    v_head = head * V
    v_at = (at + (2 * HK * K + v_head))[:, None] + v_channel
    v = tl.load(v_at, mask=mask, other=0.0).to(tl.float32)
    rhs = tl.load(row_factors)[:, None] * v - tl.load(row_factors + n)[:, None] * ks
    mixed = tl.load(row_factors + 3 * n)[:, None] * qs
    if TILE == 1:
        # What tile 0 passes on is one more term of the right-hand side.
        between = factors + 2 * pair
        rhs -= exact_dot(tl.load(between), u0, None, PRECISION)
        mixed = exact_dot(tl.load(between + n * n), u0, mixed, PRECISION)
    u = rhs - exact_dot(tl.load(own), rhs, None, PRECISION)
    # From here on u carries 1 / |k|, and k is raw wherever the two meet.
    u *= tl.load(row_factors + 2 * n)[:, None]
    o = exact_dot(tl.load(own + n * n), u, mixed, PRECISION)
    out_at = out_ptr + (row * out_stride + v_head)[:, None] + v_channel
    tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=mask)
    u_to = stash_u_ptr + (stash_row * (HV * V) + v_head)[:, None] + v_channel
    tl.store(u_to, u, mask=mask)
    return u


# Not specialised: budgets by batch size differ in it, and would each compile a kernel.
@triton.jit(do_not_specialize=["rows_per_request"])
def _verify_apply_kernel(
    qkv_ptr,  # [T, 2 HK K + HV V]
    qkv_stride,
    state_ptr,  # [slots, HV, V, K]
    state_stride,
    out_ptr,  # [T, HV, V]
    out_stride,
    factors_ptr,  # [R, head programs, pairs, 2 n + ROW_FACTORS, n]
    stash_u_ptr,  # [max_rows, HV, V]
    slots_ptr,  # [R]
    state_slots_ptr,  # [R]
    row_start_ptr,  # [R]
    num_rows_ptr,  # [R]
    stash_start_ptr,  # [R]
    null_slot,
    rows_per_request,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TWO_TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS: tl.constexpr,
    ROW_FACTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    BF16: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Updates and outputs of a request's rows for a slice of the value dimension."""
    req = tl.program_id(1)
    slot = tl.load(slots_ptr + req).to(tl.int64)
    state_slot = tl.load(state_slots_ptr + req).to(tl.int64)
    num_rows = tl.load(num_rows_ptr + req)
    num_rows = tl.where((slot < 0) | (state_slot <= null_slot), 0, num_rows)
    v_splits: tl.constexpr = V // BLOCK_V
    n: tl.constexpr = HEADS * BLOCK_ROWS
    pairs: tl.constexpr = 3 if TWO_TILES else 1
    v_split = (tl.program_id(0) % v_splits).to(tl.int64)
    head_program = tl.program_id(0) // v_splits
    first_head = head_program.to(tl.int64) * HEADS

    # Rows are stacked by head as in the factors.
    stacked = tl.arange(0, n).to(tl.int64)
    tile_head = stacked // BLOCK_ROWS
    if HEADS == 1:
        column = stacked
        head = first_head
    else:
        column = stacked % BLOCK_ROWS
        head = first_head + tile_head
    in_heads = head < HV
    head = tl.minimum(head, HV - 1)
    v_channel = v_split * BLOCK_V + tl.arange(0, BLOCK_V)
    if num_rows < rows_per_request:
        for tile in tl.static_range(2 if TWO_TILES else 1):
            local = column + tile * BLOCK_ROWS
            others = (local >= num_rows) & (local < rows_per_request) & in_heads
            at = (req.to(tl.int64) * rows_per_request + local) * out_stride + head * V
            zeros = tl.full([n, BLOCK_V], 0.0, out_ptr.dtype.element_ty)
            tl.store(out_ptr + at[:, None] + v_channel[None, :], zeros, mask=others[:, None])
    if num_rows <= 0:
        if OVERLAP:
            # Or this kernel could end before those that it follows.
            tl.extra.cuda.gdc_wait()
        return
    state = state_ptr + (state_slot * state_stride + v_channel * K)
    v_channel = v_channel[None, :]
    row = tl.load(row_start_ptr + req).to(tl.int64) + column
    stash_row = tl.load(stash_start_ptr + req).to(tl.int64) + column
    program = req.to(tl.int64) * (tl.num_programs(0) // v_splits) + head_program
    factors = factors_ptr + program * (pairs * (2 * n + ROW_FACTORS) * n)
    row_factors = factors + (2 * n * n + stacked)
    factors += stacked[:, None] * n + stacked[None, :]

    u0 = _apply_tile(
        row,
        stash_row,
        (column < num_rows) & in_heads,
        factors,
        0.0,
        row_factors,
        qkv_ptr,
        qkv_stride,
        state,
        out_ptr,
        out_stride,
        stash_u_ptr,
        first_head,
        tile_head,
        head,
        v_channel,
        HK,
        HV,
        K,
        V,
        0,
        BLOCK_V,
        BLOCK_K,
        HEADS,
        ROW_FACTORS,
        PRECISION,
        BF16,
        OVERLAP,
    )
    if TWO_TILES:  # noqa: SIM102 (the outer one is known when the kernel is compiled)
        if num_rows > BLOCK_ROWS:
            _apply_tile(
                row + BLOCK_ROWS,
                stash_row + BLOCK_ROWS,
                (column + BLOCK_ROWS < num_rows) & in_heads,
                factors,
                u0,
                row_factors,
                qkv_ptr,
                qkv_stride,
                state,
                out_ptr,
                out_stride,
                stash_u_ptr,
                first_head,
                tile_head,
                head,
                v_channel,
                HK,
                HV,
                K,
                V,
                1,
                BLOCK_V,
                BLOCK_K,
                HEADS,
                ROW_FACTORS,
                PRECISION,
                BF16,
                OVERLAP,
            )
