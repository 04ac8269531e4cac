# SPDX-License-Identifier: Apache-2.0
"""Every launch of the project's kernels that serving Qwen3.6-27B with its drafter makes on a GPU.

Through the launchers, on tensors of the `meta` device, which have shapes, types and no memory: so a
launcher chooses tiles as on a GPU, and nothing here repeats what it chooses. Runs in
`compile_for_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ddtree_vllm.attention.store_kv import store_kv
from ddtree_vllm.attention.tree_attention import tree_attention, tree_suffix_attention
from ddtree_vllm.cache.compact import KVCacheTable, compact_accepted_kv
from ddtree_vllm.cache.linearise import linearise_rows
from ddtree_vllm.engine.positions import to_depth_positions
from ddtree_vllm.engine.step import TreeStep
from ddtree_vllm.gdn import Stash, StateTable, commit_paths, tree_causal_conv, verify_tree
from ddtree_vllm.gdn.conv import causal_conv
from ddtree_vllm.gdn.recurrent import run_sequences
from ddtree_vllm.sampling.walk import WalkOutput, walk_trees
from ddtree_vllm.tree import DraftTree, build_draft_trees, make_policy, top_k_log_probs

DEVICE = torch.device("meta")
HIDDEN, VOCAB, TAPS = 5120, 248320, 5
QUERY_HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256
# Positions of a block of the cache: so many that its bytes are those of a recurrent state.
BLOCK_SIZE = 784
KEY_HEADS, VALUE_HEADS, RECURRENT_HEAD, WIDTH = 16, 48, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * RECURRENT_HEAD
STATE_GROUPS = 3
# The drafter's block of 16 gives 15 positions.
DEPTH, TOP_K = 15, 8
MAX_NUM_REQS = 64

Launch = Callable[[], object]
Named = Iterator[tuple[str, Launch]]


def launches(everything: bool) -> Named:
    """Launches by name: the costliest of each kernel, or one of every tile that a launcher chooses.

    The latter with the shares of tensor parallelism, and with the types and head sizes that the
    kernels' own tests use on a GPU.
    """
    for rows in (2, 4, 8, 16, 32, 64, 128) if everything else (64,):
        yield from attention(rows)
    if everything:
        for rows in (8, 16):
            yield from attention(rows, group=3)
        for head_dim in (64, 128):
            for rows in (2, 8, 64):
                yield from attention(rows, group=4, head_dim=head_dim)
        for head_dim in (128, 256):
            yield from attention(64, head_dim=head_dim, dtype=torch.float32)
    for rows in (2, 32, 64, 128) if everything else (128,):
        for requests in (1, 4, 16) if everything else (16,):
            yield from verification(rows, requests)
        if everything:
            yield from verification(rows, 1, dtype=torch.float32)
    yield from commit(keeps_boundaries=True)
    if everything:
        yield from commit(keeps_boundaries=False)
        yield from commit(keeps_boundaries=True, dtype=torch.float32)
    for rows in (4, 32, 128) if everything else (128,):
        yield from draft(rows, "ddtree")
        yield from draft(rows, "chain")
        if everything:
            yield from draft(rows, "static")
        yield from around_a_step(rows)
    for rows in (1, 16, 128) if everything else (1,):
        yield from linear_rows(rows)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def ints(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def a_tree(rows: int, slots: int = MAX_NUM_REQS) -> DraftTree:
    return DraftTree.allocate(slots, rows - 1, DEVICE, max_depth=min(DEPTH, rows - 1))


def attention(
    rows: int,
    *,
    requests: int = 4,
    group: int = QUERY_HEADS // KV_HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
) -> Named:
    """Trees beside FlashAttention's prefix; and trees beside prompts, whole and split."""
    heads = KV_HEADS * group
    cache = empty(64, KV_HEADS, BLOCK_SIZE, 2 * head_dim, dtype=dtype)
    keys, values = cache.transpose(1, 2).split(head_dim, dim=-1)
    q = empty(requests * rows, heads, head_dim, dtype=dtype)
    tree = a_tree(rows)
    common = {
        "block_table": ints(MAX_NUM_REQS, 336),
        "seq_lens": ints(requests),
        "query_start_loc": ints(requests + 1),
        "max_query_len": rows,
        "scale": head_dim**-0.5,
        "ancestors": tree.ancestors,
        "slots": ints(requests),
    }
    lse = empty(heads, requests * rows, dtype=torch.float32)
    shape = f"{rows} rows, groups of {group}, heads of {head_dim}, {dtype}"
    yield (
        f"suffix, {shape}",
        lambda: tree_suffix_attention(q, keys, values, q, prefix_out=q, prefix_lse=lse, **common),
    )
    for splits in (1, 2):
        yield (
            f"attention, {shape}, splits {splits}",
            lambda splits=splits: tree_attention(
                q,
                keys,
                values,
                torch.empty_like(q),
                max_seq_len=262144,
                trees_only=True,
                num_splits=splits,
                **common,
            ),
        )


