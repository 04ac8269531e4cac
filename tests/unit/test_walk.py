# SPDX-License-Identifier: Apache-2.0
"""The walk against its reference, and against what makes it lossless."""

import pytest
import torch

from ddtree_vllm.sampling.walk import WalkOutput, _launch, walk_reference, walk_trees
from ddtree_vllm.tree import BestFirst, DraftTree, build_draft_trees, make_policy

VOCAB = 6


def random_trees(
    rng: torch.Generator, num_slots: int, budget: int, depth: int, candidates: int, device
) -> DraftTree:
    """A tree in every slot, with few different tokens, so that walks get somewhere."""
    log_probs = torch.randn(num_slots, depth, candidates, generator=rng).log_softmax(-1)
    log_probs = log_probs.sort(dim=-1, descending=True).values
    order = torch.rand(num_slots, depth, VOCAB, generator=rng).argsort(dim=-1)
    tree = DraftTree.allocate(num_slots, budget, device, depth)
    slots = torch.arange(num_slots, dtype=torch.int32, device=device)
    tokens = order[..., :candidates].contiguous()
    build_draft_trees(tree, log_probs.to(device), tokens.to(device), slots, BestFirst())
    return tree


def starts(rows: list[int], device) -> torch.Tensor:
    ends = torch.tensor([0, *rows]).cumsum(0)
    return ends.to(torch.int32).to(device)


