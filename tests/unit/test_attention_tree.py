# SPDX-License-Identifier: Apache-2.0
"""Tree attention against its float64 reference, over random trees, caches and batches."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from ddtree_vllm.attention import Tiles, tree_attention, tree_suffix_attention
from ddtree_vllm.attention.reference import (
    merge_attention_reference,
    tree_attention_reference,
    visible_keys,
)
from ddtree_vllm.attention.tiles import choose_suffix_tiles, choose_tiles

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass
class Request:
    prefix: int
    rows: int
    # Local row -> parent's local row, parents first; None: a linear request.
    parents: list[int] | None = None
    seq_len: int | None = None  # None: prefix + rows


@dataclass
class Batch:
    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    out: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float
    ancestors: torch.Tensor | None
    slots: torch.Tensor | None
    max_query_len: int
    max_seq_len: int

    def run(self, unwritten: float = float("nan"), **options) -> torch.Tensor:
        """The kernel's output; rows it did not write are `unwritten`."""
        out = self.out.fill_(unwritten)
        return tree_attention(
            self.q,
            self.key_cache,
            self.value_cache,
            out,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            **self._shared(),
            **options,
        )

    def run_suffix(self, **options) -> torch.Tensor:
        out = self.out.fill_(float("nan"))
        return tree_suffix_attention(
            self.q,
            self.key_cache,
            self.value_cache,
            out,
            max_query_len=self.max_query_len,
            **self._shared(),
            **options,
        )

    def reference(self, **options) -> tuple[torch.Tensor, torch.Tensor]:
        return tree_attention_reference(
            self.q, self.key_cache, self.value_cache, **self._shared(), **options
        )

    def _shared(self) -> dict:
        return {
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
            "scale": self.scale,
            "ancestors": self.ancestors,
            "slots": self.slots,
        }


