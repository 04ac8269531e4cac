# SPDX-License-Identifier: Apache-2.0
"""Property 2 of tree-gdn: a chain gives what vLLM's own per-row kernel gives."""

import pytest
import torch
from gdn_cases import Step, chain, relative_error


@pytest.mark.parametrize(("num_k_heads", "num_v_heads", "head_dim"), [(1, 2, 64), (2, 6, 128)])
def test_a_chain_equals_the_fused_per_row_kernel(rng, device, num_k_heads, num_v_heads, head_dim):
    """Outputs of every row, and the state after each: vLLM stores one per row, we commit to it."""
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

    num_rows = 12
    step = Step(
        rng,
        [chain(num_rows)],
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        head_dim=head_dim,
        device=device,
    )
    step.verify()
    layer, rows = step.layers[0], step.request_rows(0)
    key_dim = num_k_heads * head_dim
    q, k, v = (
        t.reshape(1, num_rows, -1, head_dim)
        for t in step.conv_out[0][rows].split([key_dim, key_dim, num_v_heads * head_dim], dim=1)
    )
    slot = int(step.state_slots[0])
    # vLLM starts from the slot in column 0 and leaves the state after row i in that of column i.
    states = layer.state[slot].repeat(num_rows + 1, 1, 1, 1)
    outputs, _ = fused_sigmoid_gating_delta_rule_update(
        A_log=layer.a_log,
        a=layer.a[rows],
        b=layer.b[rows],
        dt_bias=layer.dt_bias,
        q=q,
        k=k,
        v=v,
        initial_state=states,
        inplace_final_state=True,
        cu_seqlens=step.ints([0, num_rows]),
        ssm_state_indices=step.ints([list(range(1, num_rows + 1))]),
        num_accepted_tokens=step.ints([1]),
        use_qk_l2norm_in_kernel=True,
    )
    assert relative_error(step.out[0][rows], outputs[0]) < 1e-5

    committed = layer.state.clone()
    for length in (1, 5, num_rows):
        layer.state.copy_(committed)
        step.commit([list(range(length))])
        assert relative_error(layer.state[slot][None], states[length][None]) < 5e-5


def test_the_convolution_equals_vllms_update(rng, device):
    """One token at a time through vLLM's kernel: outputs of a chain, and the window it leaves."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    num_rows = 5
    step = Step(rng, [chain(num_rows)], device=device)
    layer, slot = step.layers[0], int(step.state_slots[0])
    window = layer.conv_state.clone()
    step.verify()
    for row in range(num_rows):
        out = causal_conv1d_update(
            layer.x[row : row + 1].clone(),
            window.transpose(1, 2),
            layer.weight,
            None,
            "silu",
            conv_state_indices=step.ints([slot]),
        )
        assert torch.allclose(out[0], step.conv_out[0][row], rtol=1e-5, atol=1e-6)
    step.commit([list(range(num_rows))])
    assert torch.equal(layer.conv_state[slot], window[slot])
