# SPDX-License-Identifier: Apache-2.0
"""Attention of draft trees and of linear requests over a paged key/value cache.

The keys and values of this step's rows are in the cache already, at the last `n` positions of the
request, one position a row whatever the row's depth. Every row sees all earlier positions (the
prefix). Of this step's rows (the suffix) a tree row sees its ancestors and itself, a linear row
those before it and itself. So the only trace of a tree is a bitmask of n rows by n columns.

Query heads that share a key head are packed into the rows of a tile: the products are then tall
enough for the matrix units, and a key is read once for its whole group. Softmax is the online one
of FlashAttention (arXiv 2205.14135); a small batch splits the keys over programs and merges the
parts by their log-sum-exp (Flash-Decoding).
"""

import math

import torch
import triton
import triton.language as tl

from ddtree_vllm.attention.tiles import (
    MAX_SPLITS,
    Tiles,
    choose_num_splits,
    choose_suffix_tiles,
    choose_tiles,
    interpreting,
    min_tiles_per_split,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# Triton's interpreter multiplies bfloat16 as the integers it stores them in, and truncates where a
# GPU rounds. There (UPCAST) these two convert by hand. It also pays a tenth of a millisecond for a
# call, `tl.zeros` and `tl.cdiv` included: the kernels below make few.


@triton.jit
def _widen_bfloat16(x):
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_bfloat16(x):
    """To nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True).to(tl.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _attend_tile(
    q,  # [BLOCK_M, HEAD_DIM]
    acc,  # float32 [BLOCK_M, HEAD_DIM]
    row_max,  # float32 [BLOCK_M], in units of log2
    row_sum,  # float32 [BLOCK_M]
    position,  # int32 [tile]
    exists,  # bool [tile], read if BOUNDED
    visible,  # bool [BLOCK_M or 1, tile], read if MASKED
    log2_scale,
    table_ptr,
    key_ptr,
    value_ptr,
    stride_k_block,
    stride_k_position,
    stride_v_block,
    stride_v_position,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BOUNDED: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Adds one tile of keys to the running softmax of a tile of rows."""
    d = tl.arange(0, HEAD_DIM)
    # Blocks are of any size, so a tile may lie in several: every position looks up its own.
    offset = position % BLOCK_SIZE
    if BOUNDED:
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)
    k_ptrs = (key_ptr + block * stride_k_block + offset * stride_k_position)[:, None] + d[None, :]
    v_ptrs = (value_ptr + block * stride_v_block + offset * stride_v_position)[:, None] + d[None, :]
    if BOUNDED:
        k = tl.load(k_ptrs, mask=exists[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs)
    if UPCAST:
        k = _widen_bfloat16(k)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * log2_scale)
    # A row that has seen nothing yet has maximum -inf, and -inf minus -inf is not a number.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores * log2_scale - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    if BOUNDED:
        v = tl.load(v_ptrs, mask=exists[:, None], other=0.0)
    else:
        v = tl.load(v_ptrs)
    if UPCAST:
        v = _widen_bfloat16(v)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum


