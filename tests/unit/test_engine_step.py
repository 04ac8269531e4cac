# SPDX-License-Identifier: Apache-2.0
"""The description of a step: which rows are trees, where state lives, which boundary a path reaches."""

import pytest
import torch

from ddtree_vllm.engine.positions import depth_positions_reference, to_depth_positions
from ddtree_vllm.engine.step import TreeStep
from ddtree_vllm.tree import DraftTree

BUDGET = 7
REQUESTS = 6


def make_step(device, groups: int = 2, block_size: int = 16):
    tree = DraftTree.allocate(8, BUDGET, device)
    step = TreeStep(tree, groups, REQUESTS, torch.device(device))
    # Block of group g, request r, column c: 100 g + 10 r + c + 1. Block 0 is the null block.
    tables = [
        torch.tensor(
            [[100 * g + 10 * r + c + 1 for c in range(4)] for r in range(REQUESTS)],
            dtype=torch.int32,
            device=device,
        )
        for g in range(groups)
    ]
    step.bind_block_tables(tables, block_size)
    return step, tables


def plan(
    step: TreeStep, device, rows, is_tree, seq_lens, idx_mapping, padded: int, room=99
) -> None:
    """``room``: the most rows of a tree that count."""
    starts = [0]
    for n in rows:
        starts.append(starts[-1] + n)
    starts += [starts[-1]] * (padded - len(rows))

    def on(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    step.plan(
        on(idx_mapping, torch.int64),
        on(starts),
        on(seq_lens + [0] * (padded - len(rows))),
        on([min(n, room) * t for n, t in zip(rows, is_tree, strict=True)]),
        len(rows),
        padded,
        max_rows=max([n for n, t in zip(rows, is_tree, strict=True) if t], default=0),
    )


@pytest.mark.parametrize("block_size", [0, 16])
def test_tree_rows_are_told_from_prefill_rows_and_padding(block_size, device) -> None:
    step, tables = make_step(device, block_size=block_size)
    plan(step, device, [8, 1, 20, 3], [1, 1, 0, 1], [40, 33, 20, 16], [5, 2, 7, 0], padded=6)
    assert step.slots[:6].tolist() == [5, 2, -1, 0, -1, -1]
    assert step.row_start[:4].tolist() == [0, 8, 9, 29]
    assert step.num_rows[:6].tolist() == [8, 1, 0, 3, 0, 0]
    assert step.prefix_lens[:6].tolist() == [32, 32, 0, 13, 0, 0]
    # The stash holds tree rows only, end to end.
    assert step.stash_start[[0, 1, 3]].tolist() == [0, 8, 9]
    assert step.path_len[:6].tolist() == [1, 1, 0, 1, 0, 0]
    assert step.path[:4, 0].tolist() == [0, 0, -1, 0]
    assert (step.path[:6, 1:] == -1).all()
    columns = [(n - 1) // 16 if block_size else 0 for n in (40, 33, 16)]
    for group in (0, 1):
        table = tables[group]
        expected = [int(table[r, c]) for r, c in zip((0, 1, 3), columns, strict=True)]
        assert step.state_slots[group, [0, 1, 3]].tolist() == expected
        assert step.state_slots[group, [2, 4, 5]].tolist() == [-1, -1, -1]


def test_a_tree_that_is_cut_leaves_its_prefix_and_takes_no_more_of_the_stash(device) -> None:
    step, _ = make_step(device)
    plan(step, device, [8, 4, 8], [1, 0, 1], [40, 33, 20], [5, 2, 7], padded=3, room=5)
    assert step.num_rows[:3].tolist() == [5, 0, 5]
    assert step.stash_start[[0, 2]].tolist() == [0, 5]
    # Rows that do not count are still rows of the step.
    assert step.row_start[:3].tolist() == [0, 8, 12]
    assert step.prefix_lens[:3].tolist() == [32, 0, 12]


def test_blocks_shorter_than_a_path_are_refused(device) -> None:
    step, tables = make_step(device)
    longest = step.tree.max_depth
    step.bind_block_tables(tables, longest + 1)
    with pytest.raises(ValueError, match=f"every {longest} tokens"):
        step.bind_block_tables(tables, longest)


def test_a_request_without_a_block_of_its_own_has_no_state(device) -> None:
    step, tables = make_step(device)
    tables[0][1, 0] = 0  # the null block
    plan(step, device, [8, 8], [1, 1], [10, 10], [0, 1], padded=2)
    assert step.state_slots[0, :2].tolist() == [1, -1]


@pytest.mark.parametrize(
    ("after", "path_len", "cut"),
    [
        (31, 4, None),  # 27 -> 31: short of the boundary at 32
        (32, 4, (4, 2)),  # ends on it: the whole path
        (33, 4, (3, 2)),  # crosses it: three rows are before it
        (35, 4, (1, 2)),
        (36, 4, None),  # 32 -> 36: starts on it, the state there was kept before
        (16, 1, (1, 1)),
    ],
)
def test_the_path_is_cut_at_the_block_boundary_it_reaches(after, path_len, cut, device) -> None:
    step, tables = make_step(device)
    plan(step, device, [8, 8], [1, 1], [40, 40], [3, 6], padded=2)
    step.path_len[:2] = torch.tensor([1, path_len], dtype=torch.int32)
    computed = torch.zeros(8, dtype=torch.int32, device=device)
    computed[3], computed[6] = 2, after
    step.plan_cuts(torch.tensor([3, 6], device=device), computed)
    assert int(step.cut_len[0]) == 0
    for group in (0, 1):
        assert int(step.cut_slots[group, 0]) == -1
        if cut is None:
            assert int(step.cut_len[1]) == 0
            assert int(step.cut_slots[group, 1]) == -1
        else:
            length, blocks = cut
            assert int(step.cut_len[1]) == length
            assert int(step.cut_slots[group, 1]) == int(tables[group][1, blocks - 1])


@pytest.mark.parametrize("channels", [1, 3])
def test_positions_become_root_plus_depth_in_every_channel(channels, torch_rng, device) -> None:
    step, _ = make_step(device)
    depths = torch.randint(0, 5, step.tree.depths.shape, generator=torch_rng).to(device)
    step.tree.depths.copy_(depths)
    step.tree.depths[:, 0] = 0
    plan(step, device, [8, 5, 6], [1, 0, 1], [40, 40, 40], [5, 2, 0], padded=4)
    shape = (24,) if channels == 1 else (channels, 24)
    positions = torch.arange(100, 124, device=device).expand(shape).contiguous()
    args = (step.tree.depths, step.slots, step.row_start, step.num_rows)
    expected = depth_positions_reference(positions, *(a[:4] if a.dim() == 1 else a for a in args))
    to_depth_positions(positions, *args, 4)
    assert positions.equal(expected)
    linear = torch.arange(108, 113, device=device)
    assert (positions[..., 8:13] == linear).all()
