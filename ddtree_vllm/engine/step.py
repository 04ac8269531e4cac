# SPDX-License-Identifier: Apache-2.0
"""What one step knows about its tree rows: which rows they are, where their state lives, which path won.

One ``TreeStep`` is allocated per engine and rewritten every step. Its tensors never move, so a
captured CUDA graph reads the current step through the same addresses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_vllm.gdn.rows import TreeRows
from ddtree_vllm.tree import DraftTree

NO_SLOT = -1
# vLLM keeps physical block 0 as the null block: it backs padding and freed entries, never a request.
NULL_BLOCK = 0


class TreeStep:
    """Per-request description of a step's tree rows, in batch order.

    Host-known: ``num_reqs`` (padded), ``max_rows`` (most rows of a tree request), ``only_trees`` (no
    request of the step is linear) and ``rows_per_request`` (of a step in which all have as many,
    padding too: those that a captured graph runs; else 0). On the device:

    Attributes (R = ``max_num_reqs``, N = ``budget``, G = number of recurrent KV-cache groups):
        slots: int32 ``[R]``, the request's slot in the ``DraftTree``; -1 where the request brings
            no tree rows (prefill, padding).
        row_start: int32 ``[R]``, first row of the request among the step's tokens.
        num_rows: int32 ``[R]``, root plus draft nodes; 0 where the request brings no tree rows. A
            tree that the stash has no room for is cut to fewer rows than the step has of it.
        stash_start: int32 ``[R]``, tree rows of the requests before it.
        prefix_lens: int32 ``[R]``, tokens before the request's tree rows; 0 where it brings none.
        state_slots: int32 ``[G, R]``, physical block of the request's committed recurrent state.
        path: int32 ``[R, N + 1]``, local rows of the accepted path, root first, then -1.
        path_len: int32 ``[R]``, rows to commit; 0 commits nothing.
        cut_len, cut_slots: int32 ``[R]`` and ``[G, R]``, rows of the path up to the block boundary
            it reaches and the block that keeps the state there; -1 where it reaches none.
    """

    def __init__(
        self, tree: DraftTree, num_state_groups: int, max_num_reqs: int, device: torch.device
    ) -> None:
        def full(*shape: int, value: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        budget = tree.budget
        self.tree = tree
        self.budget = budget
        self.num_reqs = 0
        self.only_trees = False
        self.max_rows = 1
        self.rows_per_request = 0
        self.slots = full(max_num_reqs, value=NO_SLOT)
        self.row_start = full(max_num_reqs, value=0)
        self.num_rows = full(max_num_reqs, value=0)
        self.stash_start = full(max_num_reqs, value=0)
        self.prefix_lens = full(max_num_reqs, value=0)
        self.state_slots = full(max(num_state_groups, 1), max_num_reqs, value=NO_SLOT)
        self.path = full(max_num_reqs, budget + 1, value=-1)
        self.path_len = full(max_num_reqs, value=0)
        self.cut_len = full(max_num_reqs, value=0)
        self.cut_slots = full(max(num_state_groups, 1), max_num_reqs, value=NO_SLOT)
        # Batch-ordered block tables of the recurrent groups, by address; set once they exist.
        self._block_tables = torch.zeros(max(num_state_groups, 1), dtype=torch.int64, device=device)
        self._block_table_stride = 0
        self._block_tables_kept: list[torch.Tensor] = []
        self.num_state_groups = num_state_groups
        self.state_block_size = 0

    def bind_block_tables(self, tables: list[torch.Tensor], block_size: int) -> None:
        """Remember the recurrent groups' block tables.

        Args:
            tables: per group int32 ``[R, max_blocks]``, rows in batch order, fixed addresses.
            block_size: tokens per recurrent block when states are kept at block boundaries
                (``mamba_cache_mode="align"``), 0 when a request keeps a single state block.

        Raises:
            ValueError: blocks so short that a path could cross two boundaries, of which one is kept.
        """
        if 0 < block_size <= self.tree.max_depth:
            raise ValueError(
                f"recurrent states are kept every {block_size} tokens, and a step can accept "
                f"{self.tree.max_depth + 1}: choose a larger --mamba-block-size, or "
                "--no-enable-prefix-caching"
            )
        self._block_tables_kept = tables
        self._block_table_stride = tables[0].stride(0)
        assert all(t.stride(0) == self._block_table_stride for t in tables)
        self._block_tables.copy_(torch.tensor([_signed(t.data_ptr()) for t in tables]))
        self.state_block_size = block_size

    def plan(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        tree_rows: torch.Tensor,
        num_reqs: int,
        num_reqs_padded: int,
        max_rows: int,
    ) -> None:
        """Describe a step. Every path starts as the root alone.

        Args:
            idx_mapping: int64 ``[num_reqs]``, request slot of each batch row.
            query_start_loc: int32 ``[num_reqs_padded + 1]``.
            seq_lens: int32 ``[num_reqs_padded]``, tokens including this step's rows.
            tree_rows: int32 ``[num_reqs]``, the most rows of the request's tree that count, its root
                among them; 0 where the rows are no tree.
            max_rows: the most rows any tree request of this step can have.
        """
        self.num_reqs = num_reqs_padded
        self.max_rows = max_rows
        if num_reqs_padded == 0:
            return
        _plan_kernel[(num_reqs_padded, max(self.num_state_groups, 1))](
            idx_mapping,
            query_start_loc,
            seq_lens,
            tree_rows,
            self._block_tables,
            self._block_table_stride,
            self.slots,
            self.row_start,
            self.num_rows,
            self.stash_start,
            self.prefix_lens,
            self.state_slots,
            self.state_slots.stride(0),
            self.path,
            self.path.stride(0),
            self.path_len,
            num_reqs,
            STATE_BLOCK=self.state_block_size,
            HAS_STATE=self.num_state_groups > 0,
            PATH_WIDTH=self.budget + 1,
            BLOCK_PATH=triton.next_power_of_2(self.budget + 1),
            BLOCK_REQS=triton.next_power_of_2(self.slots.shape[0]),
            num_warps=1,
        )

    def tree_rows(self, group: int) -> TreeRows:
        """The step's tree rows as the recurrent layers of one KV-cache group see them."""
        n = self.num_reqs
        return TreeRows(
            slots=self.slots[:n],
            state_slots=self.state_slots[group, :n],
            row_start=self.row_start[:n],
            num_rows=self.num_rows[:n],
            stash_start=self.stash_start[:n],
            max_num_rows=self.max_rows,
            null_slot=NULL_BLOCK,
        )

    def plan_cuts(self, idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor) -> None:
        """Find the block boundary each path reaches and the block that keeps the state there.

        Args:
            idx_mapping: int64 ``[num_reqs]``; a negative entry is skipped.
            num_computed_tokens: int32 ``[max_num_reqs]`` by request slot, after this step.
        """
        num_reqs = idx_mapping.shape[0]
        if num_reqs == 0 or not self.state_block_size:
            return
        _cut_kernel[(num_reqs, self.num_state_groups)](
            idx_mapping,
            num_computed_tokens,
            self.path_len,
            self._block_tables,
            self._block_table_stride,
            self.cut_len,
            self.cut_slots,
            self.cut_slots.stride(0),
            STATE_BLOCK=self.state_block_size,
            num_warps=1,
        )


