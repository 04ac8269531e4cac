# SPDX-License-Identifier: Apache-2.0
"""Builds the draft trees of a batch on the device, without the host looking on.

Best-first search (reference.py) needs a heap whose ties break on rank tuples of up to 127 numbers.
Neither is kept here. The frontier sits in registers, one lane per entry, and a pop is a maximum
over the lanes. For the ties each entry carries its place in the lexicographic order of the
frontier, and that place is cheap to maintain: a popped node t is replaced by its first child t+(0,)
and its next sibling. Nothing in the frontier lies between those two, as that would be another
descendant of t and t was popped only now. So both take t's place, child first, and every entry
after it moves up by one.

An entry's place, its parent's row, its depth and its rank share one int32 (layout below), so one
integer minimum over the best-scored lanes both breaks the tie and says which node it was.

Scores are sums in float64 in path order, hence bit-equal to the reference's.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ddtree_vllm.tree._interpreter import requests_per_program, require_runnable

# isort: split
import triton
import triton.language as tl

from ddtree_vllm.tree.draft_tree import DraftTree
from ddtree_vllm.tree.nodes import TreeNodes
from ddtree_vllm.tree.policies import BestFirst, TreePolicy, check_budget, make_policy

# A frontier entry, from bit 21: its place; from 14: its parent's row; from 7: depth - 1; from 0:
# rank. A budget of 127 bounds the last three by 127 and the place by 128.


@triton.jit(do_not_specialize=["num_requests"])
def _best_first_kernel(
    log_probs_ptr,  # [R, L, K]
    log_probs_stride_r,
    log_probs_stride_d,
    top_tokens_ptr,  # [R, L, K]
    top_tokens_stride_r,
    top_tokens_stride_d,
    slots_ptr,  # [R]
    spine_only_ptr,  # [S] or None
    tokens_ptr,  # the fields of DraftTree, from here ...
    parents_ptr,
    depths_ptr,
    ranks_ptr,
    ancestors_ptr,
    num_nodes_ptr,  # ... to here
    out_tokens_ptr,  # [R, N] or None
    out_tokens_stride,
    num_requests,
    L,
    K,
    N: tl.constexpr,
    W: tl.constexpr,
    CLOSURE_STEPS: tl.constexpr,
    ALWAYS_SPINE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,  # >= N + 1: lanes of the frontier, and rows of the tree
):
    request = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    slot = tl.load(slots_ptr + request, mask=request < num_requests, other=-1).to(tl.int64)
    live = slot >= 0
    branches = live
    if spine_only_ptr is not None:
        branches = live & (tl.load(spine_only_ptr + slot, mask=live, other=0) == 0)
    lanes = tl.zeros([BLOCK_R, BLOCK], tl.int32) + tl.arange(0, BLOCK)[None, :]
    row_of_depth_1 = log_probs_ptr + request.to(tl.int64) * log_probs_stride_r
    row_of_depth_0 = row_of_depth_1 - log_probs_stride_d  # never read: where offsets start

    # Lane 0 starts with the root's best child. A score of -inf is never popped, and once the best
    # is -inf it stays so: what the other registers hold by then does not matter.
    first = tl.load(row_of_depth_1, mask=live, other=-float("inf")).to(tl.float64)
    score = tl.where(lanes == 0, first, -float("inf"))
    parent_score = tl.zeros([BLOCK_R, BLOCK], tl.float64)
    entry = tl.where(lanes == 0, 0, -1)
    # The tree, by row: the entry popped for it; -1 where there is none.
    popped_entry = tl.full([BLOCK_R, BLOCK], -1, tl.int32)

    for row in range(1, N + 1):
        best = tl.max(score, axis=1, keep_dims=True)
        if ALWAYS_SPINE:
            # With row - 1 nodes popped, only the spine can have an entry as deep as `row`.
            on_spine = ((entry >> 7) & 127) == row - 1
            spine = tl.max(tl.where(on_spine, score, -float("inf")), axis=1, keep_dims=True)
            best = tl.where(spine > -float("inf"), spine, best)
        chosen = tl.min(tl.where(score == best, entry, 0x1FFFFFFF), axis=1, keep_dims=True)
        exists = best > -float("inf")
        new = lanes == row
        popped_entry = tl.where(new, tl.where(exists, chosen, -1), popped_entry)

        below = chosen + ((1 << 7) + 1)
        depth = (below >> 7) & 127  # the popped node's; from 0, the child's
        next_rank = below & 127
        offset = depth * log_probs_stride_d
        child_at = row_of_depth_1 + offset
        child = tl.load(child_at, mask=exists & (depth < L), other=-float("inf"))
        sibling_at = row_of_depth_0 + offset + next_rank
        has_sibling = exists & branches & (next_rank < K)
        sibling = tl.load(sibling_at, mask=has_sibling, other=-float("inf"))

        # The sibling replaces the popped entry, one place on; entries of later places move up; the
        # child takes the popped entry's place and a new lane.
        popped = entry == chosen
        score = tl.where(popped, parent_score + sibling.to(tl.float64), score)
        score = tl.where(new, best + child.to(tl.float64), score)
        parent_score = tl.where(new, best, parent_score)
        later = entry > (chosen | 0x1FFFFF)  # compares the places
        entry += tl.where(popped, (1 << 21) + 1, tl.where(later, 1 << 21, 0))
        # Of `below` the child keeps place and depth; its parent is `row`, its rank 0.
        entry = tl.where(new, (below & 0x1FE03F80) | (row << 14), entry)

    is_node = popped_entry >= 0
    _write_tree(
        request,
        slot,
        is_node | (lanes == 0),
        tl.where(is_node, (popped_entry >> 14) & 127, lanes),
        tl.where(is_node, ((popped_entry >> 7) & 127) + 1, 0),
        popped_entry & 127,
        top_tokens_ptr,
        top_tokens_stride_r,
        top_tokens_stride_d,
        tokens_ptr,
        parents_ptr,
        depths_ptr,
        ranks_ptr,
        ancestors_ptr,
        num_nodes_ptr,
        out_tokens_ptr,
        out_tokens_stride,
        N,
        W,
        CLOSURE_STEPS,
        BLOCK_R,
        BLOCK,
    )


@triton.jit(do_not_specialize=["num_requests"])
def _fixed_shape_kernel(
    shape_parents_ptr,  # [n], local rows
    shape_depths_ptr,  # [n]
    shape_ranks_ptr,  # [n]
    shape_len,
    log_probs_ptr,  # from here on as in _best_first_kernel
    log_probs_stride_r,
    log_probs_stride_d,
    top_tokens_ptr,
    top_tokens_stride_r,
    top_tokens_stride_d,
    slots_ptr,
    spine_only_ptr,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    ranks_ptr,
    ancestors_ptr,
    num_nodes_ptr,
    out_tokens_ptr,
    out_tokens_stride,
    num_requests,
    N: tl.constexpr,
    W: tl.constexpr,
    CLOSURE_STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    slot = tl.load(slots_ptr + request, mask=request < num_requests, other=-1).to(tl.int64)
    branches = slot >= 0
    if spine_only_ptr is not None:
        branches = branches & (tl.load(spine_only_ptr + slot, mask=branches, other=0) == 0)
    lanes = tl.zeros([BLOCK_R, BLOCK], tl.int32) + tl.arange(0, BLOCK)[None, :]
    in_shape = (lanes > 0) & (lanes <= shape_len)
    parent = tl.load(shape_parents_ptr + lanes - 1, mask=in_shape, other=0)
    parent = tl.where(in_shape, parent, lanes)
    depth = tl.load(shape_depths_ptr + lanes - 1, mask=in_shape, other=0)
    rank = tl.load(shape_ranks_ptr + lanes - 1, mask=in_shape, other=-1)

    at = request.to(tl.int64) * log_probs_stride_r + (depth - 1) * log_probs_stride_d + rank
    log_prob = tl.load(log_probs_ptr + at, mask=in_shape & (slot >= 0), other=-float("inf"))
    # A node exists if its token and those of all its ancestors are possible (see _write_tree).
    possible = (log_prob > -float("inf")) & (branches | (rank <= 0))
    present = (possible | (lanes == 0)).to(tl.int32)
    link = parent
    for _ in tl.static_range(CLOSURE_STEPS):
        present = present & tl.gather(present, link, axis=1)
        link = tl.gather(link, link, axis=1)

    _write_tree(
        request,
        slot,
        present != 0,
        parent,
        depth,
        rank,
        top_tokens_ptr,
        top_tokens_stride_r,
        top_tokens_stride_d,
        tokens_ptr,
        parents_ptr,
        depths_ptr,
        ranks_ptr,
        ancestors_ptr,
        num_nodes_ptr,
        out_tokens_ptr,
        out_tokens_stride,
        N,
        W,
        CLOSURE_STEPS,
        BLOCK_R,
        BLOCK,
    )


@triton.jit
def _write_tree(
    request,  # [BLOCK_R, 1]
    slot,  # int64 [BLOCK_R, 1]; -1: write nothing
    present,  # [BLOCK_R, BLOCK]: this lane holds the root (lane 0) or a node
    parent,  # [BLOCK_R, BLOCK]: lane of the parent; the root and absent lanes point to themselves
    depth,  # [BLOCK_R, BLOCK]
    rank,  # [BLOCK_R, BLOCK]
    top_tokens_ptr,
    top_tokens_stride_r,
    top_tokens_stride_d,
    tokens_ptr,
    parents_ptr,
    depths_ptr,
    ranks_ptr,
    ancestors_ptr,
    num_nodes_ptr,
    out_tokens_ptr,
    out_tokens_stride,
    N: tl.constexpr,
    W: tl.constexpr,
    CLOSURE_STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a tree whose nodes lie in lanes, closing the gaps of absent nodes, then its padding.

    Ancestors come by pointer doubling: after s steps a row knows its 2^s nearest rows upwards,
    itself included, so CLOSURE_STEPS is the bit length of the greatest depth.
    """
    live = slot >= 0
    lanes = tl.zeros([BLOCK_R, BLOCK], tl.int32) + tl.arange(0, BLOCK)[None, :]
    row = tl.cumsum(present.to(tl.int32), axis=1) - 1
    last_row = tl.max(row, axis=1, keep_dims=True)
    tl.store(num_nodes_ptr + slot, last_row, mask=live)

    is_row = present & live
    is_node = is_row & (lanes > 0)
    row_at = slot * (N + 1) + row
    node_at = slot * N + row - 1
    parent_row = tl.where(lanes > 0, tl.gather(row, parent, axis=1), -1)
    tl.store(parents_ptr + row_at, parent_row, mask=is_row)
    tl.store(depths_ptr + row_at, depth, mask=is_row)
    tl.store(ranks_ptr + node_at, rank, mask=is_node)

    token_at = request.to(tl.int64) * top_tokens_stride_r + (depth - 1) * top_tokens_stride_d + rank
    token = tl.load(top_tokens_ptr + token_at, mask=is_node, other=0)
    tl.store(tokens_ptr + node_at, token, mask=is_node)
    if out_tokens_ptr is not None:
        out_at = out_tokens_ptr + request.to(tl.int64) * out_tokens_stride
        tl.store(out_at + row - 1, token, mask=is_node)

    pad = (lanes > last_row) & (lanes <= N) & live
    pad_row_at = slot * (N + 1) + lanes
    pad_node_at = slot * N + lanes - 1
    tl.store(parents_ptr + pad_row_at, tl.full([BLOCK_R, BLOCK], -1, tl.int32), mask=pad)
    tl.store(depths_ptr + pad_row_at, tl.zeros([BLOCK_R, BLOCK], tl.int32), mask=pad)
    tl.store(ranks_ptr + pad_node_at, tl.full([BLOCK_R, BLOCK], -1, tl.int32), mask=pad)
    no_token = tl.zeros([BLOCK_R, BLOCK], tl.int64)
    tl.store(tokens_ptr + pad_node_at, no_token, mask=pad)
    if out_tokens_ptr is not None:
        tl.store(out_at + lanes - 1, no_token, mask=pad)

    one = tl.full([BLOCK_R, BLOCK], 1, tl.int32)
    for w in tl.static_range(W):
        bits = tl.where((row >> 5) == w, one << (row & 31), 0)
        link = parent
        for _ in tl.static_range(CLOSURE_STEPS):
            bits = bits | tl.gather(bits, link, axis=1)
            link = tl.gather(link, link, axis=1)
        tl.store(ancestors_ptr + row_at * W + w, bits, mask=is_row)
        pad_bits = tl.where((lanes >> 5) == w, one << (lanes & 31), 0)
        tl.store(ancestors_ptr + pad_row_at * W + w, pad_bits, mask=pad)


