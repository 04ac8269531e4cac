# SPDX-License-Identifier: Apache-2.0
"""The causal convolution: along the paths of a tree, and along ordinary sequences."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from gdn_cases import WIDTH, Step, chain, random_parents

from ddtree_vllm.gdn import causal_conv, reference, tree_causal_conv

TOLERANCE = 1e-6


def expected_tree(step: Step, req: int) -> torch.Tensor:
    layer = step.layers[0]
    return reference.conv_tree(
        layer.x[step.request_rows(req)].cpu(),
        layer.weight.cpu(),
        None if layer.bias is None else layer.bias.cpu(),
        layer.conv_state[int(step.state_slots[req])].cpu(),
        step.trees[req],
    )


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    actual, expected = actual.cpu().double(), expected.double()
    return bool(((actual - expected).abs() <= tolerance * (1 + expected.abs())).all())


@pytest.mark.parametrize("bias", [False, True])
def test_a_row_sees_its_three_nearest_ancestors(rng, device, bias):
    trees = [random_parents(rng, n) for n in (1, 3, 31, 100)]
    step = Step(rng, trees, bias=bias, device=device)
    step.verify()
    for req in range(4):
        assert close(step.conv_out[0][step.request_rows(req)], expected_tree(step, req))


@pytest.mark.usefixtures("gpu_tiles")
@pytest.mark.parametrize("by_taps", [False, True])
def test_tiles_of_a_gpu_and_weights_by_taps_compute_the_same(rng, device, by_taps):
    step = Step(rng, [random_parents(rng, n) for n in (1, 5, 33)], bias=True, device=device)
    if by_taps:
        step.layers[0].weight = step.layers[0].weight.t().contiguous().t()
    step.verify()
    for req in range(3):
        assert close(step.conv_out[0][step.request_rows(req)], expected_tree(step, req))


def test_siblings_do_not_see_each_other(rng, device):
    """A star: every node's window is the root and the committed inputs, whatever comes between."""
    step = Step(rng, [[-1, 0, 0, 0, 0]], device=device)
    layer = step.layers[0]
    layer.x[1:] = layer.x[1].clone()
    step.verify()
    for row in (2, 3, 4):
        assert torch.equal(step.conv_out[0][row], step.conv_out[0][1])


@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_width(rng, device, width):
    step = Step(rng, [random_parents(rng, 12), chain(5)], device=device)
    layer = step.layers[0]
    layer.weight = layer.weight[:, :width].contiguous()
    tree_causal_conv(
        layer.x,
        layer.weight,
        None,
        layer.conv_state[:, : width - 1],
        step.rows,
        step.tree,
        step.conv_out[0],
        step.stash,
        0,
    )
    for req in range(2):
        window = layer.conv_state[int(step.state_slots[req]), : width - 1]
        expected = reference.conv_tree(
            layer.x[step.request_rows(req)].cpu(),
            layer.weight.cpu(),
            None,
            window.cpu(),
            step.trees[req],
        )
        assert close(step.conv_out[0][step.request_rows(req)], expected)


def test_channels_need_not_fill_their_tiles(rng, device):
    """3 x 64 + 64 x 3 channels: not a power of two."""
    step = Step(rng, [random_parents(rng, 9)], num_k_heads=1, num_v_heads=3, device=device)
    step.verify()
    assert close(step.conv_out[0][step.request_rows(0)], expected_tree(step, 0))


def test_a_window_of_another_type_is_read(rng, device):
    """The cache may keep bfloat16 inputs for a float32 model."""
    step = Step(rng, [random_parents(rng, 9)], device=device)
    layer = step.layers[0]
    layer.conv_state = layer.conv_state.to(torch.bfloat16)
    step.verify()
    assert close(step.conv_out[0][step.request_rows(0)], expected_tree(step, 0))


def test_a_chain_gives_the_bits_of_a_sequence(rng, device):
    """What verification computes for accepted rows is what decoding would have computed."""
    step = Step(rng, [chain(20)], bias=True, device=device)
    step.verify()
    layer = step.layers[0]
    out = torch.empty_like(layer.x)
    causal_conv(
        layer.x,
        layer.weight,
        layer.bias,
        layer.conv_state,
        step.rows.state_slots,
        step.ints([0, 20]),
        None,
        out,
        max_query_len=20,
    )
    assert torch.equal(step.conv_out[0], out)


@pytest.mark.parametrize("lengths", [[1], [2, 1, 3], [5, 200, 0, 1]])
def test_sequences_convolve_and_move_their_windows(rng, device, lengths):
    num_reqs, channels = len(lengths), 192
    step = Step(rng, [chain(2)], device=device)  # for its random numbers
    total = sum(lengths)
    x, weight = step.normal(total, channels), step.normal(channels, WIDTH)
    state = step.normal(num_reqs + 2, WIDTH, channels)[:, : WIDTH - 1]
    before = state.clone()
    slots = [int(s) for s in 1 + rng.permutation(num_reqs + 1)[:num_reqs]]
    has_initial = [bool(r % 2 == 0) for r in range(num_reqs)]
    starts = [sum(lengths[:r]) for r in range(num_reqs + 1)]
    out = torch.full_like(x, torch.nan)
    causal_conv(
        x,
        weight,
        None,
        state,
        step.ints(slots),
        step.ints(starts),
        torch.tensor(has_initial, device=device),
        out,
        max_query_len=max(lengths),
        null_slot=0,
    )
    untouched = set(range(num_reqs + 2))
    for req, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        window = before[slots[req]] if has_initial[req] else torch.zeros_like(before[0])
        rows = torch.cat([window, x[start:end]]).cpu().double()
        taps = rows.T[None]
        expected = F.conv1d(taps, weight.cpu().double()[:, None], groups=channels)[0].T
        assert close(out[start:end], F.silu(expected))
        assert torch.equal(state[slots[req]], reference.advance_window(window, x[start:end]))
        untouched.discard(slots[req])
    for slot in untouched:
        assert torch.equal(state[slot], before[slot])


@pytest.mark.usefixtures("gpu_tiles")
def test_tiles_of_a_gpu_move_a_window_after_every_look_into_it(rng, device):
    """A program that moves it is not the only one: its tile has to hold all rows that look."""
    test_sequences_convolve_and_move_their_windows(rng, device, [3, 40, 0, 1, 17])


def test_sequences_in_the_null_slot_are_skipped(rng, device):
    step = Step(rng, [chain(2)], device=device)
    x, state = step.normal(4, 64), step.normal(2, WIDTH - 1, 64)
    before, out = state.clone(), torch.full_like(x, torch.nan)
    causal_conv(
        x,
        step.normal(64, WIDTH),
        None,
        state,
        step.ints([0, 1]),
        step.ints([0, 2, 4]),
        None,
        out,
        max_query_len=2,
        null_slot=0,
    )
    assert torch.equal(state[0], before[0])
    assert out[:2].isnan().all()
    assert out[2:].isfinite().all()


def test_bad_shapes_are_refused(rng, device):
    step = Step(rng, [chain(2)], device=device)
    layer = step.layers[0]

    def run(x=layer.x, weight=layer.weight, state=layer.conv_state):
        tree_causal_conv(
            x, weight, None, state, step.rows, step.tree, step.conv_out[0], step.stash, 0
        )

    with pytest.raises(ValueError, match="2 to 4 taps wide, not 5"):
        run(weight=step.normal(step.channels, 5))
    with pytest.raises(ValueError, match="x must have"):
        run(x=layer.x[:, ::2])
    with pytest.raises(ValueError, match="keeps 2 inputs a slot, needs 3"):
        run(state=layer.conv_state[:, :2])
