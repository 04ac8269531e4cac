# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over a tree, in plain PyTorch and float64: what the kernels are checked against.

Gated DeltaNet: Yang, Kautz, Hatamizadeh, arXiv 2412.06464, section 3. Two forms are here, written
apart so that one can check the other: the recurrence itself, run along every path, and the closed
form over a tree, which is the chunked form of section 3.3 with the ancestors of a row in place of
the rows before it.

Symbols: n rows, Hk key heads, Hv value heads (a multiple of Hk), K and V head sizes. States are
laid out as the engine's cache keeps them, [Hv, V, K], the transpose of the papers' S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

NORM_EPS = 1e-6


class Projections(NamedTuple):
    """What one layer's recurrence reads, per row, float64, key heads repeated for the value heads.

    Attributes:
        q: [n, Hv, K], L2-normalised and scaled by 1 / sqrt(K).
        k: [n, Hv, K], L2-normalised.
        v: [n, Hv, V].
        g: [n, Hv], log-decay, at most 0.
        beta: [n, Hv], in (0, 1).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def select(self, rows: Sequence[int]) -> Projections:
        return Projections(*(t[list(rows)] for t in self))


def project(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    head_k_dim: int,
    head_v_dim: int,
) -> Projections:
    """Splits a convolution output into heads, normalises them and evaluates the gates.

    Args:
        qkv: [n, 2 Hk K + Hv V], q, k and v side by side, after convolution and activation.
        a: [n, Hv], decay input: g = -exp(a_log) softplus(a + dt_bias).
        b: [n, Hv], beta = sigmoid(b).
        a_log, dt_bias: [Hv].
    """
    num_rows, num_v_heads = a.shape
    value_dim = num_v_heads * head_v_dim
    key_dim = (qkv.shape[1] - value_dim) // 2
    q, k, v = qkv.double().split([key_dim, key_dim, value_dim], dim=1)
    q = q.reshape(num_rows, -1, head_k_dim)
    k = k.reshape(num_rows, -1, head_k_dim)
    q = q / (q.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
    k = k / (k.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
    group = num_v_heads // q.shape[1]
    return Projections(
        q=q.repeat_interleave(group, dim=1) * head_k_dim**-0.5,
        k=k.repeat_interleave(group, dim=1),
        v=v.reshape(num_rows, num_v_heads, head_v_dim),
        g=-a_log.double().exp() * F.softplus(a.double() + dt_bias.double()),
        beta=b.double().sigmoid(),
    )


def step(state: torch.Tensor, x: Projections, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the recurrence.

        S~ = exp(g) S;  u = beta (v - S~^T k);  S' = S~ + k u^T;  o = S'^T q

    Args:
        state: [Hv, V, K].

    Returns:
        The output [Hv, V] and the next state [Hv, V, K].
    """
    decayed = x.g[row].exp()[:, None, None] * state
    u = x.beta[row][:, None] * (x.v[row] - torch.einsum("hvk,hk->hv", decayed, x.k[row]))
    state = decayed + torch.einsum("hv,hk->hvk", u, x.k[row])
    return torch.einsum("hvk,hk->hv", state, x.q[row]), state


def run_sequence(x: Projections, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over consecutive rows.

    Returns:
        Outputs [n, Hv, V] and the state after the last row [Hv, V, K].
    """
    outputs = []
    for row in range(x.q.shape[0]):
        output, state = step(state, x, row)
        outputs.append(output)
    return torch.stack(outputs) if outputs else x.v.new_zeros(x.v.shape), state


def run_tree(
    x: Projections, parents: Sequence[int], state: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The recurrence along every path of a tree, one state per row.

    Args:
        parents: parent row of each row, parents first; -1 for the root.
        state: [Hv, V, K], the state before the root.

    Returns:
        Outputs [n, Hv, V] and the state after each row.
    """
    outputs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for row, parent in enumerate(parents):
        output, after = step(state if parent < 0 else states[parent], x, row)
        outputs.append(output)
        states.append(after)
    return torch.stack(outputs), states


def run_tree_closed_form(
    x: Projections, ancestors: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All rows of a tree from one state, without a state per row.

    With G_i the sum of g over row i and its ancestors,

        A_ij = beta_i exp(G_i - G_j) (k_i . k_j)        for j a strict ancestor of i, else 0
        B_i  = beta_i (v_i - exp(G_i) S^T k_i)
        (I + A) U = B
        o_i  = exp(G_i) S^T q_i + sum_j exp(G_i - G_j) (q_i . k_j) u_j      over i and its ancestors

    Args:
        ancestors: bool [n, n], entry [i, j] true iff j is i or an ancestor of i.
        state: [Hv, V, K].

    Returns:
        Outputs [n, Hv, V], u [n, Hv, V] and G [n, Hv].
    """
    num_rows = x.q.shape[0]
    seen = ancestors.to(x.g.dtype)
    path_decay = torch.einsum("ij,jh->ih", seen, x.g)
    log_ratio = path_decay[:, None] - path_decay[None, :]  # [i, j, Hv]
    ratio = log_ratio.masked_fill(~ancestors[:, :, None], -torch.inf).exp().permute(2, 0, 1)

    beta = x.beta.T[:, :, None]  # [Hv, n, 1]
    growth = path_decay.exp().T[:, :, None]
    q, k, v = (t.transpose(0, 1) for t in (x.q, x.k, x.v))  # [Hv, n, .]
    eye = torch.eye(num_rows, dtype=torch.bool)
    a = (beta * ratio * (k @ k.mT)).masked_fill(eye, 0.0)
    b = beta * (v - growth * (k @ state.mT))
    u = torch.linalg.solve_triangular(a + eye, b, upper=False, unitriangular=True)
    o = growth * (q @ state.mT) + (ratio * (q @ k.mT)) @ u
    return o.transpose(0, 1), u.transpose(0, 1), path_decay


def commit_path(
    x: Projections,
    u: torch.Tensor,
    path_decay: torch.Tensor,
    path: Sequence[int],
    state: torch.Tensor,
) -> torch.Tensor:
    """The state after the rows of a path, from what `run_tree_closed_form` returned.

    S' = exp(G_last) S + sum over j on the path of exp(G_last - G_j) k_j u_j^T
    """
    if not path:
        return state
    rows = list(path)
    last = path_decay[rows[-1]]
    weights = (last - path_decay[rows]).exp()
    update = torch.einsum("jh,jhv,jhk->hvk", weights, u[rows], x.k[rows])
    return last.exp()[:, None, None] * state + update


def conv_tree(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: torch.Tensor,
    parents: Sequence[int],
) -> torch.Tensor:
    """The causal convolution and SiLU of every row of a tree.

    Args:
        x: [n, C], raw rows.
        weight: [C, W], oldest tap first.
        window: [W - 1, C], the inputs before the root, oldest first.

    Returns:
        [n, C], float64.
    """
    num_rows, num_channels = x.shape
    width = weight.shape[1]
    history: list[torch.Tensor] = []
    outputs = x.new_zeros((num_rows, num_channels), dtype=torch.float64)
    for row, parent in enumerate(parents):
        before = window.double() if parent < 0 else history[parent][1:]
        history.append(torch.cat([before, x[row : row + 1].double()]))  # [W, C]
        total = (history[row] * weight.double().T[:width]).sum(0)
        outputs[row] = F.silu(total if bias is None else total + bias.double())
    return outputs


def advance_window(window: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The last W - 1 raw inputs of (window [W - 1, C], rows [m, C])."""
    return torch.cat([window, rows.to(window.dtype)])[-window.shape[0] :]