def verification(rows: int, requests: int, dtype: torch.dtype = torch.bfloat16) -> Named:
    """A Gated DeltaNet layer over the rows of a step: convolution, factors, outputs."""
    total = rows * requests
    tree = a_tree(rows)
    step = TreeStep(tree, STATE_GROUPS, MAX_NUM_REQS, DEVICE)
    step.num_reqs, step.max_rows = requests, rows
    of_trees = step.tree_rows(0)
    stash = a_stash(rows, 2, dtype)
    x = empty(total, CHANNELS + VALUE_HEADS * RECURRENT_HEAD, dtype=dtype)[:, :CHANNELS]
    gates = empty(total, 2 * VALUE_HEADS, dtype=dtype)
    a_log, dt_bias = empty(VALUE_HEADS, dtype=torch.float32), empty(VALUE_HEADS)
    window, state = a_cache(dtype)
    out = empty(total, CHANNELS, dtype=dtype)

    def convolve() -> None:
        weight = empty(WIDTH, CHANNELS, dtype=dtype).t()
        tree_causal_conv(x, weight, None, window, of_trees, tree, out, stash, 0)

    def verify() -> None:
        outputs = empty(total, VALUE_HEADS, RECURRENT_HEAD, dtype=dtype)
        a, b = gates[:, VALUE_HEADS:], gates[:, :VALUE_HEADS]
        verify_tree(out, a, b, a_log, dt_bias, state, of_trees, tree, outputs, stash, 0)

    shape = f"{requests} x {rows} rows, {dtype}"
    yield f"convolution, {shape}", convolve
    yield f"verification, {shape}", verify


def a_stash(rows: int, layers: int, dtype: torch.dtype) -> Stash:
    return Stash.allocate(
        layers,
        MAX_NUM_REQS * rows,
        KEY_HEADS,
        VALUE_HEADS,
        RECURRENT_HEAD,
        RECURRENT_HEAD,
        dtype,
        DEVICE,
        max_reqs=MAX_NUM_REQS,
        max_num_rows=rows,
    )