def build_draft_trees(
    tree: DraftTree,
    top_log_probs: torch.Tensor,
    top_tokens: torch.Tensor,
    slots: torch.Tensor,
    policy: TreePolicy,
    *,
    spine_only: torch.Tensor | None = None,
    out_tokens: torch.Tensor | None = None,
) -> None:
    """Builds one tree per request and writes it to the request's slot. Never waits for the device.

    The inputs are taken at their word: rows sorted downwards, at most 0, no NaN (a NaN counts as a
    node that does not exist), tokens of a row distinct.

    Args:
        tree: written at `slots`, every field, padding included; other slots stay as they are.
        top_log_probs: float32 or float64 [R, L, k], best candidates of each draft position.
        top_tokens: int64 [R, L, k], their global token ids.
        slots: int32 [R], slot of each request; -1: a padded request, for which nothing is written.
        policy: from `make_policy`, for this L, this k and `tree.budget`.
        spine_only: integer [S], if given: nonzero where a slot's tree must be a chain, whatever the
            policy: of its nodes only those of rank 0, all the way down, are kept.
        out_tokens: integer [R, N], if given: a copy of the batch's draft tokens, padding 0.

    Raises:
        ValueError: shapes that do not belong together.
    """
    _launch(tree, top_log_probs, top_tokens, slots, policy, out_tokens, spine_only=spine_only)