def _signed(address: int) -> int:
    """A 64-bit address as the int64 that a tensor can hold."""
    return address - (1 << 64) if address >= 1 << 63 else address


# Not specialised, nor sized by the step: a batch of another size must not compile another kernel.
@triton.jit(do_not_specialize=["num_reqs"])
def _plan_kernel(
    idx_mapping_ptr,  # [num_reqs] int64
    query_start_loc_ptr,  # [num_reqs_padded + 1] int32
    seq_lens_ptr,  # [num_reqs_padded] int32
    tree_rows_ptr,  # [num_reqs] int32
    block_tables_ptr,  # [G] int64 addresses of int32 [R, max_blocks]
    block_table_stride,
    slots_ptr,
    row_start_ptr,
    num_rows_ptr,
    stash_start_ptr,
    prefix_lens_ptr,
    state_slots_ptr,  # [G, R]
    state_slots_stride,
    path_ptr,  # [R, PATH_WIDTH]
    path_stride,
    path_len_ptr,
    num_reqs,
    STATE_BLOCK: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PATH_WIDTH: tl.constexpr,
    BLOCK_PATH: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
):
    req = tl.program_id(0)
    group = tl.program_id(1)
    real = req < num_reqs
    most = tl.load(tree_rows_ptr + req, mask=real, other=0)
    is_tree = most > 0
    start = tl.load(query_start_loc_ptr + req)
    end = tl.load(query_start_loc_ptr + req + 1)

    seq_len = tl.load(seq_lens_ptr + req)
    if HAS_STATE:
        column = 0
        if STATE_BLOCK > 0:
            column = tl.maximum((seq_len - 1) // STATE_BLOCK, 0)
        table = tl.load(block_tables_ptr + group).to(tl.pointer_type(tl.int32))
        block = tl.load(table + req.to(tl.int64) * block_table_stride + column, mask=real, other=0)
        # Only rows that own a real block may touch recurrent state.
        owned = real & is_tree & (block > 0)
        tl.store(state_slots_ptr + group * state_slots_stride + req, tl.where(owned, block, -1))

    if group == 0:
        slot = tl.load(idx_mapping_ptr + req, mask=real, other=-1).to(tl.int32)
        tl.store(slots_ptr + req, tl.where(is_tree, slot, -1))
        tl.store(row_start_ptr + req, start)
        tl.store(num_rows_ptr + req, tl.minimum(end - start, most))
        prefix = tl.maximum(seq_len - (end - start), 0)
        tl.store(prefix_lens_ptr + req, tl.where(is_tree, prefix, 0))
        tl.store(path_len_ptr + req, tl.where(is_tree, 1, 0))
        others = tl.arange(0, BLOCK_REQS)
        before = (others < req) & (others < num_reqs)
        others_most = tl.load(tree_rows_ptr + others, mask=before, other=0)
        others_start = tl.load(query_start_loc_ptr + others, mask=before, other=0)
        others_end = tl.load(query_start_loc_ptr + others + 1, mask=before, other=0)
        others_rows = tl.minimum(others_end - others_start, others_most)
        tl.store(stash_start_ptr + req, tl.sum(others_rows, axis=0))
        offsets = tl.arange(0, BLOCK_PATH)
        root = tl.where((offsets == 0) & is_tree, 0, -1)
        tl.store(path_ptr + req * path_stride + offsets, root, mask=offsets < PATH_WIDTH)


@triton.jit
def _cut_kernel(
    idx_mapping_ptr,  # [num_reqs] int64
    num_computed_ptr,  # [max_num_reqs] int32, after the step
    path_len_ptr,  # [R] int32
    block_tables_ptr,  # [G] int64
    block_table_stride,
    cut_len_ptr,  # [R] int32
    cut_slots_ptr,  # [G, R] int32
    cut_slots_stride,
    STATE_BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    group = tl.program_id(1)
    slot = tl.load(idx_mapping_ptr + req)
    path_len = tl.load(path_len_ptr + req)
    live = (slot >= 0) & (path_len > 0)
    after = tl.load(num_computed_ptr + slot, mask=live, other=0)
    before = after - path_len
    boundary = (after // STATE_BLOCK) * STATE_BLOCK
    crosses = live & (boundary > before)
    column = boundary // STATE_BLOCK - 1
    table = tl.load(block_tables_ptr + group).to(tl.pointer_type(tl.int32))
    block = tl.load(table + req.to(tl.int64) * block_table_stride + column, mask=crosses, other=0)
    kept = crosses & (block > 0)
    tl.store(cut_slots_ptr + group * cut_slots_stride + req, tl.where(kept, block, -1))
    if group == 0:
        tl.store(cut_len_ptr + req, tl.where(crosses, boundary - before, 0))
