# SPDX-License-Identifier: Apache-2.0
"""Committing an accepted path: the state that running the path's tokens one by one would leave."""

import numpy as np
import pytest
import torch
from gdn_cases import REGIMES, WIDTH, Step, chain, random_parents, relative_error

from ddtree_vllm.gdn import StateTable, commit_paths, reference

STATE_TOLERANCE = 5e-5


def expected_state(step: Step, req: int, path: list[int], layer: int = 0) -> torch.Tensor:
    """The committed state after a path, by the recurrence; call before the commit."""
    _, state = reference.run_sequence(
        step.projections(req, layer).select(path), step.committed_state(req, layer)
    )
    return state


def expected_window(step: Step, req: int, path: list[int], layer: int = 0) -> torch.Tensor:
    inputs = step.layers[layer]
    window = inputs.conv_state[int(step.state_slots[req])]
    return reference.advance_window(window, inputs.x[step.request_rows(req)][path])


def assert_state(step: Step, slot: int, state: torch.Tensor, layer: int = 0) -> None:
    actual = step.layers[layer].state[slot].cpu().double()
    assert relative_error(actual[None], state[None]) < STATE_TOLERANCE


@pytest.mark.parametrize("regime", REGIMES)
def test_a_committed_path_equals_its_tokens_run_one_by_one(rng, device, regime):
    """Property 4 of tree-gdn: different trees in one batch, slow and fast decays, beta 0 and 1."""
    trees = [random_parents(rng, n) for n in (1, 7, 16, 32)]
    step = Step(rng, trees, regime=regime, device=device)
    step.verify()
    paths = [step.random_path(req) for req in range(4)]
    states = [expected_state(step, req, path) for req, path in enumerate(paths)]
    windows = [expected_window(step, req, path) for req, path in enumerate(paths)]
    step.commit(paths)
    for req in range(4):
        slot = int(step.state_slots[req])
        assert_state(step, slot, states[req])
        assert torch.equal(step.layers[0].conv_state[slot], windows[req])


@pytest.mark.parametrize("num_rows", [2, 8, 64, 65, 128])
def test_all_tree_sizes_up_to_127_nodes(rng, device, num_rows):
    step = Step(rng, [random_parents(rng, num_rows)], head_dim=128, device=device)
    step.verify()
    path = step.random_path(0)
    state, window = expected_state(step, 0, path), expected_window(step, 0, path)
    step.commit([path])
    slot = int(step.state_slots[0])
    assert_state(step, slot, state)
    assert torch.equal(step.layers[0].conv_state[slot], window)


@pytest.mark.parametrize(("num_k_heads", "num_v_heads"), [(1, 1), (2, 2), (2, 4), (1, 3), (2, 6)])
def test_value_heads_share_key_heads(rng, device, num_k_heads, num_v_heads):
    step = Step(
        rng,
        [random_parents(rng, 12)],
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        device=device,
    )
    step.verify()
    path = step.random_path(0)
    state = expected_state(step, 0, path)
    step.commit([path])
    assert_state(step, int(step.state_slots[0]), state)


def test_a_step_that_accepts_nothing_commits_its_root(rng, device):
    step = Step(rng, [random_parents(rng, 20), chain(4)], device=device)
    step.verify()
    states = [expected_state(step, req, [0]) for req in range(2)]
    step.commit([[0], [0]])
    for req in range(2):
        assert_state(step, int(step.state_slots[req]), states[req])


def test_a_discarded_step_leaves_every_bit(rng, device):
    """Complaint 1: rows of a step that committed nothing must not touch any state."""
    trees = [random_parents(rng, 12), None, random_parents(rng, 5)]
    step = Step(rng, trees, num_layers=2, device=device)
    before = step.snapshot()
    step.verify()
    step.commit([[], [], []], cuts=[(1, 2), (1, 3), (0, 4)])
    for (conv, state), (conv_after, state_after) in zip(before, step.snapshot(), strict=True):
        assert torch.equal(conv, conv_after)
        assert torch.equal(state, state_after)


def test_a_commit_touches_its_own_slots_only(rng, device):
    trees = [random_parents(rng, 12), None, random_parents(rng, 5), random_parents(rng, 5)]
    step = Step(rng, trees, num_layers=2, device=device)
    # The request in the null slot is the padding of a CUDA graph.
    step.rows.state_slots[3] = 0
    before = step.snapshot()
    step.verify()
    step.commit([step.random_path(0), [], step.random_path(2), [0]])
    written = {int(step.state_slots[0]), int(step.state_slots[2])}
    for (conv, state), (conv_after, state_after) in zip(before, step.snapshot(), strict=True):
        for slot in range(step.num_state_slots):
            assert torch.equal(state[slot], state_after[slot]) == (slot not in written)
            assert torch.equal(conv[slot], conv_after[slot]) == (slot not in written)


