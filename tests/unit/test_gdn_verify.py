# SPDX-License-Identifier: Apache-2.0
"""Verification of a tree's rows against the recurrence in float64, run along every path."""

import numpy as np
import pytest
import torch
from gdn_cases import (
    NULL_SLOT,
    REGIMES,
    Step,
    ancestor_matrix,
    chain,
    path_to,
    random_parents,
    relative_error,
)

from ddtree_vllm.gdn import reference, tree_causal_conv, verify_tree
from ddtree_vllm.gdn.launch import num_factors, row_tiles

OUTPUT_TOLERANCE = 1e-5


def verified_error(step: Step, req: int, layer: int = 0) -> float:
    """Largest relative output error over a request's nodes."""
    state = step.committed_state(req, layer)
    expected, _ = reference.run_tree(step.projections(req, layer), step.trees[req], state)
    return relative_error(step.out[layer][step.request_rows(req)], expected)


def test_the_closed_form_equals_the_recurrence(rng, device):
    """The two float64 references agree, so that either can judge a kernel."""
    for num_rows in (1, 2, 17, 40):
        step = Step(rng, [random_parents(rng, num_rows)], device=device)
        step.verify()
        x, parents = step.projections(0), step.trees[0]
        state = step.committed_state(0)
        outputs, states = reference.run_tree(x, parents, state)
        closed, u, decay = reference.run_tree_closed_form(x, ancestor_matrix(parents), state)
        assert relative_error(closed, outputs) < 1e-12
        path = step.random_path(0)
        committed = reference.commit_path(x, u, decay, path, state)
        assert relative_error(committed[None], states[path[-1]][None]) < 1e-12


@pytest.mark.parametrize("regime", REGIMES)
def test_every_node_equals_the_recurrence_along_its_path(rng, device, regime):
    """Property 1 of tree-gdn: node by node, float32 kernel against float64 recurrence."""
    trees = [random_parents(rng, n) for n in (1, 2, 15, 32)]
    step = Step(rng, trees, regime=regime, device=device)
    step.verify()
    for req in range(len(trees)):
        assert verified_error(step, req) < OUTPUT_TOLERANCE


@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 64, 65, 96, 128])
def test_all_tree_sizes_up_to_127_nodes(rng, device, num_rows):
    step = Step(rng, [random_parents(rng, num_rows)], head_dim=128, device=device)
    step.verify()
    assert verified_error(step, 0) < OUTPUT_TOLERANCE


@pytest.mark.usefixtures("gpu_tiles")
@pytest.mark.parametrize("num_rows", [24, 100])
def test_tiles_of_a_gpu_compute_the_same(rng, device, num_rows):
    """There the value dimension of a head is shared out among programs."""
    step = Step(rng, [random_parents(rng, num_rows)], head_dim=128, device=device)
    step.verify()
    assert verified_error(step, 0) < OUTPUT_TOLERANCE


@pytest.mark.parametrize(
    ("num_k_heads", "num_v_heads"), [(1, 1), (2, 2), (1, 2), (2, 4), (1, 3), (2, 6)]
)
def test_value_heads_share_key_heads(rng, device, num_k_heads, num_v_heads):
    trees = [random_parents(rng, 20), random_parents(rng, 9)]
    step = Step(rng, trees, num_k_heads=num_k_heads, num_v_heads=num_v_heads, device=device)
    step.verify()
    for req in range(2):
        assert verified_error(step, req) < OUTPUT_TOLERANCE


@pytest.mark.parametrize("num_rows", [16, 64, 128])
def test_a_chain_of_any_depth_is_a_tree(rng, device, num_rows):
    step = Step(rng, [chain(num_rows)], device=device)
    step.verify()
    expected, _ = reference.run_sequence(step.projections(0), step.committed_state(0))
    assert relative_error(step.out[0][step.request_rows(0)], expected) < OUTPUT_TOLERANCE


