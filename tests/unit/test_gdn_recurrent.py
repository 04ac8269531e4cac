# SPDX-License-Identifier: Apache-2.0
"""The sequential form: prefill chunks and decode rows against the recurrence in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gdn_cases import REGIMES, Step, chain, relative_error

from ddtree_vllm.gdn import reference, run_sequences

TOLERANCE = 1e-5
NULL_SLOT = 0


class Batch:
    """Sequences of given lengths, their gates drawn from a regime, and a cache of states."""

    def __init__(self, rng, lengths, *, heads=(1, 2), head_dim=64, regime="mixed", device="cpu"):
        self.lengths, self.heads, self.head_dim, self.device = lengths, heads, head_dim, device
        num_k_heads, num_v_heads = heads
        draw = Step(rng, [chain(1)], device=device)
        (a_mean, a_std), (b_mean, b_std) = REGIMES[regime]
        total, channels = sum(lengths), (2 * num_k_heads + num_v_heads) * head_dim
        self.qkv = draw.normal(total, channels)
        self.a = draw.normal(total, num_v_heads, mean=a_mean, std=a_std)
        self.b = draw.normal(total, num_v_heads, mean=b_mean, std=b_std)
        self.a_log = draw.normal(num_v_heads, std=0.3)
        self.dt_bias = draw.normal(num_v_heads, std=0.3)
        self.state = draw.normal(len(lengths) + 2, num_v_heads, head_dim, head_dim, std=0.3)
        self.slots = [int(s) for s in 1 + rng.permutation(len(lengths) + 1)[: len(lengths)]]
        self.starts = np.cumsum([0, *lengths])
        self.out = torch.full(
            (total, num_v_heads, head_dim), torch.nan, device=device, dtype=torch.float32
        )

    def ints(self, values) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=self.device)

    def run(self, has_initial=None, max_query_len=None) -> None:
        run_sequences(
            self.qkv,
            self.a,
            self.b,
            self.a_log,
            self.dt_bias,
            self.state,
            self.ints(self.slots),
            self.ints(self.starts),
            None if has_initial is None else torch.tensor(has_initial, device=self.device),
            self.out,
            num_k_heads=self.heads[0],
            max_query_len=max_query_len or max(self.lengths),
            null_slot=NULL_SLOT,
        )

    def rows(self, req: int) -> slice:
        return slice(int(self.starts[req]), int(self.starts[req + 1]))

    def expected(self, req: int, initial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows(req)
        x = reference.project(
            *(t[rows].cpu() for t in (self.qkv, self.a, self.b)),
            self.a_log.cpu(),
            self.dt_bias.cpu(),
            self.head_dim,
            self.head_dim,
        )
        return reference.run_sequence(x, initial.cpu().double())


def check(batch: Batch, before: torch.Tensor, has_initial=None) -> None:
    """Outputs and final states of every sequence, and the slots of nobody.

    All sequences at once: a sequence of one row has no other row to measure its error against.
    """
    used, outputs, states = [], [], []
    for req, length in enumerate(batch.lengths):
        if length == 0:
            continue
        slot = batch.slots[req]
        used.append(slot)
        fresh = has_initial is not None and not has_initial[req]
        initial = torch.zeros_like(before[slot]) if fresh else before[slot]
        rows, state = batch.expected(req, initial)
        outputs.append(rows)
        states.append(state)
    assert relative_error(batch.out, torch.cat(outputs)) < TOLERANCE
    assert relative_error(batch.state[used], torch.stack(states)) < TOLERANCE
    for slot in set(range(before.shape[0])) - set(used):
        assert torch.equal(batch.state[slot], before[slot])


@pytest.mark.parametrize("regime", REGIMES)
def test_chunks_equal_the_recurrence(rng, device, regime):
    batch = Batch(rng, [150, 1, 64, 0, 17], regime=regime, device=device)
    before = batch.state.clone()
    batch.run()
    check(batch, before)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [2, 1], [16], [65], [128, 3]])
def test_lengths_around_the_tiles(rng, device, lengths):
    batch = Batch(rng, lengths, head_dim=128, device=device)
    before = batch.state.clone()
    batch.run()
    check(batch, before)


@pytest.mark.usefixtures("gpu_tiles")
def test_chunks_of_a_gpu_compute_the_same(rng, device):
    batch = Batch(rng, [70, 1, 33], head_dim=128, device=device)
    before = batch.state.clone()
    batch.run()
    check(batch, before)


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (2, 4), (1, 3), (2, 6)])
def test_value_heads_share_key_heads(rng, device, heads):
    batch = Batch(rng, [70, 5], heads=heads, device=device)
    before = batch.state.clone()
    batch.run()
    check(batch, before)


def test_a_new_sequence_starts_from_zeros(rng, device):
    """Whatever the slot's last owner left there, not-a-numbers included."""
    batch = Batch(rng, [30, 30], device=device)
    before = batch.state.clone()
    batch.state[batch.slots[1]] = torch.nan
    before[batch.slots[1]] = 0.0
    batch.run(has_initial=[True, False])
    check(batch, before, has_initial=[True, False])