def _launch(
    tree: DraftTree,
    top_log_probs: torch.Tensor,
    top_tokens: torch.Tensor,
    slots: torch.Tensor,
    policy: TreePolicy,
    out_tokens: torch.Tensor | None,
    block_r: int | None = None,
    spine_only: torch.Tensor | None = None,
) -> None:
    require_runnable(top_log_probs, "top_log_probs")
    if top_log_probs.ndim != 3 or top_tokens.shape != top_log_probs.shape:
        raise ValueError(
            "top_log_probs and top_tokens must both be [requests, depth, candidates], not "
            f"{list(top_log_probs.shape)} and {list(top_tokens.shape)}."
        )
    num_requests, depth, candidates = top_log_probs.shape
    budget = tree.budget
    if slots.shape != (num_requests,):
        raise ValueError(f"slots must be [{num_requests}], not {list(slots.shape)}.")
    if out_tokens is not None and out_tokens.shape != (num_requests, budget):
        raise ValueError(
            f"out_tokens must be [{num_requests}, {budget}], not {list(out_tokens.shape)}."
        )
    if top_log_probs.stride(2) != 1 or top_tokens.stride(2) != 1:
        raise ValueError("candidates of a position must lie next to each other in memory.")
    if isinstance(policy, BestFirst):
        max_depth = min(depth, budget)
    else:
        max_depth = policy.max_depth
        if policy.parents.shape[0] > budget or max_depth > depth or policy.max_rank >= candidates:
            raise ValueError(
                f"the fixed shape ({policy.parents.shape[0]} nodes, depth {max_depth}, ranks to "
                f"{policy.max_rank}) does not fit a budget of {budget} nodes, {depth} positions "
                f"and {candidates} candidates."
            )
    if max_depth > tree.max_depth:
        raise ValueError(
            f"the tree was allocated for nodes of depth {tree.max_depth} at most, "
            f"but this policy may draft {max_depth} deep."
        )
    if num_requests == 0:
        return

    # A rank at or past the budget is never reached: its budget-many elder siblings come first.
    candidates = min(candidates, budget)
    if block_r is None:
        block_r = requests_per_program(num_requests)
    grid = (triton.cdiv(num_requests, block_r),)
    shared: tuple[Any, ...] = (
        top_log_probs,
        top_log_probs.stride(0),
        top_log_probs.stride(1),
        top_tokens,
        top_tokens.stride(0),
        top_tokens.stride(1),
        slots,
        spine_only,
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.ranks,
        tree.ancestors,
        tree.num_nodes,
        out_tokens,
        out_tokens.stride(0) if out_tokens is not None else 0,
        num_requests,
    )
    tile = {
        "N": budget,
        "W": tree.num_words,
        "CLOSURE_STEPS": max_depth.bit_length(),
        "BLOCK_R": block_r,
        "BLOCK": triton.next_power_of_2(budget + 1),
        # One warp: the loop is a chain of reductions, and within a warp they need no barrier.
        "num_warps": 1,
    }
    if isinstance(policy, BestFirst):
        _best_first_kernel[grid](
            *shared, depth, candidates, ALWAYS_SPINE=policy.always_spine, **tile
        )
    else:
        _fixed_shape_kernel[grid](
            policy.parents,
            policy.depths,
            policy.ranks,
            policy.parents.shape[0],
            *shared,
            **tile,
        )