def int32(values: list[int], device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def expected_path(tree: DraftTree, slot: int, sampled: list[int]) -> list[int]:
    n = int(tree.num_nodes[slot])
    return walk_reference(tree.parents[slot].tolist(), tree.tokens[slot].tolist(), sampled[: n + 1])


def assert_walked(output: WalkOutput, request: int, path: list[int], sampled: list[int]) -> None:
    rest = [-1] * (output.path.shape[1] - len(path))
    assert output.path[request].tolist() == path + rest
    assert int(output.path_len[request]) == len(path)
    assert output.sampled_tokens[request].tolist() == [sampled[row] for row in path] + rest
    assert int(output.num_sampled[request]) == len(path)


def assert_nothing_to_commit(output: WalkOutput, request: int) -> None:
    assert (output.path[request] == -1).all()
    assert int(output.path_len[request]) == 0


@pytest.mark.parametrize(("budget", "depth", "candidates"), [(7, 3, 2), (31, 15, 3), (127, 15, 4)])
@pytest.mark.parametrize("block_r", [1, 8])
def test_equals_reference_over_a_batch_with_truncated_trees(
    budget, depth, candidates, block_r, torch_rng, device
):
    requests = 6
    tree = random_trees(torch_rng, 8, budget, depth, candidates, device)
    slots = torch.randperm(8, generator=torch_rng)[:requests].tolist()
    rows = torch.randint(1, budget + 2, (requests,), generator=torch_rng).tolist()
    rows[:2] = [budget + 1, 1]
    cu_num_logits = starts(rows, device)
    sampled = torch.randint(0, VOCAB, (sum(rows),), generator=torch_rng).to(device)
    # One request follows the tree as deep as it goes: the target samples the spine.
    spine = tree.tokens[slots[0], 0]
    sampled[0] = spine
    output = WalkOutput.allocate(requests, budget, device)
    _launch(
        tree, int32(slots, device), cu_num_logits, sampled, output, tree_rows=None, block_r=block_r
    )
    bounds = cu_num_logits.tolist()
    for r, slot in enumerate(slots):
        own = sampled[bounds[r] : bounds[r + 1]].tolist()
        assert_walked(output, r, expected_path(tree, slot, own), own)
    assert int(output.path_len[0]) >= 2
    assert int(output.path_len[1]) == 1


def test_accepted_tokens_are_what_decoding_one_by_one_would_give(torch_rng, device):
    """A target that is a function of the prefix, decoded with and without the tree."""
    tree = random_trees(torch_rng, 1, 63, 6, 4, device)
    nodes = int(tree.num_nodes[0])
    parents = tree.parents[0].tolist()
    tokens = tree.tokens[0].tolist()
    prefixes: list[tuple[int, ...]] = [()]
    for row in range(1, nodes + 1):
        prefixes.append((*prefixes[parents[row]], tokens[row - 1]))

    def target(prefix: tuple[int, ...], flavour: int) -> int:
        return (sum((i + 2) * t for i, t in enumerate(prefix)) * 7 + flavour) % VOCAB

    lengths = set()
    for flavour in range(3 * VOCAB):
        sampled = [target(prefix, flavour // 3 + len(prefix)) for prefix in prefixes]
        output = WalkOutput.allocate(1, 63, device)
        walk_trees(
            tree,
            int32([0], device),
            starts([nodes + 1], device),
            torch.tensor(sampled, device=device),
            output,
        )
        n = int(output.num_sampled[0])
        walked = tuple(output.sampled_tokens[0, :n].tolist())
        alone: tuple[int, ...] = ()
        for _ in range(n):
            alone += (target(alone, flavour // 3 + len(alone)),)
        assert walked == alone
        # Longest: the tree has every accepted prefix, and not the one with the bonus token.
        assert walked[:-1] in prefixes
        assert walked not in prefixes
        lengths.add(n)
    assert len(lengths) > 1


def test_the_path_of_a_chain_is_its_agreeing_prefix(device):
    tree = DraftTree.allocate(1, 5, device)
    tree.tokens[0] = torch.tensor([4, 3, 5, 1, 2])
    tree.parents[0] = torch.arange(-1, 5)
    tree.num_nodes[0] = 5
    for agree in range(6):
        sampled = [4, 3, 5, 1, 2, 0]
        if agree < 5:
            sampled[agree] = 0
        output = WalkOutput.allocate(1, 5, device)
        walk_trees(
            tree,
            int32([0], device),
            starts([6], device),
            torch.tensor(sampled, device=device),
            output,
        )
        assert_walked(output, 0, list(range(agree + 1)), sampled)


def test_truncation_hides_the_rows_past_it(device):
    tree = DraftTree.allocate(1, 4, device)
    tree.tokens[0] = torch.tensor([1, 2, 3, 4])
    tree.parents[0] = torch.arange(-1, 4)
    tree.num_nodes[0] = 4
    for rows in range(1, 6):
        sampled = torch.tensor([1, 2, 3, 4, 5], device=device)[:rows].contiguous()
        output = WalkOutput.allocate(1, 4, device)
        walk_trees(tree, int32([0], device), starts([rows], device), sampled, output)
        assert_walked(output, 0, list(range(rows)), sampled.tolist())


def test_padding_nodes_are_never_accepted(device):
    """Padding carries token 0 and the batch has a row for it: neither makes it a child."""
    tree = DraftTree.allocate(1, 4, device)
    tree.tokens[0, 0] = 3
    tree.parents[0, :2] = int32([-1, 0], device)
    tree.num_nodes[0] = 1
    sampled = torch.tensor([3, 0, 0, 0, 0], device=device)
    output = WalkOutput.allocate(1, 4, device)
    walk_trees(tree, int32([0], device), starts([5], device), sampled, output)
    assert_walked(output, 0, [0, 1], [3, 0])


def test_stale_rows_past_num_nodes_are_never_accepted(device):
    tree = DraftTree.allocate(1, 3, device)
    tree.tokens[0] = torch.tensor([1, 2, 3])
    tree.parents[0] = torch.arange(-1, 3)
    tree.num_nodes[0] = 1
    output = WalkOutput.allocate(1, 3, device)
    sampled = torch.tensor([1, 2, 3, 0], device=device)
    walk_trees(tree, int32([0], device), starts([4], device), sampled, output)
    assert_walked(output, 0, [0, 1], [1, 2])


def test_the_lowest_of_equal_siblings_wins(device):
    tree = DraftTree.allocate(1, 4, device)
    tree.tokens[0] = torch.tensor([5, 5, 2, 2])
    tree.parents[0] = int32([-1, 0, 0, 2, 1], device)
    tree.num_nodes[0] = 4
    output = WalkOutput.allocate(1, 4, device)
    sampled = torch.tensor([5, 2, 2, 0, 1], device=device)
    walk_trees(tree, int32([0], device), starts([5], device), sampled, output)
    assert_walked(output, 0, [0, 1, 4], sampled.tolist())


def test_padded_requests_and_rows_past_the_batch_have_nothing_to_commit(torch_rng, device):
    tree = random_trees(torch_rng, 2, 7, 3, 2, device)
    output = WalkOutput.allocate(6, 7, device)
    for buffer in (output.path, output.path_len, output.sampled_tokens, output.num_sampled):
        buffer.fill_(5)
    sampled = torch.randint(0, VOCAB, (8,), generator=torch_rng).to(device)
    # Request 0 is padded by its slot, request 2 by having no rows.
    walk_trees(tree, int32([-1, 1, 0], device), starts([0, 8, 0], device), sampled, output)
    for request in (0, 2, 3, 4, 5):
        assert_nothing_to_commit(output, request)
        assert (output.sampled_tokens[request] == -1).all()
        assert int(output.num_sampled[request]) == 0
    assert_walked(output, 1, expected_path(tree, 1, sampled.tolist()), sampled.tolist())


def test_requests_that_are_not_trees_sample_one_token_and_have_no_path(torch_rng, device):
    tree = random_trees(torch_rng, 3, 7, 3, 2, device)
    output = WalkOutput.allocate(3, 7, device)
    cu_num_logits = starts([1, 8, 3], device)
    sampled = torch.randint(0, VOCAB, (12,), generator=torch_rng).to(device)
    # Request 2 would be accepted, were it a tree.
    sampled[9] = tree.tokens[2, 0]
    walk_trees(
        tree,
        int32([0, 1, 2], device),
        cu_num_logits,
        sampled,
        output,
        tree_rows=int32([0, 8, 0], device),
    )
    for request, first in ((0, 0), (2, 9)):
        assert_nothing_to_commit(output, request)
        assert int(output.num_sampled[request]) == 1
        assert output.sampled_tokens[request].tolist() == [int(sampled[first])] + [-1] * 7
    own = sampled[1:9].tolist()
    assert_walked(output, 1, expected_path(tree, 1, own), own)


def test_a_tree_is_cut_to_the_rows_that_count(torch_rng, device):
    """As if no further row had been sent, whatever was sampled there."""
    tree = random_trees(torch_rng, 2, 7, 3, 2, device)
    sampled = torch.randint(0, VOCAB, (16,), generator=torch_rng).to(device)
    for rows in range(1, 9):
        whole, cut = (WalkOutput.allocate(2, 7, device) for _ in range(2))
        slots, bounds = int32([0, 1], device), starts([8, 8], device)
        walk_trees(tree, slots, bounds, sampled, cut, tree_rows=int32([rows, 8], device))
        short = torch.cat([sampled[:rows], sampled[8:]])
        walk_trees(tree, slots, starts([rows, 8], device), short, whole)
        assert cut.path.equal(whole.path)
        assert cut.path_len.equal(whole.path_len)
        assert cut.num_sampled.equal(whole.num_sampled)
        assert cut.sampled_tokens.equal(whole.sampled_tokens)


def test_launcher_refuses_shapes_that_do_not_belong_together(device):
    tree = DraftTree.allocate(1, 3, device)
    slots, bounds = int32([0], device), int32([0, 4], device)
    sampled = torch.zeros(4, dtype=torch.int64, device=device)
    good, narrow = WalkOutput.allocate(1, 3, device), WalkOutput.allocate(1, 2, device)
    cases = [
        ((slots, bounds[:1], sampled, good), {}, r"cu_num_logits must be \[2\], not \[1\]"),
        ((slots, bounds, sampled, narrow), {}, "at least 1 requests of 4 rows, not 1 of 3"),
        ((slots, bounds, sampled[None], good), {}, "one-dimensional"),
        (
            (slots, bounds, sampled, good),
            {"tree_rows": bounds},
            r"tree_rows must be \[1\], not \[2\]",
        ),
    ]
    for arguments, options, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            walk_trees(tree, *arguments, **options)


def test_a_draft_ruled_out_by_a_grammar_is_not_accepted_although_it_was_sampled(device):
    tree = DraftTree.allocate(1, 3, device)
    policy = make_policy("chain", budget=3, depth=3, candidates=1, device=device)
    scores = torch.zeros(1, 3, 1, device=device)
    tokens = torch.tensor([[[5], [6], [7]]], device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    build_draft_trees(tree, scores, tokens, slots, policy)
    sampled = torch.tensor([5, 6, 7, 8], device=device)
    cu_num_logits = torch.tensor([0, 4], dtype=torch.int32, device=device)
    invalid = torch.tensor([False, False, True, True], device=device)
    output = WalkOutput.allocate(1, 3, device)
    walk_trees(tree, slots, cu_num_logits, sampled, output, invalid_drafts=invalid)
    assert output.path[0].tolist() == [0, 1, -1, -1]
    assert output.sampled_tokens[0].tolist() == [5, 6, -1, -1]
    walk_trees(tree, slots, cu_num_logits, sampled, output)
    assert output.sampled_tokens[0].tolist() == [5, 6, 7, 8]