def test_order_of_rows_does_not_matter(rng, device):
    """Property 3: any permutation that keeps parents first gives the same outputs per node."""
    parents = random_parents(rng, 48)
    step = Step(rng, [parents], device=device)
    step.verify()
    for _ in range(3):
        # Rows in a random order of arrival, each after its parent.
        order: list[int] = [0]
        while len(order) < len(parents):
            ready = [i for i in range(1, 48) if i not in order and parents[i] in order]
            order.append(int(rng.choice(ready)))
        rank = {row: place for place, row in enumerate(order)}
        other = Step(rng, [[-1] + [rank[parents[row]] for row in order[1:]]], device=device)
        other.layers[0].__dict__.update(step.layers[0].__dict__)
        for name in ("x", "a", "b"):
            setattr(other.layers[0], name, getattr(step.layers[0], name)[order])
        other.state_slots = step.state_slots
        other.rows.state_slots = step.rows.state_slots
        other.verify()
        assert relative_error(other.out[0], step.out[0][order]) < OUTPUT_TOLERANCE


def test_repeated_keys_do_not_lose_digits(rng, device):
    """Equal keys, beta near 1, no decay: powers of A reach thousands, the solution stays small."""
    parents = random_parents(rng, 40)
    step = Step(rng, [parents], regime="slow decay, beta near 1", device=device)
    layer = step.layers[0]
    keys = slice(step.head_dim, 2 * step.head_dim)
    # Every input alike in the key channels, so that the convolution gives every row one key.
    layer.x[:, keys] = layer.x[0, keys].clone()
    layer.conv_state[:, :, keys] = layer.x[0, keys]
    step.verify()
    unit = torch.nn.functional.normalize(step.conv_out[0][:, keys].float(), dim=1)
    assert (unit @ unit.T).min() > 0.9999
    assert verified_error(step, 0) < OUTPUT_TOLERANCE


def test_weak_decays_survive_a_strong_one(rng, device):
    """A root that forgets everything, then rows that forget little: sums of g up to -1,000."""
    step = Step(rng, [chain(16), random_parents(rng, 32)], device=device)
    layer = step.layers[0]
    layer.a -= 4.0
    for start in step.row_start:
        layer.a[start] = 1000.0
    step.verify()
    for req in range(2):
        assert verified_error(step, req) < OUTPUT_TOLERANCE


def test_slow_decays_keep_their_digits(rng, device):
    """log(1 + y) of y near 1e-4 would keep three of them."""
    step = Step(rng, [chain(4)], regime="slow decay, beta near 1", device=device)
    step.verify()
    expected = step.projections(0).g.cumsum(0)
    actual = step.stash.log_decay[0, :4].cpu()
    assert ((actual - expected).abs() <= 1e-6 * expected.abs()).all()


def verify_equal_requests(step: Step, rows_per_request: int) -> torch.Tensor:
    layer = step.layers[0]
    tree_causal_conv(
        layer.x,
        layer.weight,
        layer.bias,
        layer.conv_state,
        step.rows,
        step.tree,
        step.conv_out[0],
        step.stash,
        0,
    )
    inputs = (layer.a, layer.b, layer.a_log, layer.dt_bias, layer.state, step.rows, step.tree)
    verify_tree(
        step.conv_out[0], *inputs, step.out[0], step.stash, 0, rows_per_request=rows_per_request
    )
    return step.out[0]


@pytest.mark.parametrize(("num_rows", "cut"), [(3, 2), (40, 25), (100, 70), (100, 40)])
def test_where_all_requests_have_as_many_rows_those_of_nobody_become_zeros(
    rng, device, num_rows, cut
):
    """A captured graph's: a tree cut to the stash's room, an entry of padding, one without a state."""
    trees = [random_parents(rng, num_rows) for _ in range(4)]
    step = Step(rng, trees, head_dim=128, device=device)
    step.trees = [trees[0], trees[1][:cut], None, None]
    step.rows.num_rows[1] = cut
    step.rows.num_rows[2] = 0
    step.rows.slots[2] = -1
    step.rows.row_start[2] = 0
    step.rows.state_slots[3] = NULL_SLOT
    out = verify_equal_requests(step, num_rows).reshape(4, num_rows, -1)
    for req in range(2):
        assert verified_error(step, req) < OUTPUT_TOLERANCE
    assert out[0].isfinite().all()
    assert (out[1, cut:] == 0).all()
    assert (out[2:] == 0).all()


@pytest.mark.usefixtures("gpu_tiles")
@pytest.mark.parametrize(("num_rows", "cut"), [(40, 25), (100, 40)])
def test_tiles_of_a_gpu_write_the_same_zeros(rng, device, num_rows, cut):
    test_where_all_requests_have_as_many_rows_those_of_nobody_become_zeros(
        rng, device, num_rows, cut
    )