def random_tree(rng: np.random.Generator, rows: int) -> list[int]:
    """Parents of a random tree, root first; bushy or deep by chance."""
    reach = int(rng.integers(1, 8))
    return [-1] + [int(rng.integers(max(0, i - reach), i)) for i in range(1, rows)]


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def ancestor_words(parents: list[int], num_rows: int) -> torch.Tensor:
    """int32 [num_rows, W]; rows past the tree carry their own bit, as padding does."""
    seen = np.zeros((num_rows, 32 * -(-num_rows // 32)), dtype=bool)
    for row in range(num_rows):
        if row < len(parents) and parents[row] >= 0:
            seen[row] = seen[parents[row]]
        seen[row, row] = True
    packed = np.packbits(seen, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(packed.copy())


def make_batch(
    rng: np.random.Generator,
    device: torch.device,
    requests: list[Request],
    *,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 64,
    block_size: int = 16,
    tree_rows: int = 32,
    dtype: torch.dtype = torch.float32,
    spare_tokens: int = 0,
) -> Batch:
    """Random queries and a random paged cache: blocks in random order, unused slots NaN."""
    num_heads, num_kv_heads = heads
    rows = [r.rows for r in requests]
    seq_lens = [r.prefix + r.rows if r.seq_len is None else r.seq_len for r in requests]
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)

    blocks_of = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(blocks_of) + 1  # block 0 is nobody's
    table = np.zeros((len(requests), max([1, *blocks_of])), dtype=np.int32)
    free = rng.permutation(np.arange(1, num_blocks))
    # vLLM's layout: heads outside positions, keys beside values.
    cache = torch.full(
        (num_blocks, num_kv_heads, block_size, 2 * head_dim), float("nan"), dtype=dtype
    )
    for i, (count, seq_len) in enumerate(zip(blocks_of, seq_lens, strict=True)):
        table[i, :count], free = free[:count], free[count:]
        for j in range(count):
            filled = min(block_size, seq_len - j * block_size)
            cache[table[i, j], :, :filled] = normal(num_kv_heads, filled, 2 * head_dim)
    key_cache, value_cache = cache.to(device).transpose(1, 2).split(head_dim, dim=-1)

    # Tree slots in an order of their own, more of them than requests.
    num_slots = len(requests) + 2
    slots = rng.permutation(num_slots)[: len(requests)].astype(np.int32)
    ancestors = torch.zeros(num_slots, tree_rows, -(-tree_rows // 32), dtype=torch.int32)
    for i, request in enumerate(requests):
        if request.parents is None:
            slots[i] = -1
        else:
            ancestors[slots[i]] = ancestor_words(request.parents, tree_rows)
    has_trees = bool((slots >= 0).any())

    q = normal(int(starts[-1]) + spare_tokens, num_heads, head_dim).to(device)
    return Batch(
        q=q,
        key_cache=key_cache,
        value_cache=value_cache,
        out=torch.empty_like(q),
        block_table=torch.from_numpy(table).to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        query_start_loc=torch.from_numpy(starts).to(device),
        scale=head_dim**-0.5,
        ancestors=ancestors.to(device) if has_trees else None,
        slots=torch.from_numpy(slots).to(device) if has_trees else None,
        max_query_len=max(rows),
        max_seq_len=max(seq_lens),
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None):
    """Equal within tolerance, and written exactly where expected is not NaN."""
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    assert torch.equal(actual.isnan().cpu(), expected.isnan().cpu())
    torch.testing.assert_close(
        actual.double().cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "block_size"), [((1, 1), 16), ((4, 2), 7), ((6, 1), 33)])
def test_random_trees_equal_the_reference(rng, device, head_dim, heads, block_size):
    requests = [
        Request(prefix, rows, random_tree(rng, rows))
        for prefix, rows in zip(rng.integers(1, 200, 3).tolist(), (1, 17, 32), strict=True)
    ]
    batch = make_batch(rng, device, requests, heads=heads, head_dim=head_dim, block_size=block_size)
    assert_close(batch.run(), batch.reference()[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(rng, device, dtype):
    requests = [Request(70, 20, random_tree(rng, 20)), Request(0, 30)]
    batch = make_batch(rng, device, requests, heads=(6, 1), dtype=dtype)
    assert_close(batch.run(), batch.reference()[0])


def test_the_largest_tree(rng, device):
    """N = 127: four words of ancestors."""
    batch = make_batch(
        rng, device, [Request(150, 128, random_tree(rng, 128))], heads=(6, 1), tree_rows=128
    )
    assert_close(batch.run(), batch.reference()[0])


def test_a_chain_is_causal_attention(rng, device):
    requests = [Request(90, 32, chain(32)), Request(3, 9, chain(9))]
    batch = make_batch(rng, device, requests)
    as_tree = batch.run().clone()
    as_linear = replace(batch, ancestors=None, slots=None)
    assert_close(as_tree, as_linear.reference()[0])
    torch.testing.assert_close(as_tree, as_linear.run(), rtol=0, atol=1e-6)


def test_a_long_prefix_and_a_block_size_of_hybrids(rng, device):
    requests = [Request(2900, 8, random_tree(rng, 8)), Request(784, 8, random_tree(rng, 8))]
    batch = make_batch(rng, device, requests, block_size=784)
    assert_close(batch.run(), batch.reference()[0])


def test_trees_and_linear_requests_and_padding_in_one_batch(rng, device):
    requests = [
        Request(40, 32, random_tree(rng, 32)),
        Request(0, 75),  # a prompt
        Request(64, 50),  # a chunk of a prompt
        Request(0, 0, seq_len=0),  # padded
        Request(33, 1),  # a decode without drafts
        Request(50, 5, random_tree(rng, 32)),  # a tree cut to its first 5 rows
        Request(0, 0, seq_len=0),
    ]
    batch = make_batch(rng, device, requests, heads=(4, 1), spare_tokens=6)
    out = batch.run()
    assert_close(out, batch.reference()[0])
    assert out[-6:].isnan().all(), "tokens of no request were written"


def test_rows_without_a_sequence_are_padding(rng, device):
    requests = [Request(20, 4, random_tree(rng, 4)), Request(0, 3, seq_len=0)]
    batch = make_batch(rng, device, requests)
    expected, _ = batch.reference()
    expected[4:] = 7.0
    assert_close(batch.run(unwritten=7.0), expected)


def test_a_truncated_tree_is_the_whole_tree_without_its_last_rows(rng, device):
    parents = random_tree(rng, 32)
    whole = make_batch(rng, device, [Request(45, 32, parents)])
    full = whole.run().clone()
    cut = replace(
        whole,
        q=whole.q[:11],
        out=torch.empty_like(whole.q[:11]),
        query_start_loc=torch.tensor([0, 11], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([45 + 11], dtype=torch.int32, device=device),
        max_query_len=11,
    )
    torch.testing.assert_close(cut.run(), full[:11], rtol=0, atol=1e-6)


def test_siblings_do_not_see_each_other(rng, device):
    """Changing a node's key and value changes its subtree's outputs and no other's."""
    parents = [-1, 0, 0, 1, 1, 2, 3]
    batch = make_batch(rng, device, [Request(10, 7, parents)])
    before = batch.run().clone()
    position = 10 + 1
    block = int(batch.block_table[0, position // 16])
    batch.value_cache[block, position % 16] += 1.0
    changed = (batch.run() != before).flatten(1).any(dim=1)
    assert changed.tolist() == [False, True, False, True, True, False, True]


def test_order_of_rows_does_not_matter_as_long_as_parents_come_first(rng, device):
    rows, prefix = 24, 37
    parents = random_tree(rng, rows)
    batch = make_batch(rng, device, [Request(prefix, rows, parents)])
    before = batch.run().clone()

    # A random order that keeps parents first: draw among the rows whose parent is placed.
    order = [0]
    while len(order) < rows:
        ready = [i for i in range(rows) if i not in order and parents[i] in order]
        order.append(int(rng.choice(ready)))
    place = {row: i for i, row in enumerate(order)}
    permuted = [-1] + [place[parents[row]] for row in order[1:]]

    position = torch.arange(prefix, prefix + rows, device=device)
    block = batch.block_table[0, position // 16].long()
    for cache in (batch.key_cache, batch.value_cache):
        cache[block, position % 16] = cache[block, position % 16][order]
    batch.ancestors[batch.slots[0]] = ancestor_words(permuted, 32).to(device)
    after = replace(batch, q=batch.q[order].contiguous()).run()
    torch.testing.assert_close(after, before[order], rtol=0, atol=2e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 5, 16, 100])
def test_linear_attention_of_a_drafter(rng, device, causal, window):
    requests = [Request(120, 16), Request(3, 16), Request(0, 40), Request(0, 0, seq_len=0)]
    batch = make_batch(rng, device, requests, heads=(4, 2), block_size=24)
    expected, _ = batch.reference(causal=causal, window=window)
    assert_close(batch.run(causal=causal, window=window), expected)
    # Tiles smaller than the window, and than the rows.
    small = Tiles(block_m=16, block_n=16, block_suffix=16)
    assert_close(batch.run(causal=causal, window=window, tiles=small), expected)


@pytest.mark.usefixtures("gpu_tiles")
@pytest.mark.parametrize("rows", [5, 20])
def test_tiles_of_a_gpu_compute_the_same(rng, device, rows):
    trees = [Request(prefix, rows, random_tree(rng, rows)) for prefix in (700, 33)]
    # Tiles of bfloat16, which a GPU serves; on one, they hold no float32.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch = make_batch(rng, device, trees, heads=(6, 1), head_dim=256, block_size=56, dtype=dtype)
    whole = choose_tiles(rows, 6, 256, torch.bfloat16, 720)
    suffix = choose_suffix_tiles(rows, 6, 256, torch.bfloat16)
    expected, _ = batch.reference()
    for num_splits in (1, 2):
        assert_close(batch.run(tiles=whole, num_splits=num_splits), expected)
    assert_close(batch.run_suffix(tiles=suffix), batch.reference(part="suffix")[0])


def test_window_counts_keys_as_flash_attention_does():
    """(w - 1, 0) where causal, (w - 1, w - 1) where not."""
    causal = visible_keys(4, 10, window=3)
    assert causal[0].nonzero().flatten().tolist() == [4, 5, 6]
    both = visible_keys(4, 10, causal=False, window=3)
    assert both[0].nonzero().flatten().tolist() == [4, 5, 6, 7, 8]
    assert both[3].nonzero().flatten().tolist() == [7, 8, 9]


@pytest.mark.parametrize("num_splits", [2, 5])
def test_splitting_the_keys_changes_nothing(rng, device, num_splits):
    requests = [
        Request(1350, 12, random_tree(rng, 12)),
        Request(300, 12, random_tree(rng, 12)),  # fewer keys than splits are worth
        Request(0, 5),
        Request(0, 0, seq_len=0),
        Request(600, 3),
    ]
    batch = make_batch(rng, device, requests, heads=(3, 1), block_size=56, spare_tokens=2)
    tiles = Tiles(block_m=64, block_n=64, block_suffix=16)
    whole = batch.run(tiles=tiles).clone()
    assert_close(whole, batch.reference()[0])
    split = batch.run(tiles=tiles, num_splits=num_splits)
    assert_close(split, whole.double().cpu(), tolerance=2e-6)


def test_splits_with_a_window(rng, device):
    batch = make_batch(rng, device, [Request(1000, 16), Request(20, 16)])
    tiles = Tiles(block_m=32, block_n=32, block_suffix=16)
    for causal in (True, False):
        expected, _ = batch.reference(causal=causal, window=800)
        out = batch.run(causal=causal, window=800, tiles=tiles, num_splits=3)
        assert_close(out, expected)


def test_trees_only_leaves_linear_requests_alone(rng, device):
    requests = [Request(900, 9, random_tree(rng, 9)), Request(0, 60), Request(12, 1)]
    batch = make_batch(rng, device, requests)
    batch.max_query_len = 9  # bounds the trees alone
    expected, _ = batch.reference()
    expected[9:] = float("nan")
    assert_close(batch.run(trees_only=True), expected)
    tiles = Tiles(block_m=32, block_n=64, block_suffix=16)
    assert_close(batch.run(trees_only=True, num_splits=2, tiles=tiles), expected)
    suffix, _ = batch.reference(part="suffix")
    suffix[9:] = float("nan")
    assert_close(batch.run_suffix(trees_only=True), suffix)


def prefix_by_another_kernel(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """What FlashAttention would hand over: out, and log-sum-exp in float32."""
    out, lse = batch.reference(part="prefix")
    device = batch.q.device
    return out.to(batch.q.dtype).to(device), lse.float().to(device)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_suffix_and_prefix_merged_equal_the_whole(rng, device, head_dim):
    requests = [
        Request(80, 32, random_tree(rng, 32)),
        Request(41, 20),  # a chunk of a prompt
        Request(0, 0, seq_len=0),
        Request(17, 6, random_tree(rng, 32)),
    ]
    batch = make_batch(rng, device, requests, heads=(4, 2), head_dim=head_dim, spare_tokens=1)
    out, lse = prefix_by_another_kernel(batch)
    merged_lse = torch.full_like(lse, float("nan"))
    merged = batch.run_suffix(prefix_out=out, prefix_lse=lse, lse=merged_lse)
    expected, expected_lse = batch.reference()
    assert_close(merged, expected)
    assert_close(merged_lse, expected_lse)


def test_suffix_alone_gives_the_parts_of_a_merge(rng, device):
    batch = make_batch(rng, device, [Request(80, 32, random_tree(rng, 32)), Request(9, 4)])
    suffix_lse = torch.empty(2, batch.q.shape[0], device=device)
    suffix = batch.run_suffix(lse=suffix_lse)
    expected, expected_lse = batch.reference(part="suffix")
    assert_close(suffix, expected)
    assert_close(suffix_lse, expected_lse)
    prefix, prefix_lse = batch.reference(part="prefix")
    merged, merged_lse = merge_attention_reference(
        prefix, prefix_lse, suffix.cpu(), suffix_lse.cpu()
    )
    whole, whole_lse = batch.reference()
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged_lse, whole_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("empty_lse", [float("-inf"), float("inf"), float("nan"), 3.0])
def test_an_empty_prefix_is_not_read(rng, device, empty_lse):
    """Kernels differ in what they leave for a row without keys."""
    batch = make_batch(rng, device, [Request(0, 14), Request(25, 3, chain(3))])
    out, lse = prefix_by_another_kernel(batch)
    out[:14] = float("nan")
    lse[:, :14] = empty_lse
    merged = batch.run_suffix(prefix_out=out, prefix_lse=lse)
    assert_close(merged, batch.reference()[0])


def test_merging_in_place(rng, device):
    batch = make_batch(rng, device, [Request(60, 12, random_tree(rng, 12))])
    out, lse = prefix_by_another_kernel(batch)
    tree_suffix_attention(
        batch.q,
        batch.key_cache,
        batch.value_cache,
        out,
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        max_query_len=12,
        scale=batch.scale,
        ancestors=batch.ancestors,
        slots=batch.slots,
        prefix_out=out,
        prefix_lse=lse,
    )
    assert_close(out, batch.reference()[0])


def test_large_scores_do_not_overflow(rng, device):
    batch = make_batch(rng, device, [Request(30, 8, random_tree(rng, 8))])
    batch.q.mul_(300.0)
    assert_close(batch.run(), batch.reference()[0], tolerance=1e-3)


def test_what_does_not_fit_is_refused(rng, device):
    batch = make_batch(rng, device, [Request(20, 4, random_tree(rng, 4))], heads=(4, 2))
    with pytest.raises(ValueError, match="no sliding window"):
        batch.run(window=8)
    with pytest.raises(ValueError, match="causal"):
        batch.run(causal=False)
    with pytest.raises(ValueError, match="ancestors and slots go together"):
        replace(batch, slots=None).run()
    with pytest.raises(ValueError, match="one dtype"):
        replace(batch, q=batch.q.bfloat16()).run()
    with pytest.raises(ValueError, match="do not fit a cache"):
        replace(batch, q=batch.q[:, :3], out=batch.out[:, :3]).run()
    with pytest.raises(ValueError, match="head_dim"):
        replace(batch, q=batch.q[..., :48], out=batch.out[..., :48]).run()
    with pytest.raises(ValueError, match="scale"):
        replace(batch, scale=0.0).run()
    with pytest.raises(ValueError, match="too few"):
        replace(batch, ancestors=batch.ancestors.repeat(1, 2, 1)).run()
    with pytest.raises(ValueError, match="go together"):
        batch.run_suffix(prefix_out=batch.q)
    with pytest.raises(ValueError, match="trees_only"):
        replace(batch, ancestors=None, slots=None).run(trees_only=True)