def build_draft_tree(
    log_probs: torch.Tensor | Sequence[Sequence[float]],
    budget: int,
    policy: str = "ddtree",
    *,
    static_tree: Iterable[Sequence[int]] | None = None,
    always_spine: bool = False,
) -> TreeNodes:
    """The tree for one request, through the engine's kernel, for tools and tests.

    A node's score is the sum of the log-probabilities on the way to it, added up in float64 from
    the root down. Policy `ddtree` takes the `budget` nodes of highest score; equal scores are
    ordered by rank tuple, a node before its descendants. That is also the order of the result, so
    `result.prefix(n)` is the tree of budget n, for every policy. A log-probability of -inf means
    that the node does not exist; there may be fewer nodes than the budget.

    Args:
        log_probs: float [depth, k], on CPU or GPU, at most 0, sorted downwards in each row: the
            candidates of each draft position.
        budget: most nodes, 1 to 127.
        policy: `ddtree`, `chain` (the top-1 spine) or `static` (the shape `static_tree`).
        static_tree: rank tuples, see `make_policy`; the first `budget` of them are used.
        always_spine: for `ddtree`: pop the top-1 spine before everything else.

    Returns:
        The nodes in pop order, on the device of `log_probs`.

    Raises:
        ValueError: input that is not as above, with a sentence that says what is wrong.
        RuntimeError: `log_probs` is on the CPU and Triton was imported without its interpreter.
    """
    budget = check_budget(budget)
    scores = _check_log_probs(log_probs)
    depth, candidates = scores.shape
    resolved = make_policy(
        policy,
        budget=budget,
        depth=depth,
        candidates=candidates,
        device=scores.device,
        static_tree=static_tree,
        always_spine=always_spine,
    )
    tree = DraftTree.allocate(1, budget, scores.device)
    no_tokens = torch.zeros(1, depth, candidates, dtype=torch.int64, device=scores.device)
    slots = torch.zeros(1, dtype=torch.int32, device=scores.device)
    build_draft_trees(tree, scores[None], no_tokens, slots, resolved)
    n = int(tree.num_nodes[0])
    return TreeNodes(
        parents=tree.parents[0, 1 : n + 1].long() - 1,
        depths=tree.depths[0, 1 : n + 1].long(),
        ranks=tree.ranks[0, :n].long(),
    )