def test_rows_per_request_that_are_not_the_steps_are_refused(rng, device):
    step = Step(rng, [random_parents(rng, 6)] * 2, device=device)
    for wrong in (5, 12):
        with pytest.raises(ValueError, match="2 requests of"):
            verify_equal_requests(step, wrong)
    step.rows.max_num_rows = 5
    with pytest.raises(ValueError, match="2 requests of 6 rows, up to 5"):
        verify_equal_requests(step, 6)


def test_padding_nodes_change_nothing(rng, device):
    """Rows of padding inside num_rows: finite, and no valid node differs by a bit."""
    trees = [random_parents(rng, 12), random_parents(rng, 9)]
    seed = int(rng.integers(1 << 31))
    padded = Step(np.random.default_rng(seed), trees, padding=4, device=device)
    plain = Step(np.random.default_rng(seed), trees, device=device)
    inputs, source = plain.layers[0], padded.layers[0]
    for name in ("weight", "a_log", "dt_bias", "conv_state", "state"):
        setattr(inputs, name, getattr(source, name))
    plain.rows.state_slots = padded.rows.state_slots
    for req in range(2):
        for name in ("x", "a", "b"):
            getattr(inputs, name)[plain.request_rows(req)] = getattr(source, name)[
                padded.request_rows(req)
            ]
    padded.verify()
    plain.verify()
    assert padded.out[0].isfinite().all()
    for req in range(2):
        assert torch.equal(
            padded.out[0][padded.request_rows(req)], plain.out[0][plain.request_rows(req)]
        )


def test_a_truncated_tree_verifies_its_prefix(rng, device):
    """The scheduler may verify fewer rows than the tree in the slot has."""
    parents = random_parents(rng, 30)
    step = Step(rng, [parents], device=device)
    step.rows.num_rows.fill_(11)
    step.verify()
    expected, _ = reference.run_tree(
        step.projections(0).select(range(11)), parents[:11], step.committed_state(0)
    )
    assert relative_error(step.out[0][:11], expected) < OUTPUT_TOLERANCE
    assert step.out[0][11:].isnan().all()


def test_requests_without_a_tree_are_left_alone(rng, device):
    """Prefill rows between trees keep their contents; trees beside them are right."""
    trees = [random_parents(rng, 10), None, random_parents(rng, 18), None]
    step = Step(rng, trees, device=device)
    before = step.snapshot()
    step.verify()
    for req in (0, 2):
        assert verified_error(step, req) < OUTPUT_TOLERANCE
    for req in (1, 3):
        start = int(step.row_start[req])
        assert step.out[0][start : start + 5].isnan().all()
        assert step.conv_out[0][start : start + 5].isnan().all()
    for (conv, state), (conv_after, state_after) in zip(before, step.snapshot(), strict=True):
        assert torch.equal(conv, conv_after)
        assert torch.equal(state, state_after)


@pytest.mark.parametrize("field", ["slots", "state_slots", "num_rows"])
def test_padded_requests_write_nothing(rng, device, field):
    """Entries that pad a CUDA graph, told by any one of the three marks."""
    step = Step(rng, [random_parents(rng, 8), random_parents(rng, 8)], device=device)
    step.stash.u.fill_(torch.nan)
    getattr(step.rows, field)[1] = -1 if field == "slots" else 0
    step.verify()
    assert verified_error(step, 0) < OUTPUT_TOLERANCE
    assert step.out[0][step.request_rows(1)].isnan().all()
    assert step.stash.u[0, int(step.stash_start[1]) :].isnan().all()


def test_zero_requests(rng, device):
    step = Step(rng, [], device=device)
    step.verify()
    step.commit([])


def test_projections_may_be_views_of_wider_rows(rng, device):
    """vLLM projects q, k, v and z in one product, and b and a in another."""
    step = Step(rng, [random_parents(rng, 14)], device=device)
    layer = step.layers[0]
    rows, heads = layer.x.shape[0], step.num_v_heads
    wide = step.normal(rows, step.channels + 96)
    wide[:, : step.channels] = layer.x
    gates = torch.cat([layer.b, layer.a], dim=1)
    layer.x, layer.b, layer.a = wide[:, : step.channels], gates[:, :heads], gates[:, heads:]
    step.verify()
    assert verified_error(step, 0) < OUTPUT_TOLERANCE