def a_cache(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolution windows and states of a layer."""
    state = empty(64, VALUE_HEADS, RECURRENT_HEAD, RECURRENT_HEAD, dtype=torch.float32)
    return empty(64, WIDTH - 1, CHANNELS, dtype=dtype), state


def commit(*, keeps_boundaries: bool, dtype: torch.dtype = torch.bfloat16) -> Named:
    rows, requests = 64, 4
    caches = [a_cache(dtype) for _ in range(STATE_GROUPS)]
    path, numbers = ints(requests, rows), ints(requests)
    slots = ints(STATE_GROUPS, MAX_NUM_REQS)[:, :requests]

    def launch() -> None:
        commit_paths(
            StateTable.build(caches, list(range(STATE_GROUPS))),
            a_stash(rows, len(caches), dtype),
            path,
            numbers,
            numbers,
            slots,
            max_path=DEPTH + 1,
            conv_width=WIDTH,
            cut_len=numbers if keeps_boundaries else None,
            cut_slots=slots if keeps_boundaries else None,
            null_slot=0,
        )

    kept = "states kept" if keeps_boundaries else "in place"
    yield f"commit, {kept}, {dtype}", launch


def draft(rows: int, policy: str, requests: int = 4) -> Named:
    """Candidates of the drafter's logits, and the tree from them."""
    budget = rows - 1
    depth, top_k = min(DEPTH, budget), min(TOP_K, budget)
    tree = a_tree(rows)
    spine_only = ints(MAX_NUM_REQS)
    logits = empty(requests * depth, VOCAB)

    def launch() -> None:
        log_probs, tokens = top_k_log_probs(logits, top_k)
        made = make_policy(
            policy,
            budget=budget,
            depth=depth,
            candidates=top_k,
            device=DEVICE,
            static_tree=[[0], [0, 0], [1]] if policy == "static" else None,
        )
        build_draft_trees(
            tree,
            log_probs.view(requests, depth, top_k),
            tokens.view(requests, depth, top_k),
            ints(requests),
            made,
            spine_only=spine_only,
            out_tokens=empty(MAX_NUM_REQS, budget, dtype=torch.int64)[:requests],
        )

    yield f"draft of {rows} rows, {policy}", launch


def around_a_step(rows: int, requests: int = 4) -> Named:
    """Plan, positions, walk, and what makes the path an ordinary prefix."""
    tree = a_tree(rows)
    step = TreeStep(tree, STATE_GROUPS, MAX_NUM_REQS, DEVICE)
    starts = ints(requests + 1)
    longs = empty(requests, dtype=torch.int64)

    def plan() -> None:
        step.bind_block_tables([ints(MAX_NUM_REQS, 336)] * STATE_GROUPS, BLOCK_SIZE)
        step.plan(longs, starts, ints(requests), ints(requests), requests, requests, rows)
        step.plan_cuts(longs, ints(MAX_NUM_REQS))

    def positions() -> None:
        per_channel = empty(3, 8192, dtype=torch.int64)
        to_depth_positions(
            per_channel, tree.depths, step.slots, step.row_start, step.num_rows, requests
        )

    def walk() -> None:
        copied = empty(requests, rows + 1, dtype=torch.int64)
        output = WalkOutput(
            step.path[:requests],
            step.path_len[:requests],
            copied[:, :-1],
            ints(requests),
            copied[:, -1],
        )
        sampled = empty(requests * rows, dtype=torch.int64)
        invalid = empty(requests * rows, dtype=torch.bool)
        walk_trees(
            tree,
            ints(requests),
            starts,
            sampled,
            output,
            tree_rows=step.num_rows[:requests],
            invalid_drafts=invalid,
        )

    def compact() -> None:
        cache = empty(64, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
        keys_and_values = cache.transpose(1, 2).split(HEAD_DIM, dim=-1)
        slot_mapping = empty(requests * rows, dtype=torch.int64)
        caches = KVCacheTable.build([keys_and_values] * 2)
        compact_accepted_kv(caches, step.path, step.path_len[:requests], starts, slot_mapping)

    def linearise() -> None:
        hidden = [empty(requests * rows, HIDDEN) for _ in range(TAPS)]
        linearise_rows(hidden, step.path[:requests], step.path_len[:requests], starts)

    yield f"plan, {rows} rows", plan
    yield f"positions, {rows} rows", positions
    yield f"walk, {rows} rows", walk
    yield f"compaction, {rows} rows", compact
    yield f"linearisation, {rows} rows", linearise


def linear_rows(rows: int, requests: int = 4) -> Named:
    """Rows that are no tree. vLLM's kernels serve them on a GPU; ours are tested on one too."""
    window, state = a_cache(torch.bfloat16)
    sequences = (ints(requests), ints(requests + 1), empty(requests, dtype=torch.bool))
    x = empty(rows * requests, CHANNELS)

    def convolve() -> None:
        weight = empty(CHANNELS, WIDTH)
        causal_conv(x, weight, None, window, *sequences, torch.empty_like(x), rows)

    def run() -> None:
        gates = empty(rows * requests, VALUE_HEADS)
        a_log, dt_bias = empty(VALUE_HEADS, dtype=torch.float32), empty(VALUE_HEADS)
        out = empty(rows * requests, VALUE_HEADS, RECURRENT_HEAD)
        run_sequences(x, gates, gates, a_log, dt_bias, state, *sequences, out, KEY_HEADS, rows)

    def store() -> None:
        cache = empty(64, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
        views = cache.transpose(1, 2).split(HEAD_DIM, dim=-1)
        keys = empty(rows * requests, KV_HEADS, HEAD_DIM)
        store_kv(keys, keys, *views, empty(rows * requests, dtype=torch.int64))

    yield f"convolution of sequences, {rows} rows", convolve
    yield f"sequences, {rows} rows", run
    yield f"keys and values, {rows} rows", store