def _check_log_probs(log_probs: torch.Tensor | Sequence[Sequence[float]]) -> torch.Tensor:
    """Returns float32 or float64 [depth, k], or raises ValueError saying what is wrong with it."""
    try:
        scores = torch.as_tensor(log_probs).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"log_probs must be a table of numbers [depth, k]: {error}.") from None
    if not scores.is_floating_point():
        raise ValueError(f"log_probs must be floating point, not {scores.dtype}.")
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(
            f"log_probs must be [depth, k] with at least one of each, not {list(scores.shape)}."
        )
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    scores = scores.contiguous()
    if scores.isnan().any():
        where = scores.isnan().nonzero()[0].tolist()
        raise ValueError(f"log_probs has NaN at {where}.")
    if (scores > 0).any():
        where = (scores > 0).nonzero()[0].tolist()
        raise ValueError(
            f"log_probs is {scores[tuple(where)].item():g} at {where}, but log-probabilities are "
            "at most 0; were logits given without log_softmax?"
        )
    rising = scores[:, 1:] > scores[:, :-1]
    if rising.any():
        row, rank = rising.nonzero()[0].tolist()
        raise ValueError(
            f"log_probs must be sorted downwards in each row, but row {row} rises from rank "
            f"{rank} to {rank + 1}."
        )
    return scores
