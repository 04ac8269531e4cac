# SPDX-License-Identifier: Apache-2.0
"""The walk: from the root, follow the child whose token is the one that the target sampled.

Every row of a tree has a token sampled from the target's distribution there. Starting at the root,
the walk goes to the child that carries the row's sampled token, and stops at the row where no child
does: the tokens sampled along the path are then exactly what decoding one by one would have given,
the last of them (the bonus token) not being in the tree.
"""

from dataclasses import dataclass

import torch

from ddtree_vllm.tree._interpreter import requests_per_program, require_runnable
from ddtree_vllm.tree.draft_tree import DraftTree

# isort: split
import triton
import triton.language as tl


@dataclass
class WalkOutput:
    """Accepted paths of a batch, in buffers allocated once.

    B is the largest (padded) batch, N the budget.

    Attributes:
        path: int32 [B, N+1], local rows of the accepted path in order, from the root (0); past the
            path -1.
        path_len: int32 [B], rows on the path, the root included; 0: nothing to commit (a padded
            request, or not a tree).
        sampled_tokens: int64 [B, N+1], the accepted tokens, then the bonus token; then -1.
            Rows may lie apart, as in a slice of a wider tensor.
        num_sampled: int32 [B], tokens of the above: `path_len` for a tree; 1 for a request that is
            not a tree and has a logits row; 0 for a padded request.
        tally: int64 [B] of any stride, or None: what `read_tally` counts.
    """

    path: torch.Tensor
    path_len: torch.Tensor
    sampled_tokens: torch.Tensor
    num_sampled: torch.Tensor
    tally: torch.Tensor | None = None

    @classmethod
    def allocate(cls, max_requests: int, budget: int, device: torch.device | str) -> "WalkOutput":
        """Allocates outputs for `max_requests` requests, with nothing to commit in them."""
        rows = budget + 1

        def filled(*shape: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            path=filled(max_requests, rows, value=-1),
            path_len=filled(max_requests, value=0),
            sampled_tokens=filled(max_requests, rows, value=-1, dtype=torch.int64),
            num_sampled=filled(max_requests, value=0),
        )


@triton.jit(do_not_specialize=["num_requests", "num_outputs"])
def _walk_kernel(
    tokens_ptr,  # int64 [S, N]
    parents_ptr,  # int32 [S, N+1]
    ranks_ptr,  # int32 [S, N]
    num_nodes_ptr,  # int32 [S]
    slots_ptr,  # [R]
    cu_num_logits_ptr,  # [R+1]
    sampled_ptr,  # [T]
    tree_rows_ptr,  # [R] or None
    invalid_ptr,  # [T] or None
    path_ptr,  # int32 [B, N+1]
    path_len_ptr,  # int32 [B]
    sampled_tokens_ptr,  # int64 [B, N+1]
    sampled_tokens_stride,
    num_sampled_ptr,  # int32 [B]
    tally_ptr,  # int64 [B] or None
    tally_stride,
    num_requests,
    num_outputs,
    N: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,  # >= N + 1
):
    request = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    in_batch = request < num_requests
    slot = tl.load(slots_ptr + request, mask=in_batch, other=-1).to(tl.int64)
    in_batch = in_batch & (slot >= 0)
    first = tl.load(cu_num_logits_ptr + request, mask=in_batch, other=0).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + request + 1, mask=in_batch, other=0).to(tl.int64)
    num_rows = (end - first).to(tl.int32)
    has_rows = num_rows > 0
    # Rows that were verified: a scheduler may have sent fewer than were drafted.
    if tree_rows_ptr is not None:
        tree_rows = tl.load(tree_rows_ptr + request, mask=in_batch, other=0).to(tl.int32)
        num_rows = tl.minimum(num_rows, tree_rows)
    is_tree = has_rows & (num_rows > 0)
    num_nodes = tl.load(num_nodes_ptr + slot, mask=is_tree, other=0)
    last_row = tl.minimum(num_nodes, num_rows - 1)
    lanes = tl.zeros([BLOCK_R, BLOCK], tl.int32) + tl.arange(0, BLOCK)[None, :]
    is_node = is_tree & (lanes > 0) & (lanes <= last_row)
    parent = tl.load(parents_ptr + slot * (N + 1) + lanes, mask=is_node, other=-1)
    token = tl.load(tokens_ptr + slot * N + lanes - 1, mask=is_node, other=-1)
    if invalid_ptr is not None:
        invalid = tl.load(invalid_ptr + first + lanes, mask=is_node, other=0) != 0
        parent = tl.where(invalid, -1, parent)
    sampled_at_parent = tl.load(
        sampled_ptr + first + parent, mask=is_node & (parent >= 0), other=-2
    )
    # A row is entered from its parent or not at all; where it would be, `enter_from` says.
    enter_from = tl.where(token == sampled_at_parent, parent, -1)

    path = tl.where((lanes == 0) & has_rows, 0, -1)
    here = tl.where(has_rows, 0, -2)
    for step in range(1, MAX_DEPTH + 1):
        # Siblings have distinct tokens; if they had not, the lowest row would win.
        following = tl.where(enter_from == here, lanes, BLOCK)
        here = tl.min(following, axis=1, keep_dims=True)
        path = tl.where((lanes == step) & (here < BLOCK), here, path)

    on_path = path >= 0
    length = tl.sum(on_path.to(tl.int32), axis=1, keep_dims=True)
    sampled = tl.load(sampled_ptr + first + path, mask=on_path, other=-1).to(tl.int64)
    is_output = request < num_outputs
    out_at = request.to(tl.int64) * (N + 1) + lanes
    tl.store(path_ptr + out_at, tl.where(is_tree, path, -1), mask=is_output & (lanes <= N))
    tokens_at = request.to(tl.int64) * sampled_tokens_stride + lanes
    tl.store(sampled_tokens_ptr + tokens_at, sampled, mask=is_output & (lanes <= N))
    tl.store(path_len_ptr + request, tl.where(is_tree, length, 0), mask=is_output)
    tl.store(num_sampled_ptr + request, length, mask=is_output)
    if tally_ptr is not None:
        # The path leaves the chain of first choices at its first node of another rank.
        rank = tl.load(ranks_ptr + slot * N + path - 1, mask=is_tree & (path > 0), other=0)
        left = tl.min(tl.where(rank != 0, lanes, BLOCK), axis=1, keep_dims=True)
        wins = tl.maximum(length - left, 0)
        tally = last_row.to(tl.int64) | ((length - 1).to(tl.int64) << 8) | (wins.to(tl.int64) << 16)
        tl.store(
            tally_ptr + request.to(tl.int64) * tally_stride,
            tl.where(is_tree & (last_row > 0), tally, 0),
            mask=is_output,
        )