def test_bfloat16_rows_are_exact_up_to_the_rounding_of_the_output(rng, device):
    """Inputs are bfloat16, arithmetic is float32: only the last rounding costs digits."""
    step = Step(rng, [random_parents(rng, 32)], dtype=torch.bfloat16, device=device)
    step.verify()
    expected, _ = reference.run_tree(step.projections(0), step.trees[0], step.committed_state(0))
    actual = step.out[0][step.request_rows(0)].cpu().double()
    # One unit in the last place of 8 bits (half of it where the conversion rounds to nearest, which
    # the interpreter's does not), and float32 noise on values near zero.
    assert ((actual - expected).abs() <= expected.abs() * 2**-7 + 1e-5).all()


def test_a_bfloat16_state_is_read(rng, device):
    step = Step(rng, [random_parents(rng, 12)], state_dtype=torch.bfloat16, device=device)
    step.verify()
    assert verified_error(step, 0) < OUTPUT_TOLERANCE


def test_layers_do_not_share_a_stash(rng, device):
    step = Step(rng, [random_parents(rng, 10)], num_layers=3, device=device)
    step.verify()
    for layer in range(3):
        x = step.projections(0, layer)
        _, u, decay = reference.run_tree_closed_form(
            x, ancestor_matrix(step.trees[0]), step.committed_state(0, layer)
        )
        assert relative_error(step.stash.log_decay[layer, :10], decay) < 1e-5
        # u is stashed over |k|, and k raw: their product is what the recurrence adds to the state.
        k = step.stash.k[layer, :10].double().repeat_interleave(2, dim=1).cpu()
        stashed = torch.einsum("nhv,nhk->nhvk", step.stash.u[layer, :10].double().cpu(), k)
        expected = torch.einsum("nhv,nhk->nhvk", u, x.k)
        assert relative_error(stashed, expected) < 1e-5
        assert torch.equal(step.stash.conv[layer, :10], step.layers[layer].x)


def test_the_stash_is_counted_before_it_is_allocated(rng):
    step = Step(rng, [chain(6)], num_layers=2, dtype=torch.bfloat16)
    per_row = step.stash.bytes_per_row(2, 1, 2, 64, 64, torch.bfloat16)
    # A request of 6 rows: two square factors of two heads' tiles of 16 rows, stacked or not, and four
    # numbers of every row.
    factors = 4 * num_factors(1, 6, 2)
    assert factors in (4 * (2 * 32**2 + 4 * 32), 4 * 2 * (2 * 16**2 + 4 * 16))
    assert step.stash.bytes() == 6 * per_row + factors
    # Per layer and row: k 64 and 4 x 64 channels of 2 bytes, u 2 x 64 of 4, log-decay 2 of 8.
    assert per_row == 2 * (64 * 2 + 256 * 2 + 128 * 4 + 2 * 8)


def test_bad_shapes_are_refused(rng, device):
    with pytest.raises(ValueError, match="at most 128 rows"):
        row_tiles(129)
    step = Step(rng, [chain(4)], device=device)
    layer = step.layers[0]

    def run(**changed):
        args = {
            "qkv": step.conv_out[0],
            "a": layer.a,
            "b": layer.b,
            "a_log": layer.a_log,
            "dt_bias": layer.dt_bias,
            "state": layer.state,
            "out": step.out[0],
        }
        verify_tree(rows=step.rows, tree=step.tree, stash=step.stash, layer=0, **(args | changed))

    with pytest.raises(ValueError, match="contiguous channels"):
        run(qkv=step.conv_out[0][:, :-1])
    with pytest.raises(ValueError, match="contiguous heads"):
        run(a=layer.a[:, :1])
    with pytest.raises(ValueError, match="must be 64 or 128"):
        run(state=layer.state[..., :32])
    step.stash.factors.set_(step.stash.factors[:-1])
    with pytest.raises(ValueError, match="the stash was made for"):
        run()


def test_path_helper_goes_from_root_to_row():
    assert path_to([-1, 0, 0, 1, 3], 4) == [0, 1, 3, 4]