def test_a_sequence_in_chunks_equals_the_whole(rng, device):
    """Chunked prefill: 100 rows at once, and as 37 + 1 + 62."""
    whole = Batch(rng, [100], device=device)
    parts = Batch(rng, [100], device=device)
    for name in ("qkv", "a", "b", "a_log", "dt_bias", "slots"):
        setattr(parts, name, getattr(whole, name))
    parts.state = whole.state.clone()
    whole.run(has_initial=[False])
    inputs = {name: getattr(parts, name) for name in ("qkv", "a", "b")}
    outputs = []
    for start, end in ((0, 37), (37, 38), (38, 100)):
        for name, tensor in inputs.items():
            setattr(parts, name, tensor[start:end])
        parts.starts, parts.lengths = np.array([0, end - start]), [end - start]
        parts.out = torch.empty_like(whole.out[start:end])
        parts.run(has_initial=[start > 0])
        outputs.append(parts.out)
    assert relative_error(torch.cat(outputs), whole.out) < TOLERANCE
    slot = whole.slots[0]
    assert relative_error(parts.state[slot][None], whole.state[slot][None]) < TOLERANCE


def test_decode_gives_the_same_bits_alone_and_in_a_batch(rng, device):
    """A request's tokens must not depend on its neighbours."""
    batch = Batch(rng, [1, 1, 1], device=device)
    before = batch.state.clone()
    batch.run()
    for req in range(3):
        state = before.clone()
        alone = torch.empty_like(batch.out[:1])
        run_sequences(
            batch.qkv[batch.rows(req)],
            batch.a[batch.rows(req)],
            batch.b[batch.rows(req)],
            batch.a_log,
            batch.dt_bias,
            state,
            batch.ints([batch.slots[req]]),
            batch.ints([0, 1]),
            None,
            alone,
            num_k_heads=1,
            max_query_len=1,
        )
        assert torch.equal(alone, batch.out[batch.rows(req)])
        assert torch.equal(state[batch.slots[req]], batch.state[batch.slots[req]])


def test_the_longest_length_may_be_overstated(rng, device):
    """A host that knows only a bound passes the bound."""
    batch = Batch(rng, [1, 5], device=device)
    before = batch.state.clone()
    batch.run(max_query_len=64)
    check(batch, before)


def test_sequences_in_the_null_slot_are_skipped(rng, device):
    batch = Batch(rng, [4, 4], device=device)
    batch.slots[0] = NULL_SLOT
    before = batch.state.clone()
    batch.run()
    assert torch.equal(batch.state[NULL_SLOT], before[NULL_SLOT])
    assert batch.out[batch.rows(0)].isnan().all()
    assert batch.out[batch.rows(1)].isfinite().all()


def test_long_sequences_of_slow_decay(rng, device):
    """700 rows: the sums of g within a chunk must not cost digits."""
    batch = Batch(rng, [700], regime="slow decay, beta near 1", device=device)
    before = batch.state.clone()
    batch.run()
    check(batch, before)


def test_verification_continues_a_prefill(rng, device):
    """A cut state equals a prefill of the same tokens: prefill 40, then a path that adds 6."""
    step = Step(rng, [chain(9)], device=device)
    layer = step.layers[0]
    slot = int(step.state_slots[0])
    prompt = Batch(rng, [40], device=device)
    prompt.a_log, prompt.dt_bias = layer.a_log, layer.dt_bias
    prompt.slots, prompt.state = [slot], layer.state
    prompt.run(has_initial=[False])
    step.verify()
    free = next(s for s in range(1, step.num_state_slots) if s != slot)
    step.commit([list(range(9))], cuts=[(6, free)])

    joined = Batch(rng, [46], device=device)
    joined.a_log, joined.dt_bias = layer.a_log, layer.dt_bias
    rows = slice(int(step.row_start[0]), int(step.row_start[0]) + 6)
    joined.qkv = torch.cat([prompt.qkv, step.conv_out[0][rows]])
    joined.a = torch.cat([prompt.a, layer.a[rows]])
    joined.b = torch.cat([prompt.b, layer.b[rows]])
    joined.run(has_initial=[False])
    kept, prefilled = layer.state[free], joined.state[joined.slots[0]]
    assert relative_error(kept[None], prefilled[None]) < TOLERANCE
