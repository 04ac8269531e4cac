# SPDX-License-Identifier: Apache-2.0
"""Top-k with log-softmax: values, order among equals, edges of the vocabulary."""

import math

import pytest
import torch

from ddtree_vllm.tree import top_k_log_probs
from ddtree_vllm.tree.candidates import top_k_log_probs_reference


@pytest.mark.parametrize(
    ("rows", "vocab", "k"),
    [(1, 1, 1), (3, 7, 7), (15, 1000, 8), (2, 4096, 4), (5, 4097, 8), (2, 20_000, 40)],
)
def test_equals_log_softmax_and_stable_sort(rows, vocab, k, torch_rng, device):
    logits = torch.randn(rows, vocab, generator=torch_rng).mul(4).to(device)
    log_probs, tokens = top_k_log_probs(logits, k)
    expected, order = top_k_log_probs_reference(logits, k)
    assert log_probs.dtype == torch.float32
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, order)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_go_to_the_lower_token_id(dtype, torch_rng, device):
    logits = torch.randint(-2, 3, (4, 9000), generator=torch_rng).to(dtype).to(device)
    _, tokens = top_k_log_probs(logits, 30)
    for row in range(4):
        top = (logits[row] == 2).nonzero().flatten()
        assert torch.equal(tokens[row], top[:30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negative_zero_ties_with_zero(dtype, device):
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]], dtype=dtype, device=device)
    assert top_k_log_probs(logits, 4)[1].tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, -40.0])
def test_half_precision_logits_keep_their_values(dtype, mean, torch_rng, device):
    logits = torch.randn(3, 5000, generator=torch_rng).mul(3).add(mean).to(dtype).to(device)
    log_probs, tokens = top_k_log_probs(logits, 20)
    expected, order = top_k_log_probs_reference(logits, 20)
    assert torch.equal(tokens, order)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=5e-6)


def test_result_is_sorted_and_never_above_zero(torch_rng, device):
    """What the tree builder takes at its word, also where one token has all the mass."""
    logits = torch.randn(8, 6000, generator=torch_rng)
    logits[:, 123] += torch.tensor([0, 5, 10, 20, 40, 80, 200, 1000.0])
    log_probs, tokens = top_k_log_probs(logits.to(device), 8)
    assert (log_probs <= 0).all()
    assert (log_probs[:, 1:] <= log_probs[:, :-1]).all()
    assert tokens[-1, 0] == 123
    assert log_probs[-1, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_tokens_come_last_with_minus_infinity(dtype, device):
    logits = torch.full((2, 5000), -math.inf, dtype=dtype, device=device)
    logits[0, 4321] = 1.5
    logits[0, 7] = 1.5
    log_probs, tokens = top_k_log_probs(logits, 4)
    assert tokens[0].tolist() == [7, 4321, 0, 1]
    half = pytest.approx(-math.log(2), abs=1e-6)
    assert log_probs[0].tolist() == [half, half, -math.inf, -math.inf]
    assert log_probs[1].tolist() == [-math.inf] * 4


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_a_row_with_nan_has_nan_log_probs_and_others_are_unharmed(device):
    logits = torch.tensor([[0.0, math.nan, 1.0], [0.0, 1.0, 2.0]], device=device)
    log_probs, tokens = top_k_log_probs(logits, 2)
    assert log_probs[0].isnan().all()
    assert tokens[1].tolist() == [2, 1]


def test_rows_may_be_part_of_wider_rows(torch_rng, device):
    padded = torch.randn(4, 640, generator=torch_rng).to(device)
    logits = padded[:, :600]
    padded[:, 600:] = 100.0
    assert torch.equal(top_k_log_probs(logits, 5)[1], top_k_log_probs_reference(logits, 5)[1])


def test_no_rows_is_no_work(device):
    log_probs, tokens = top_k_log_probs(torch.zeros(0, 50, device=device), 3)
    assert log_probs.shape == tokens.shape == (0, 3)


def test_bad_input_is_refused_in_a_sentence(device):
    logits = torch.zeros(2, 5, device=device)
    for k in (0, 6):
        with pytest.raises(ValueError, match=f"between 1 and the vocabulary size 5, not {k}"):
            top_k_log_probs(logits, k)
    for bad in (logits[0], logits.long(), logits.T):
        with pytest.raises(ValueError, match="float matrix"):
            top_k_log_probs(bad, 2)