def test_every_layer_commits_in_one_launch(rng, device):
    trees = [random_parents(rng, 10), random_parents(rng, 6)]
    step = Step(rng, trees, num_layers=3, device=device)
    step.verify()
    paths = [step.random_path(0), step.random_path(1)]
    expected = [
        [expected_state(step, req, paths[req], layer) for req in range(2)] for layer in range(3)
    ]
    windows = [
        [expected_window(step, req, paths[req], layer) for req in range(2)] for layer in range(3)
    ]
    step.commit(paths)
    for layer in range(3):
        for req in range(2):
            slot = int(step.state_slots[req])
            assert_state(step, slot, expected[layer][req], layer)
            assert torch.equal(step.layers[layer].conv_state[slot], windows[layer][req])


def test_the_next_step_continues_from_a_commit(rng, device):
    """Three steps of verify and commit against one sequence of all accepted tokens."""
    step = Step(rng, [random_parents(rng, 9)], device=device)
    state = step.committed_state(0)
    slot = int(step.state_slots[0])
    for _ in range(3):
        step.layers[0].x.copy_(step.normal(*step.layers[0].x.shape))
        step.verify()
        x, path = step.projections(0), step.random_path(0)
        outputs, state = reference.run_sequence(x.select(path), state)
        assert relative_error(step.out[0][path], outputs) < 1e-5
        step.commit([path])
        assert_state(step, slot, state)


@pytest.mark.parametrize("cut_in_place", [False, True])
def test_a_path_cut_at_a_block_boundary_keeps_the_state_there(rng, device, cut_in_place):
    """Complaint 13: the state at the boundary goes to the slot that the prefix cache will read.

    With `cut_in_place` the boundary's state replaces the committed one and the advanced state moves
    on to the next block, as when a block of the cache fills up.
    """
    trees = [chain(12), random_parents(rng, 14), chain(5), chain(6)]
    step = Step(rng, trees, num_layers=2, device=device)
    step.verify()
    paths = [list(range(12)), step.random_path(1), list(range(5)), list(range(6))]
    # The cut in the middle, at the path's end, at its root, and none.
    lengths = [4, len(paths[1]), 1, 0]
    free = [slot for slot in range(1, step.num_state_slots) if slot not in step.state_slots]
    src = [int(slot) for slot in step.state_slots]
    if cut_in_place:
        # One free slot per request that moves on; the last two requests stay where they are.
        dst = [free[0], free[1], *src[2:]]
        cuts = [(lengths[0], src[0]), (lengths[1], src[1]), (lengths[2], free[2]), (0, -1)]
    else:
        dst = src
        cuts = [(lengths[0], free[0]), (lengths[1], free[1]), (lengths[2], free[2]), (0, -1)]
    full, kept = [], []
    for layer in range(2):
        for req in range(4):
            full.append(
                (
                    expected_state(step, req, paths[req], layer),
                    expected_window(step, req, paths[req], layer),
                )
            )
            cut = paths[req][: lengths[req]]
            kept.append(
                (expected_state(step, req, cut, layer), expected_window(step, req, cut, layer))
            )
    step.commit(paths, dst_slots=dst, cuts=cuts)
    for layer in range(2):
        for req in range(4):
            state, window = full[4 * layer + req]
            assert_state(step, dst[req], state, layer)
            assert torch.equal(step.layers[layer].conv_state[dst[req]], window)
            if lengths[req]:
                state, window = kept[4 * layer + req]
                assert_state(step, cuts[req][1], state, layer)
                assert torch.equal(step.layers[layer].conv_state[cuts[req][1]], window)


def test_a_cut_beyond_the_path_is_no_cut(rng, device):
    step = Step(rng, [chain(6)], device=device)
    step.verify()
    free = next(slot for slot in range(1, step.num_state_slots) if slot != step.state_slots[0])
    before = step.layers[0].state[free].clone()
    step.commit([[0, 1, 2]], cuts=[(4, free)])
    assert torch.equal(step.layers[0].state[free], before)


def test_weak_decays_survive_a_strong_one(rng, device):
    """The commit needs differences of sums of g up to -10,000."""
    step = Step(rng, [chain(16)], device=device)
    layer = step.layers[0]
    layer.a -= 4.0
    layer.a[int(step.row_start[0])] = 10000.0
    step.verify()
    path = list(range(16))
    state = expected_state(step, 0, path)
    step.commit([path])
    assert_state(step, int(step.state_slots[0]), state)


def test_a_bfloat16_state_is_rounded_once(rng, device):
    step = Step(rng, [chain(16)], state_dtype=torch.bfloat16, device=device)
    step.verify()
    path = list(range(16))
    expected = expected_state(step, 0, path)
    step.commit([path])
    actual = step.committed_state(0)
    # One unit in the last place, whatever the number of rows.
    assert ((actual - expected).abs() <= expected.abs() * 2**-7 + 1e-5).all()