# What follows from the size of a batch is not specialised: it would compile a kernel for some sizes.
@triton.jit(
    do_not_specialize=[
        "num_splits",
        "max_rows",
        "stride_lse_split",
        "stride_lse_head",
        "stride_prefix_lse_head",
    ]
)
def _tree_attention_kernel(
    q_ptr,  # [T, Hq, D]
    key_cache_ptr,  # [blocks, BLOCK_SIZE, Hkv, D]
    value_cache_ptr,  # [blocks, BLOCK_SIZE, Hkv, D]
    out_ptr,  # [T, Hq, D], or with SPLIT float32 [splits, R * max_rows, Hq, D]
    lse_ptr,  # float32 [Hq, T] or [splits, Hq, R * max_rows]; unused unless STORE_LSE
    prefix_out_ptr,  # [T, Hq, D]; unused unless MERGE_PREFIX
    prefix_lse_ptr,  # float32 [Hq, T]; unused unless MERGE_PREFIX
    block_table_ptr,  # int32 [R, max_blocks]
    seq_lens_ptr,  # int32 [R]
    query_start_loc_ptr,  # int32 [R + 1]
    slots_ptr,  # int32 [R]; unused unless HAS_TREES
    ancestors_ptr,  # int32 [S, TREE_ROWS, W]; unused unless HAS_TREES
    log2_scale,  # softmax scale times log2(e)
    num_splits,
    max_rows,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_position,
    stride_k_head,
    stride_v_block,
    stride_v_position,
    stride_v_head,
    stride_out_split,
    stride_out_token,
    stride_out_head,
    stride_lse_split,
    stride_lse_head,
    stride_prefix_token,
    stride_prefix_head,
    stride_prefix_lse_head,
    stride_block_table,
    stride_tree_slot,
    stride_tree_row,
    GROUP: tl.constexpr,  # query heads per key head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TREE_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    HAS_TREES: tl.constexpr,
    TREES_ONLY: tl.constexpr,
    SUFFIX_ONLY: tl.constexpr,
    MERGE_PREFIX: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_TILES: tl.constexpr,  # fewest tiles of keys worth a split
    STORE_LSE: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SUFFIX: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    if SPLIT:
        request = tl.program_id(2) // num_splits
        split = tl.program_id(2) % num_splits
    else:
        request = tl.program_id(2)
        split = 0

    first_token = tl.load(query_start_loc_ptr + request)
    num_rows = tl.load(query_start_loc_ptr + request + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + request)
    first_row = tile * BLOCK_M // GROUP
    # Padded requests have no rows, or no sequence.
    if (first_row >= num_rows) | (seq_len < num_rows):
        return
    last_row = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, num_rows - 1)
    prefix = seq_len - num_rows

    if HAS_TREES:
        slot = tl.load(slots_ptr + request)
        is_tree = slot >= 0
        is_linear = slot < 0
        if TREES_ONLY:  # noqa: SIM102  (one is known when compiling, the other is not)
            if is_linear:
                return
        tree_ptr = ancestors_ptr + tl.maximum(slot, 0).to(tl.int64) * stride_tree_slot

    # Keys before `prefix` are seen by every row (a window aside), later ones by some. Rows come
    # parents first, so no row sees a later one.
    begin = 0
    end = seq_len
    if CAUSAL:
        end = prefix + last_row + 1
    if WINDOW > 0:
        begin = tl.maximum(prefix + first_row - WINDOW + 1, 0)
        if not CAUSAL:
            end = tl.minimum(end, prefix + last_row + WINDOW)
    first_column = tl.maximum(begin - prefix, 0) // BLOCK_SUFFIX * BLOCK_SUFFIX
    begin = begin // BLOCK_N * BLOCK_N
    whole_end = prefix // BLOCK_N * BLOCK_N
    tail_end = prefix

    # Each split takes a run of the prefix's whole tiles; the last one in use, all that remains.
    if SPLIT:
        tiles = tl.maximum(whole_end - begin, 0) // BLOCK_N
        most = tl.minimum(tl.maximum(tiles // MIN_TILES, 1), num_splits)
        per_split = tl.maximum((tiles + most - 1) // most, 1)
        last_split = tl.maximum((tiles + per_split - 1) // per_split, 1) - 1
        tail_end = tl.where(split == last_split, tail_end, 0)
        end = tl.where(split == last_split, end, prefix)
        begin += split * per_split * BLOCK_N
        whole_end = tl.minimum(begin + per_split * BLOCK_N, whole_end)

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = m // GROUP
    head = kv_head * GROUP + m % GROUP
    row_exists = (row < num_rows) & (row < max_rows)
    token = (first_token + row).to(tl.int64)
    d = tl.arange(0, HEAD_DIM)
    q = tl.load(
        (q_ptr + token * stride_q_token + head * stride_q_head)[:, None] + d[None, :],
        mask=row_exists[:, None],
        other=0.0,
    )
    if UPCAST:
        q = _widen_bfloat16(q)
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_block_table
    k_head_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_k_head
    v_head_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_v_head
    acc = tl.full([BLOCK_M, HEAD_DIM], 0.0, dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    own = (prefix + row)[:, None]

    if not SUFFIX_ONLY:
        n = tl.arange(0, BLOCK_N)
        for start in range(begin, whole_end, BLOCK_N):
            position = start + n
            visible = position[None, :] > own - WINDOW
            if not CAUSAL:
                visible = visible & (position[None, :] < own + WINDOW)
            acc, row_max, row_sum = _attend_tile(
                q,
                acc,
                row_max,
                row_sum,
                position,
                position,
                visible,
                log2_scale,
                table_ptr,
                k_head_ptr,
                v_head_ptr,
                stride_k_block,
                stride_k_position,
                stride_v_block,
                stride_v_position,
                HEAD_DIM,
                BLOCK_SIZE,
                False,
                WINDOW > 0,
                UPCAST,
            )
        # What is left of the prefix: less than a tile.
        for start in tl.range(
            tl.maximum(prefix // BLOCK_N * BLOCK_N, begin), tail_end, BLOCK_N, num_stages=1
        ):
            position = start + n
            exists = position < prefix
            visible = exists[None, :]
            if WINDOW > 0:
                visible = visible & (position[None, :] > own - WINDOW)
                if not CAUSAL:
                    visible = visible & (position[None, :] < own + WINDOW)
            acc, row_max, row_sum = _attend_tile(
                q,
                acc,
                row_max,
                row_sum,
                position,
                exists,
                visible,
                log2_scale,
                table_ptr,
                k_head_ptr,
                v_head_ptr,
                stride_k_block,
                stride_k_position,
                stride_v_block,
                stride_v_position,
                HEAD_DIM,
                BLOCK_SIZE,
                True,
                True,
                UPCAST,
            )

    n = tl.arange(0, BLOCK_SUFFIX)
    for start in tl.range(first_column, end - prefix, BLOCK_SUFFIX, num_stages=1):
        column = start + n
        position = prefix + column
        exists = position < end
        visible = exists[None, :]
        if CAUSAL:
            visible = visible & (column[None, :] <= row[:, None])
        if HAS_TREES:
            # The words of the mask that hold this tile's columns, each spread over its 32.
            words = tl.full([BLOCK_M, 1], 0, dtype=tl.int32)
            for w in tl.static_range((BLOCK_SUFFIX + 31) // 32):
                word = start // 32 + w
                word_of_row = tl.load(
                    tree_ptr + row * stride_tree_row + word,
                    mask=is_tree & (row < TREE_ROWS) & (word * 32 < TREE_ROWS),
                    other=0,
                )
                words = tl.where((n // 32 == w)[None, :], word_of_row[:, None], words)
            on_path = (words >> (column % 32)[None, :]) & 1
            visible = visible & ((on_path != 0) | is_linear)
        if WINDOW > 0:
            visible = visible & (position[None, :] > own - WINDOW)
            if not CAUSAL:
                visible = visible & (position[None, :] < own + WINDOW)
        acc, row_max, row_sum = _attend_tile(
            q,
            acc,
            row_max,
            row_sum,
            position,
            exists,
            visible,
            log2_scale,
            table_ptr,
            k_head_ptr,
            v_head_ptr,
            stride_k_block,
            stride_k_position,
            stride_v_block,
            stride_v_position,
            HEAD_DIM,
            BLOCK_SIZE,
            True,
            True,
            UPCAST,
        )

    seen = row_sum > 0
    row_sum = tl.where(seen, row_sum, 1.0)
    out = acc / row_sum[:, None]
    lse = tl.where(seen, (row_max + tl.log2(row_sum)) * _LN_2, float("-inf"))

    if MERGE_PREFIX:
        prefix_lse = tl.load(
            prefix_lse_ptr + head * stride_prefix_lse_head + token, mask=row_exists, other=0.0
        )
        # An empty prefix: kernels answer -inf, +inf or leave what was there.
        prefix_lse = tl.where((prefix > 0) & (prefix_lse < float("inf")), prefix_lse, float("-inf"))
        top = tl.maximum(prefix_lse, lse)
        top = tl.where(top == float("-inf"), 0.0, top)
        prefix_weight = tl.exp2((prefix_lse - top) * _LOG2_E)
        suffix_weight = tl.exp2((lse - top) * _LOG2_E)
        total = prefix_weight + suffix_weight
        prefix_out = tl.load(
            (prefix_out_ptr + token * stride_prefix_token + head * stride_prefix_head)[:, None]
            + d[None, :],
            mask=(row_exists & (prefix_weight > 0))[:, None],
            other=0.0,
        )
        if UPCAST:
            prefix_out = _widen_bfloat16(prefix_out)
        prefix_out = prefix_out.to(tl.float32)
        out = (out * suffix_weight[:, None] + prefix_out * prefix_weight[:, None]) / tl.where(
            total > 0, total, 1.0
        )[:, None]
        lse = tl.where(total > 0, top + tl.log2(total) * _LN_2, float("-inf"))

    stores = row_exists
    out_row = token
    if SPLIT:
        stores = stores & seen
        out_row = request.to(tl.int64) * max_rows + row
        out_ptr += split.to(tl.int64) * stride_out_split
        lse_ptr += split.to(tl.int64) * stride_lse_split
    elif UPCAST:
        out = _round_to_bfloat16(out)
    tl.store(
        (out_ptr + out_row * stride_out_token + head * stride_out_head)[:, None] + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=stores[:, None],
    )
    if STORE_LSE:
        tl.store(lse_ptr + head * stride_lse_head + out_row, lse, mask=row_exists)


@triton.jit(do_not_specialize=["num_splits", "max_rows", "stride_lse_split", "stride_lse_head"])
def _merge_splits_kernel(
    parts_ptr,  # float32 [splits, R * max_rows, Hq, D]
    parts_lse_ptr,  # float32 [splits, Hq, R * max_rows]
    out_ptr,  # [T, Hq, D]
    seq_lens_ptr,  # int32 [R]
    query_start_loc_ptr,  # int32 [R + 1]
    slots_ptr,  # int32 [R]; unused unless TREES_ONLY
    num_splits,
    max_rows,
    stride_part_split,
    stride_part_row,
    stride_part_head,
    stride_lse_split,
    stride_lse_head,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TREES_ONLY: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    first_token = tl.load(query_start_loc_ptr + request)
    num_rows = tl.load(query_start_loc_ptr + request + 1) - first_token
    if (row >= num_rows) | (tl.load(seq_lens_ptr + request) < num_rows):
        return
    if TREES_ONLY:  # noqa: SIM102
        if tl.load(slots_ptr + request) < 0:
            return
    token = (first_token + row).to(tl.int64)
    part_row = request.to(tl.int64) * max_rows + row
    g = tl.arange(0, BLOCK_G)
    in_group = g < GROUP
    head = kv_head * GROUP + g
    s = tl.arange(0, BLOCK_SPLITS)
    lse = tl.load(
        parts_lse_ptr
        + s.to(tl.int64)[:, None] * stride_lse_split
        + head[None, :] * stride_lse_head
        + part_row,
        mask=(s < num_splits)[:, None] & in_group[None, :],
        other=float("-inf"),
    )
    top = tl.max(lse, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((lse - top[None, :]) * _LOG2_E), axis=0)

    d = tl.arange(0, HEAD_DIM)
    out = tl.full([BLOCK_G, HEAD_DIM], 0.0, dtype=tl.float32)
    part_ptrs = (
        parts_ptr + part_row * stride_part_row + (head * stride_part_head)[:, None] + d[None, :]
    )
    for split in range(num_splits):
        part_lse = tl.load(
            parts_lse_ptr
            + tl.cast(split, tl.int64) * stride_lse_split
            + head * stride_lse_head
            + part_row,
            mask=in_group,
            other=float("-inf"),
        )
        weight = tl.exp2((part_lse - top) * _LOG2_E)
        part = tl.load(
            part_ptrs + tl.cast(split, tl.int64) * stride_part_split,
            mask=(weight > 0)[:, None],
            other=0.0,
        )
        out += part * weight[:, None]
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    if UPCAST:
        out = _round_to_bfloat16(out)
    tl.store(
        out_ptr + token * stride_out_token + (head * stride_out_head)[:, None] + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=in_group[:, None],
    )


def tree_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    ancestors: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    causal: bool = True,
    window: int = 0,
    trees_only: bool = False,
    num_splits: int | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Attention of this step's rows over their whole sequences.

    The rows of request r are tokens query_start_loc[r] to query_start_loc[r + 1] - 1; their n keys
    and values are in the cache, at positions seq_lens[r] - n to seq_lens[r] - 1. A request without
    rows, or with fewer positions than rows, is padding: nothing is written for it.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16; last dimension contiguous.
        key_cache, value_cache: [num_blocks, block_size, Hkv, D] views, q's dtype, any strides but
            the last, which is 1; any block size. Hkv divides Hq.
        out: [T, Hq, D], q's dtype, last dimension contiguous. Written for existing rows only.
        block_table: int32 [>= R, max_blocks].
        seq_lens: int32 [R], positions with this step's rows.
        query_start_loc: int32 [R + 1].
        max_query_len: host-known upper bound of a request's rows.
        max_seq_len: host-known upper bound of seq_lens.
        scale: of the scores, > 0.
        ancestors: int32 [S, N + 1, W], or None where no request is a tree: by tree slot and local
            row, bit j % 32 of word j // 32 set iff row j is an ancestor of the row or the row.
        slots: int32 [R], index into `ancestors`; -1 for a linear request.
        causal: False lets every row see every position of its sequence (no trees then).
        window: w > 0 limits linear rows to the w positions up to their own, and if not causal to
            the w - 1 after it too, as vLLM's FlashAttention backend does (no trees then).
        trees_only: nothing is read or written for linear requests (another kernel serves them).
            max_query_len and max_seq_len then bound tree requests only.
        num_splits: programs that share the keys of a tile of rows; None: chosen by size.
        tiles: tile sizes; None: chosen by size.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or options that do not go together.
    """
    group = _check(q, key_cache, value_cache, out, block_table, seq_lens, query_start_loc, scale)
    _check_tree(ancestors, slots, seq_lens, trees_only)
    if ancestors is not None and (window or not causal):
        raise ValueError("Tree requests are causal and have no sliding window.")
    if window < 0:
        raise ValueError(f"window must be 0 (none) or positive, not {window}.")
    num_requests = query_start_loc.shape[0] - 1
    if num_requests == 0 or max_query_len == 0:
        return out
    num_kv_heads, head_dim = key_cache.shape[2:]
    tiles = tiles or choose_tiles(max_query_len, group, head_dim, q.dtype, max_seq_len)
    row_tiles = triton.cdiv(max_query_len * group, tiles.block_m)
    if num_splits is None:
        programs = row_tiles * num_kv_heads * num_requests
        num_splits = choose_num_splits(programs, max_seq_len, q.device)
    split = num_splits > 1
    if split:
        # By request and row, not by token: a prompt in the batch must not size the parts.
        rows, num_heads = num_requests * max_query_len, q.shape[1]
        target = q.new_empty((num_splits, rows, num_heads, head_dim), dtype=torch.float32)
        lse = q.new_empty((num_splits, num_heads, rows), dtype=torch.float32)
        target_strides, lse_strides = target.stride()[:3], lse.stride()[:2]
    else:
        target, lse = out, None
        target_strides, lse_strides = (0, *out.stride()[:2]), (0, 0)

    _launch(
        (row_tiles, num_kv_heads, num_requests * num_splits),
        tiles,
        q,
        key_cache,
        value_cache,
        target,
        lse,
        None,
        None,
        block_table,
        seq_lens,
        query_start_loc,
        slots,
        ancestors,
        scale,
        num_splits,
        max_query_len,
        target_strides,
        lse_strides,
        group=group,
        causal=causal,
        window=window,
        trees_only=trees_only,
        suffix_only=False,
    )
    if split:
        _merge_splits_kernel[(max_query_len, num_kv_heads, num_requests)](
            target,
            lse,
            out,
            seq_lens,
            query_start_loc,
            slots if trees_only else seq_lens,
            num_splits,
            max_query_len,
            *target_strides,
            *lse_strides,
            *out.stride()[:2],
            GROUP=group,
            HEAD_DIM=head_dim,
            TREES_ONLY=trees_only,
            UPCAST=_upcast(q),
            BLOCK_SPLITS=max(MAX_SPLITS, triton.next_power_of_2(num_splits)),
            BLOCK_G=triton.next_power_of_2(group),
        )
    return out


def tree_suffix_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    scale: float,
    ancestors: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    prefix_out: torch.Tensor | None = None,
    prefix_lse: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    trees_only: bool = False,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Attention of this step's rows among themselves, merged with that over their prefixes.

    With `prefix_out` and `prefix_lse`, `out` is the attention over the whole sequence; without,
    over the suffix alone, and `lse` is what a later merge needs. Arguments not listed are those of
    `tree_attention`; trees and causal linear requests only.

    Args:
        prefix_out: [T, Hq, D], q's dtype: attention over positions < seq_len - n without a mask, as
            FlashAttention gives it. May be `out` itself. Not read where the prefix is empty.
        prefix_lse: float32 [Hq, T], its log-sum-exp, natural log.
        lse: float32 [Hq, T] to receive the log-sum-exp of what `out` attends, or None.

    Returns:
        `out`.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    group = _check(q, key_cache, value_cache, out, block_table, seq_lens, query_start_loc, scale)
    _check_tree(ancestors, slots, seq_lens, trees_only)
    if (prefix_out is None) != (prefix_lse is None):
        raise ValueError("prefix_out and prefix_lse go together.")
    if prefix_out is not None and (
        prefix_out.shape != q.shape or prefix_out.dtype != q.dtype or prefix_out.stride(-1) != 1
    ):
        raise ValueError(f"prefix_out must be {tuple(q.shape)} of {q.dtype}, rows contiguous.")
    for name, tensor in (("prefix_lse", prefix_lse), ("lse", lse)):
        if tensor is not None and (
            tensor.shape != (q.shape[1], q.shape[0])
            or tensor.dtype != torch.float32
            or tensor.stride(1) != 1
        ):
            raise ValueError(f"{name} must be float32 [{q.shape[1]}, {q.shape[0]}].")
    num_requests = query_start_loc.shape[0] - 1
    if num_requests == 0 or max_query_len == 0:
        return out
    num_kv_heads, head_dim = key_cache.shape[2:]
    if tiles is None:
        tiles = choose_suffix_tiles(max_query_len, group, head_dim, q.dtype)
    _launch(
        (triton.cdiv(max_query_len * group, tiles.block_m), num_kv_heads, num_requests),
        tiles,
        q,
        key_cache,
        value_cache,
        out,
        lse,
        prefix_out,
        prefix_lse,
        block_table,
        seq_lens,
        query_start_loc,
        slots,
        ancestors,
        scale,
        1,
        max_query_len,
        (0, *out.stride()[:2]),
        (0, 0 if lse is None else lse.stride(0)),
        group=group,
        causal=True,
        window=0,
        trees_only=trees_only,
        suffix_only=True,
    )
    return out


def _launch(
    grid,
    tiles,
    q,
    key_cache,
    value_cache,
    out,
    lse,
    prefix_out,
    prefix_lse,
    block_table,
    seq_lens,
    query_start_loc,
    slots,
    ancestors,
    scale,
    num_splits,
    max_rows,
    out_strides,
    lse_strides,
    *,
    group,
    causal,
    window,
    trees_only,
    suffix_only,
):
    merge = prefix_out is not None
    trees = ancestors is not None
    _tree_attention_kernel[grid](
        q,
        key_cache,
        value_cache,
        out,
        # Absent tensors still need an address; the kernel does not read it.
        seq_lens if lse is None else lse,
        prefix_out if merge else q,
        prefix_lse if merge else seq_lens,
        block_table,
        seq_lens,
        query_start_loc,
        slots if trees else seq_lens,
        ancestors if trees else seq_lens,
        scale * _LOG2_E.value,
        num_splits,
        max_rows,
        *q.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *out_strides,
        *lse_strides,
        *(prefix_out.stride()[:2] if merge else (0, 0)),
        prefix_lse.stride(0) if merge else 0,
        block_table.stride(0),
        *(ancestors.stride()[:2] if trees else (0, 0)),
        GROUP=group,
        HEAD_DIM=q.shape[2],
        BLOCK_SIZE=key_cache.shape[1],
        TREE_ROWS=ancestors.shape[1] if trees else 0,
        CAUSAL=causal,
        WINDOW=window,
        HAS_TREES=trees,
        TREES_ONLY=trees_only,
        SUFFIX_ONLY=suffix_only,
        MERGE_PREFIX=merge,
        SPLIT=num_splits > 1,
        MIN_TILES=min_tiles_per_split(tiles),
        STORE_LSE=lse is not None,
        UPCAST=_upcast(q),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_SUFFIX=tiles.block_suffix,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _upcast(q: torch.Tensor) -> bool:
    return interpreting() and q.dtype == torch.bfloat16


def _check(q, key_cache, value_cache, out, block_table, seq_lens, query_start_loc, scale) -> int:
    """Refuses what the kernel would misread; returns query heads per key head."""
    if q.dim() != 3 or out.shape != q.shape:
        raise ValueError(f"q and out must be [T, Hq, D]: {tuple(q.shape)}, {tuple(out.shape)}.")
    if key_cache.dim() != 4 or value_cache.shape != key_cache.shape:
        raise ValueError(
            "key_cache and value_cache must be [num_blocks, block_size, Hkv, D]: "
            f"{tuple(key_cache.shape)}, {tuple(value_cache.shape)}."
        )
    head_dim = q.shape[2]
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head_dim must be 16, 32, 64, 128 or 256, not {head_dim}.")
    if key_cache.shape[3] != head_dim or q.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"Queries of {q.shape[1]} heads of {head_dim} do not fit a cache of "
            f"{key_cache.shape[2]} heads of {key_cache.shape[3]}."
        )
    if q.dtype not in _DTYPES or {key_cache.dtype, value_cache.dtype, out.dtype} != {q.dtype}:
        raise ValueError(
            "q, out and the caches must share one dtype of float32, bfloat16, float16: "
            f"{q.dtype}, {out.dtype}, {key_cache.dtype}, {value_cache.dtype}."
        )
    if any(t.stride(-1) != 1 for t in (q, out, key_cache, value_cache, block_table)):
        raise ValueError("The last dimension of every tensor must be contiguous.")
    if seq_lens.shape[0] != query_start_loc.shape[0] - 1 or block_table.shape[0] < len(seq_lens):
        raise ValueError("block_table, seq_lens and query_start_loc differ in requests.")
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be positive, not {scale}.")
    return q.shape[1] // key_cache.shape[2]


def _check_tree(ancestors, slots, seq_lens, trees_only) -> None:
    if (ancestors is None) != (slots is None):
        raise ValueError("ancestors and slots go together.")
    if ancestors is None:
        if trees_only:
            raise ValueError("trees_only needs ancestors and slots.")
        return
    if ancestors.dtype != torch.int32 or ancestors.dim() != 3 or ancestors.stride(-1) != 1:
        raise ValueError("ancestors must be int32 [S, rows, words].")
    if ancestors.shape[2] * 32 < ancestors.shape[1]:
        raise ValueError(
            f"{ancestors.shape[2]} words of 32 bits are too few for {ancestors.shape[1]} rows."
        )
    if slots.shape[0] < seq_lens.shape[0]:
        raise ValueError("slots must have an entry for every request.")
