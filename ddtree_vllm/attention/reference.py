# SPDX-License-Identifier: Apache-2.0
"""Tree attention in float64 and plain PyTorch: what the kernels are tested against."""

from typing import Literal

import torch

Part = Literal["all", "prefix", "suffix"]


def visible_keys(
    num_rows: int,
    seq_len: int,
    *,
    ancestors: torch.Tensor | None = None,
    causal: bool = True,
    window: int = 0,
) -> torch.Tensor:
    """Which positions each row of one request attends.

    Args:
        num_rows: rows of the request in this step; they are its last `num_rows` positions.
        seq_len: positions of the request in the cache, this step's rows included.
        ancestors: int32 [>= num_rows, W] of a tree request: bit j % 32 of word j // 32 is set iff
            local row j is the row itself or one of its ancestors. None: a linear request.
        causal: a linear row sees no position after its own. Trees are always causal.
        window: 0, or the width w of a sliding window over linear positions: the row at p sees
            p - w < position, and position < p + w where attention is not causal.

    Returns:
        bool [num_rows, seq_len].
    """
    prefix = seq_len - num_rows
    row = torch.arange(num_rows).unsqueeze(1)
    position = torch.arange(seq_len).unsqueeze(0)
    if ancestors is not None:
        if window:
            raise ValueError("A sliding window is not defined over a tree.")
        column = torch.arange(num_rows)
        words = ancestors.cpu()[:num_rows][:, column // 32].long()
        on_path = ((words >> (column % 32)) & 1).bool()
        return torch.cat([torch.ones(num_rows, prefix, dtype=torch.bool), on_path], dim=1)
    own = prefix + row
    visible = position <= own if causal else torch.ones(num_rows, seq_len, dtype=torch.bool)
    if window:
        visible = visible & (position > own - window) & (position < own + window)
    return visible


def tree_attention_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    ancestors: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    causal: bool = True,
    window: int = 0,
    part: Part = "all",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a batch of trees and linear requests, in float64.

    Arguments are those of `ddtree_vllm.attention.tree_attention`.

    Args:
        part: the keys to attend: all, those before this step's rows, or this step's rows.

    Returns:
        out float64 [T, Hq, D] and log-sum-exp float64 [Hq, T] (natural log, -inf where a row sees
        nothing, its output 0). Rows of padded requests, and rows of no request, are NaN.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = torch.full((num_tokens, num_heads, head_dim), float("nan"), dtype=torch.float64)
    lse = torch.full((num_heads, num_tokens), float("nan"), dtype=torch.float64)
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        num_rows = last - first
        if num_rows == 0 or seq_len < num_rows:
            continue
        slot = -1 if slots is None else int(slots[request])
        tree = ancestors[slot] if ancestors is not None and slot >= 0 else None
        visible = visible_keys(num_rows, seq_len, ancestors=tree, causal=causal, window=window)
        prefix = seq_len - num_rows
        if part == "prefix":
            visible[:, prefix:] = False
        elif part == "suffix":
            visible[:, :prefix] = False

        position = torch.arange(seq_len)
        block = block_table[request].cpu()[position // block_size].long()
        keys = key_cache.cpu()[block, position % block_size].double()
        values = value_cache.cpu()[block, position % block_size].double()
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        rows = q[first:last].cpu().double()
        scores = torch.einsum("nhd,shd->hns", rows, keys) * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        row_lse = scores.logsumexp(dim=-1)
        weights = (scores - row_lse.unsqueeze(-1)).exp()
        # A row that sees nothing: -inf minus -inf.
        weights = weights.masked_fill(row_lse.isneginf().unsqueeze(-1), 0.0)
        out[first:last] = torch.einsum("hns,shd->nhd", weights, values)
        lse[:, first:last] = row_lse
    return out, lse


def merge_attention_reference(
    out_prefix: torch.Tensor,
    lse_prefix: torch.Tensor,
    out_suffix: torch.Tensor,
    lse_suffix: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each.

    Args:
        out_prefix, out_suffix: [T, Hq, D].
        lse_prefix, lse_suffix: [Hq, T], natural log; -inf where a set is empty.

    Returns:
        out float64 [T, Hq, D] and log-sum-exp float64 [Hq, T].
    """
    lse_prefix, lse_suffix = lse_prefix.double(), lse_suffix.double()
    lse = torch.logaddexp(lse_prefix, lse_suffix)
    weight_prefix = (lse_prefix - lse).exp().T.unsqueeze(-1)
    weight_suffix = (lse_suffix - lse).exp().T.unsqueeze(-1)
    out = torch.where(weight_prefix > 0, out_prefix.double() * weight_prefix, 0.0)
    out = out + torch.where(weight_suffix > 0, out_suffix.double() * weight_suffix, 0.0)
    return out, lse