def test_bfloat16_rows_commit_as_exactly_as_float32_ones(rng, device):
    step = Step(rng, [random_parents(rng, 30)], dtype=torch.bfloat16, device=device)
    step.verify()
    path = step.random_path(0)
    state, window = expected_state(step, 0, path), expected_window(step, 0, path)
    step.commit([path])
    slot = int(step.state_slots[0])
    assert_state(step, slot, state)
    assert torch.equal(step.layers[0].conv_state[slot], window)


def test_layers_of_different_cache_groups_have_slots_of_their_own(rng, device):
    step = Step(rng, [random_parents(rng, 8)], num_layers=2, device=device)
    step.verify()
    path = step.random_path(0)
    own = int(step.state_slots[0])
    other = own % (step.num_state_slots - 1) + 1
    # The second layer's state lives in another slot than the first one's.
    for tensor in (step.layers[1].state, step.layers[1].conv_state):
        tensor[other] = tensor[own]
    expected = [expected_state(step, 0, path, layer) for layer in range(2)]
    caches = [(layer.conv_state, layer.state) for layer in step.layers]
    untouched = step.layers[1].state[own].clone()
    commit_paths(
        StateTable.build(caches, groups=[0, 1]),
        step.stash,
        step.ints([path]),
        step.ints([len(path)]),
        step.rows.stash_start,
        step.ints([[own], [other]]),
        max_path=len(path),
        conv_width=WIDTH,
    )
    assert_state(step, own, expected[0], layer=0)
    assert_state(step, other, expected[1], layer=1)
    assert torch.equal(step.layers[1].state[own], untouched)


def test_random_trees_many_times(rng, device):
    """Small trees of every shape; each commit against the recurrence."""
    for _ in range(25):
        trees = [random_parents(rng, int(n)) for n in rng.integers(1, 14, size=2)]
        step = Step(rng, trees, num_v_heads=1, device=device)
        step.verify()
        paths = [step.random_path(req) for req in range(2)]
        states = [expected_state(step, req, path) for req, path in enumerate(paths)]
        step.commit(paths)
        for req in range(2):
            assert_state(step, int(step.state_slots[req]), states[req])


@pytest.mark.slow
def test_random_trees_of_every_size(rng, device):
    """200 random trees of 1 to 127 nodes, outputs and committed states, over all regimes."""
    for trial in range(200):
        regime = list(REGIMES)[trial % len(REGIMES)]
        step = Step(
            rng, [random_parents(rng, int(rng.integers(1, 129)))], regime=regime, device=device
        )
        step.verify()
        path = step.random_path(0)
        outputs, states = reference.run_tree(
            step.projections(0), step.trees[0], step.committed_state(0)
        )
        assert relative_error(step.out[0][step.request_rows(0)], outputs) < 1e-5
        step.commit([path])
        assert_state(step, int(step.state_slots[0]), states[path[-1]])


def test_caches_laid_out_differently_are_refused(rng):
    step = Step(rng, [chain(2)])
    layer = step.layers[0]
    with pytest.raises(ValueError, match="not laid out alike"):
        StateTable.build([(layer.conv_state, layer.state), (layer.conv_state, layer.state[1:, :1])])
    with pytest.raises(ValueError, match="at least one layer"):
        StateTable.build([])
    with pytest.raises(ValueError, match="contiguous and aligned"):
        StateTable.build([(layer.conv_state, layer.state.mT)])


def test_a_stash_of_other_layers_is_refused(rng):
    step = Step(rng, [chain(2)], num_layers=2)
    caches = [(layer.conv_state, layer.state) for layer in step.layers]
    args = (step.stash, step.ints([[0]]), step.ints([1]), step.ints([0]), step.ints([1]), 1, WIDTH)
    with pytest.raises(ValueError, match="the stash has 2 layers, the caches 1"):
        commit_paths(StateTable.build(caches[:1]), *args)
    with pytest.raises(ValueError, match="come together"):
        commit_paths(step.table, *args, cut_len=step.ints([1]))
    with pytest.raises(ValueError, match="2 cache groups need slots"):
        commit_paths(StateTable.build(caches, groups=[0, 1]), *args)


def test_regimes_cover_both_ends(rng, device):
    """The regimes above mean what their names say."""
    decays, betas = {}, {}
    for regime in REGIMES:
        step = Step(rng, [chain(64)], regime=regime, device=device)
        # The regimes speak of heads whose a_log and dt_bias are 0; theirs are drawn about it.
        step.layers[0].a_log.zero_()
        step.layers[0].dt_bias.zero_()
        step.verify()
        x = step.projections(0)
        decays[regime], betas[regime] = float(x.g.exp().mean()), float(x.beta.mean())
    assert decays["slow decay, beta near 1"] > 0.999
    assert decays["fast decay, beta near 1"] < 0.001
    assert betas["slow decay, beta near 1"] > 0.99
    assert betas["fast decay, beta near 0"] < 0.01
    assert np.isfinite(list(decays.values())).all()
