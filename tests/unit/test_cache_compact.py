# SPDX-License-Identifier: Apache-2.0
"""After compaction the accepted path lies at the front of the step's slots, byte for byte."""

import numpy as np
import pytest
import torch

from ddtree_vllm.cache import KVCacheTable, compact_accepted_kv
from ddtree_vllm.cache.compact import compact_accepted_kv_reference


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype):
    """Every bit pattern, those of NaN included: nothing may be interpreted on the way."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


def make_caches(rng, device, num_layers, num_blocks, block_size, num_heads, head_dim, dtype):
    """Layers of one [blocks, heads, block_size, 2 D] buffer each, and their (key, value) views."""
    buffers = [
        random_bytes(rng, (num_blocks, num_heads, block_size, 2 * head_dim), dtype).to(device)
        for _ in range(num_layers)
    ]
    return buffers, [kv_views(buffer, head_dim) for buffer in buffers]


def kv_views(buffer: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = buffer.transpose(1, 2).split(head_dim, dim=-1)
    return key, value


def make_slots(rng, rows_of: list[int], num_blocks: int, block_size: int) -> torch.Tensor:
    """Slots of requests whose rows start anywhere in a block and run into further blocks."""
    free = list(rng.permutation(num_blocks))
    slots: list[int] = []
    for rows in rows_of:
        first = int(rng.integers(0, block_size))
        blocks = [free.pop() for _ in range(-(-(first + rows) // block_size))]
        for position in range(first, first + rows):
            slots.append(int(blocks[position // block_size]) * block_size + position % block_size)
    return torch.tensor(slots, dtype=torch.int64)


def random_path(rng: np.random.Generator, rows: int, length: int) -> list[int]:
    return [0, *sorted(rng.permutation(np.arange(1, rows))[: length - 1].tolist())]


def padded(paths: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([p + [-1] * (width - len(p)) for p in paths], dtype=torch.int32)


def as_bytes(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    return [buffer.cpu().view(torch.uint8) for buffer in buffers]


def check(buffers, views, paths, rows_of, slots, device, max_path=32) -> None:
    """Runs the kernel and the reference; compares every byte of every layer."""
    head_dim = views[0][0].shape[-1]
    expected = [buffer.cpu().clone() for buffer in buffers]
    path = padded(paths, max_path)
    path_len = torch.tensor([len(p) for p in paths], dtype=torch.int32)
    starts = torch.tensor(np.concatenate([[0], np.cumsum(rows_of)]), dtype=torch.int32)
    compact_accepted_kv_reference(
        [view for buffer in expected for view in kv_views(buffer, head_dim)],
        path,
        path_len,
        starts,
        slots,
    )
    compact_accepted_kv(
        KVCacheTable.build(views), *(t.to(device) for t in (path, path_len, starts, slots))
    )
    for actual, wanted in zip(as_bytes(buffers), as_bytes(expected), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("block_size", "num_heads", "head_dim"), [(16, 1, 64), (7, 3, 16)])
def test_random_paths_equal_the_reference(rng, device, dtype, block_size, num_heads, head_dim):
    rows_of = [32, 5, 1, 20, 0, 32]
    lengths = [9, 5, 1, 2, 0, 17]  # 17: more than one run of moves
    paths = [random_path(rng, n, k) if k else [] for n, k in zip(rows_of, lengths, strict=True)]
    buffers, views = make_caches(rng, device, 2, 40, block_size, num_heads, head_dim, dtype)
    slots = make_slots(rng, rows_of, 40, block_size)
    check(buffers, views, paths, rows_of, slots, device)


def test_moves_whose_targets_are_later_sources(rng, device):
    """Path 0, 2, 3, 4, ...: each row moves to where the previous one was read from."""
    buffers, views = make_caches(rng, device, 1, 6, 16, 1, 64, torch.float32)
    path = [0, *range(2, 32)]
    check(buffers, views, [path], [32], make_slots(rng, [32], 6, 16), device)


def test_the_longest_path(rng, device):
    """A chain of 127 nodes whose first is rejected in favour of its sibling."""
    buffers, views = make_caches(rng, device, 1, 12, 16, 2, 16, torch.float32)
    path = [0, *range(2, 128)]
    slots = make_slots(rng, [128], 12, 16)
    check(buffers, views, [path], [128], slots, device, max_path=128)


def test_a_path_across_a_block_edge(device):
    """Rows at positions 14 to 21, blocks of 16: rows 0 and 1 in one, the others in the next."""
    cache = torch.arange(3 * 16, dtype=torch.float32, device=device).reshape(3, 16, 1, 1)
    cache = cache.repeat(1, 1, 1, 16)
    key, value = cache.clone(), -cache
    slots = torch.tensor([2 * 16 + 14, 2 * 16 + 15, *range(16, 22)], device=device)
    path = torch.tensor([[0, 3, 4, 7]], dtype=torch.int32, device=device)
    compact_accepted_kv(
        KVCacheTable.build([(key, value)]),
        path,
        torch.tensor([4], dtype=torch.int32, device=device),
        torch.tensor([0, 8], dtype=torch.int32, device=device),
        slots,
    )
    flat = key[..., 0].flatten()
    # Row 3's slot 17 goes to row 1's, 47, row 4's slot 18 to row 2's, 16, row 7's slot 21 to 17.
    assert flat[[46, 47, 16, 17]].tolist() == [46.0, 17.0, 18.0, 21.0]
    assert flat[18:22].tolist() == [18.0, 19.0, 20.0, 21.0]
    assert torch.equal(value, -key)


def test_spine_and_rejected_and_padded_steps_move_nothing(rng, device):
    buffers, views = make_caches(rng, device, 2, 12, 16, 1, 64, torch.bfloat16)
    before = [b.clone() for b in as_bytes(buffers)]
    rows_of = [16, 16, 16, 0]
    paths = [list(range(9)), [0], [], []]
    check(buffers, views, paths, rows_of, make_slots(rng, rows_of, 12, 16), device)
    for actual, wanted in zip(as_bytes(buffers), before, strict=True):
        assert torch.equal(actual, wanted)


def test_rows_without_a_slot_are_left_out(rng, device):
    buffers, views = make_caches(rng, device, 1, 4, 16, 1, 64, torch.float32)
    slots = make_slots(rng, [8], 4, 16)
    slots[2] = slots[6] = -1
    check(buffers, views, [[0, 3, 5, 6]], [8], slots, device)


def test_a_table_needs_caches_that_agree(device):
    cache = torch.zeros(2, 16, 1, 64, device=device)
    with pytest.raises(ValueError, match="no attention layers"):
        KVCacheTable.build([])
    with pytest.raises(ValueError, match="agree"):
        KVCacheTable.build([(cache, cache.clone()), (cache.bfloat16(), cache.clone())])
    with pytest.raises(ValueError, match="agree"):
        KVCacheTable.build([(cache, torch.zeros(2, 16, 2, 64, device=device)[:, :, :1])])


def test_rows_move_as_the_widest_words_that_fit(device):
    fp8 = torch.zeros(2, 16, 1, 64, dtype=torch.uint8, device=device)
    assert KVCacheTable.build([(fp8, fp8.clone())]).word_bytes == 4
    odd = torch.zeros(2, 16, 1, 65, dtype=torch.bfloat16, device=device)[..., :64]
    assert KVCacheTable.build([(odd, odd)]).word_bytes == 2
