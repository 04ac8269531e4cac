# SPDX-License-Identifier: Apache-2.0
"""Property 5 of tree-gdn: step after step, the committed state stays within float32 drift."""

import pytest
import torch
from gdn_cases import Step, random_parents, relative_error

from ddtree_vllm.gdn import reference


def run_steps(rng, device, num_steps: int) -> None:
    """Verify and commit random paths of one tree; compare with the recurrence in float64.

    The recurrence runs on its own state throughout: errors of the kernels add up, if they do.
    """
    parents = random_parents(rng, 12, max_depth=6)
    step = Step(rng, [parents], num_v_heads=1, device=device)
    layer, slot = step.layers[0], int(step.state_slots[0])
    layer.a -= 3.0  # exp(g) of about 0.95: an error lives for some twenty tokens
    state, window = step.committed_state(0), layer.conv_state[slot].clone()
    worst = 0.0
    for index in range(num_steps):
        layer.x.copy_(step.normal(*layer.x.shape))
        step.verify()
        x, path = step.projections(0), step.random_path(0)
        outputs, state = reference.run_sequence(x.select(path), state)
        window = reference.advance_window(window, layer.x[path])
        if index % 50 == 49 or index == num_steps - 1:
            worst = max(worst, relative_error(step.out[0][path], outputs))
        step.commit([path])
        if index % 50 == 49 or index == num_steps - 1:
            actual = step.committed_state(0)
            worst = max(worst, relative_error(actual[None], state[None]))
            assert torch.equal(layer.conv_state[slot], window)
    assert worst < 5e-5


def test_200_steps_of_random_accept_lengths(rng, device):
    run_steps(rng, device, 200)


@pytest.mark.slow
def test_2000_steps_of_random_accept_lengths(rng, device):
    run_steps(rng, device, 2000)
