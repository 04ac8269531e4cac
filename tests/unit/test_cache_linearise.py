# SPDX-License-Identifier: Apache-2.0
"""After linearising, a request's first rows are its accepted path, in order."""

import numpy as np
import pytest
import torch

from ddtree_vllm.cache import linearise_rows
from ddtree_vllm.cache.linearise import linearise_rows_reference


def check(tensors, paths, rows_of, device, max_path=32) -> None:
    path = torch.tensor([p + [-1] * (max_path - len(p)) for p in paths], dtype=torch.int32)
    path_len = torch.tensor([len(p) for p in paths], dtype=torch.int32)
    starts = torch.tensor(np.concatenate([[0], np.cumsum(rows_of)]), dtype=torch.int32)
    expected = [t.clone() for t in tensors]
    linearise_rows_reference(expected, path, path_len, starts)
    on_device = [t.to(device) for t in tensors]
    linearise_rows(on_device, *(t.to(device) for t in (path, path_len, starts)))
    for actual, wanted in zip(on_device, expected, strict=True):
        assert torch.equal(actual.cpu(), wanted)


def random_rows(rng, count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((count, width))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_paths_equal_the_reference(rng, device, dtype):
    rows_of = [32, 6, 1, 0, 20, 32]
    lengths = [16, 3, 1, 0, 1, 30]  # 30: more than one run of moves
    paths = [
        [0, *sorted(rng.permutation(np.arange(1, n))[: k - 1].tolist())] if k else []
        for n, k in zip(rows_of, lengths, strict=True)
    ]
    # Hidden states and auxiliary hidden states, with rows of padding after the last request.
    tensors = [random_rows(rng, sum(rows_of) + 5, 96, dtype) for _ in range(4)]
    check(tensors, paths, rows_of, device)


def test_tensors_of_different_kinds_in_one_call(rng, device):
    tensors = [
        random_rows(rng, 12, 64),
        random_rows(rng, 12, 100),
        random_rows(rng, 12, 64, torch.bfloat16),
        random_rows(rng, 12, 128)[:, :64],
        random_rows(rng, 12, 64),
    ]
    check(tensors, [[0, 2, 3, 5], [0, 4]], [7, 5], device)


def test_every_row_moves_to_where_the_previous_one_was_read(rng, device):
    check([random_rows(rng, 128, 48)], [[0, *range(2, 128)]], [128], device, max_path=128)


def test_requests_without_a_path_are_left_alone(rng, device):
    """Prefill chunks, rejected drafts and padding keep their rows."""
    tensor = random_rows(rng, 30, 64)
    before = tensor.clone()
    check([tensor], [[], [0], []], [10, 20, 0], device)
    assert torch.equal(tensor, before)


def test_only_rows_of_hidden_states_are_taken(device):
    path = torch.zeros(1, 4, dtype=torch.int32, device=device)
    length = torch.ones(1, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="rows of hidden states"):
        linearise_rows([torch.zeros(4, 8, 2, device=device)], path, length, starts)
    with pytest.raises(ValueError, match="rows of hidden states"):
        linearise_rows([torch.zeros(8, 4, device=device).T], path, length, starts)