def walk_trees(
    tree: DraftTree,
    slots: torch.Tensor,
    cu_num_logits: torch.Tensor,
    sampled: torch.Tensor,
    output: WalkOutput,
    *,
    tree_rows: torch.Tensor | None = None,
    invalid_drafts: torch.Tensor | None = None,
) -> None:
    """Walks the tree of every request of a batch. Never waits for the device.

    Request r has the logits rows cu_num_logits[r] .. cu_num_logits[r+1] - 1, one per local row of
    its tree. That may be fewer rows than the tree has: the tree is then cut to them. One row, no
    drafts: the path is the root alone.

    Args:
        tree: the trees that were verified.
        slots: int32 [R], slot of each request; -1: a padded request.
        cu_num_logits: int32 [R+1], first logits row of each request, and the end.
        sampled: integer [T], the target's sampled token at every logits row.
        output: written whole: rows past R get what a padded request gets.
        tree_rows: integer [R], how many of a request's logits rows are rows of its tree, from the
            first on: the tree is cut to them. 0 for a request whose rows are not a tree (a prefill
            chunk): it gets the token sampled at its first logits row, and no path. None: all are.
        invalid_drafts: bool [T], drafts that may not be accepted whatever was sampled: a grammar
            has ruled them out. None: all may.

    Raises:
        ValueError: shapes that do not belong together.
    """
    _launch(tree, slots, cu_num_logits, sampled, output, tree_rows, invalid_drafts)


def _launch(
    tree: DraftTree,
    slots: torch.Tensor,
    cu_num_logits: torch.Tensor,
    sampled: torch.Tensor,
    output: WalkOutput,
    tree_rows: torch.Tensor | None,
    invalid_drafts: torch.Tensor | None = None,
    block_r: int | None = None,
) -> None:
    require_runnable(sampled, "sampled")
    num_requests = slots.shape[0]
    num_outputs, rows = output.path.shape
    if cu_num_logits.shape != (num_requests + 1,):
        raise ValueError(
            f"cu_num_logits must be [{num_requests + 1}], not {list(cu_num_logits.shape)}."
        )
    if tree_rows is not None and tree_rows.shape != (num_requests,):
        raise ValueError(f"tree_rows must be [{num_requests}], not {list(tree_rows.shape)}.")
    if rows != tree.num_rows or num_outputs < num_requests:
        raise ValueError(
            f"output must have at least {num_requests} requests of {tree.num_rows} rows, "
            f"not {num_outputs} of {rows}."
        )
    if sampled.ndim != 1 or not sampled.is_contiguous():
        raise ValueError("sampled must be contiguous and one-dimensional.")
    if output.sampled_tokens.stride(-1) != 1:
        raise ValueError("the tokens of a request must lie side by side.")
    if num_outputs == 0:
        return
    if block_r is None:
        block_r = requests_per_program(num_outputs)
    _walk_kernel[(triton.cdiv(num_outputs, block_r),)](
        tree.tokens,
        tree.parents,
        tree.ranks,
        tree.num_nodes,
        slots,
        cu_num_logits,
        sampled,
        tree_rows,
        invalid_drafts,
        output.path,
        output.path_len,
        output.sampled_tokens,
        output.sampled_tokens.stride(0),
        output.num_sampled,
        output.tally,
        0 if output.tally is None else output.tally.stride(0),
        num_requests,
        num_outputs,
        N=tree.budget,
        MAX_DEPTH=tree.max_depth,
        BLOCK_R=block_r,
        BLOCK=triton.next_power_of_2(tree.num_rows),
        num_warps=1,
    )


@dataclass(frozen=True)
class Tally:
    """What one walk counted: verified nodes, those accepted, and those of them that only a branch had.

    `branch_wins` are the accepted nodes from the first one on that was not its parent's first choice:
    the drafter's chain alone would have ended there.
    """

    verified: int
    accepted: int
    branch_wins: int


def read_tally(value: int) -> Tally | None:
    """Reads an entry of `WalkOutput.tally`; None where no draft node was verified."""
    if value == 0:
        return None
    return Tally(value & 0xFF, (value >> 8) & 0xFF, (value >> 16) & 0xFF)


def walk_reference(parents: list[int], tokens: list[int], sampled: list[int]) -> list[int]:
    """The accepted path of one tree, in plain Python.

    Args:
        parents: by local row, the parent's local row; -1 for the root.
        tokens: token of each node: row i has tokens[i - 1].
        sampled: the target's token at each verified row; rows past its end do not exist.

    Returns:
        Local rows from the root down.
    """
    path = [0]
    while True:
        children = [
            row
            for row in range(1, len(sampled))
            if parents[row] == path[-1] and tokens[row - 1] == sampled[path[-1]]
        ]
        if not children:
            return path
        path.append(children[0])
