# SPDX-License-Identifier: Apache-2.0
"""The builder kernel against exhaustive search and the heap it replaces."""

import itertools
import math

import pytest
import torch

from ddtree_vllm.tree import (
    BestFirst,
    DraftTree,
    TreeNodes,
    build_draft_tree,
    build_draft_trees,
    make_policy,
)
from ddtree_vllm.tree.builder import _launch
from ddtree_vllm.tree.nodes import RankTuple, parent_indices
from ddtree_vllm.tree.reference import ancestor_sets, best_first, exhaustive, fixed_shape

NEG_INF = -math.inf


def random_log_probs(
    rng: torch.Generator, *shape: int, step: float | None = None, missing: float = 0.0
) -> torch.Tensor:
    """Log-probabilities float32 [..., k], rows sorted.

    Rounded to multiples of `step` they have many ties, within rows and between sums. With
    `missing`, that share of the candidates is -inf.
    """
    scores = torch.randn(*shape, generator=rng).mul(2).log_softmax(-1)
    if step is not None:
        scores = (scores / step).round() * step
    scores[torch.rand(*shape, generator=rng) < missing] = NEG_INF
    return scores.sort(dim=-1, descending=True).values


def build(log_probs: torch.Tensor, budget: int, device: torch.device, **options) -> TreeNodes:
    return build_draft_tree(log_probs.to(device), budget, **options)


def same(a: TreeNodes, b: TreeNodes) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in ((a.parents, b.parents), (a.depths, b.depths), (a.ranks, b.ranks))
    )


def tree_nodes(tree: DraftTree, slot: int) -> list[RankTuple]:
    """The nodes in a slot as rank tuples, read from parents and ranks."""
    n = int(tree.num_nodes[slot])
    parents = tree.parents[slot, 1 : n + 1] - 1
    return TreeNodes(parents, tree.depths[slot, 1 : n + 1], tree.ranks[slot, :n]).rank_tuples()


def assert_slot_holds(
    tree: DraftTree, slot: int, nodes: list[RankTuple], top_tokens: torch.Tensor
) -> None:
    """Every field of a slot, padding included, against the list of nodes that it should hold."""
    n, padding = len(nodes), tree.budget - len(nodes)
    rows = tree.num_rows
    assert int(tree.num_nodes[slot]) == n
    parents = [-1] + [i + 1 for i in parent_indices(nodes)] + [-1] * padding
    assert tree.parents[slot].tolist() == parents
    assert tree.depths[slot].tolist() == [0] + [len(t) for t in nodes] + [0] * padding
    assert tree.ranks[slot].tolist() == [t[-1] for t in nodes] + [-1] * padding
    tokens = [int(top_tokens[len(t) - 1, t[-1]]) for t in nodes] + [0] * padding
    assert tree.tokens[slot].tolist() == tokens
    seen = ancestor_sets(nodes) + [{row} for row in range(n + 1, rows)]
    matrix = tree.ancestor_matrix(slot).tolist()
    assert [{j for j in range(rows) if line[j]} for line in matrix] == seen
    # No bit past the last row: a word of the mask can be used without trimming it.
    words = tree.ancestors[slot].to(torch.int64) & 0xFFFFFFFF
    bits = sum(int(word).bit_count() for word in words.flatten())
    assert bits == sum(map(len, seen))


# Exhaustive search ---------------------------------------------------------------------------

SMALL_SHAPES = list(itertools.product(range(1, 5), range(1, 5)))


@pytest.mark.parametrize(("depth", "candidates"), SMALL_SHAPES)
@pytest.mark.parametrize("step", [None, 0.5, 4.0], ids=["distinct", "ties", "mostly-ties"])
def test_heap_equals_exhaustive_search_at_every_budget(depth, candidates, step, torch_rng):
    total = sum(candidates**d for d in range(1, depth + 1))
    log_probs = random_log_probs(torch_rng, depth, candidates, step=step).tolist()
    everything = exhaustive(log_probs, total)
    assert len(everything) == total
    for budget in range(1, min(total, 127) + 1):
        assert best_first(log_probs, budget) == everything[:budget]


@pytest.mark.parametrize(("depth", "candidates"), SMALL_SHAPES)
@pytest.mark.parametrize("step", [None, 0.5, 4.0], ids=["distinct", "ties", "mostly-ties"])
def test_kernel_equals_exhaustive_search(depth, candidates, step, torch_rng, device):
    log_probs = random_log_probs(torch_rng, depth, candidates, step=step)
    budget = min(127, 2 + sum(candidates**d for d in range(1, depth + 1)))
    nodes = build(log_probs, budget, device).rank_tuples()
    assert nodes == exhaustive(log_probs.tolist(), budget)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 38, 39, 40])
def test_kernel_equals_exhaustive_search_at_budget(budget, torch_rng, device):
    log_probs = random_log_probs(torch_rng, 3, 3, step=0.5)
    nodes = build(log_probs, budget, device).rank_tuples()
    assert nodes == exhaustive(log_probs.tolist(), budget)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "candidates"), SMALL_SHAPES)
def test_kernel_equals_exhaustive_search_at_every_budget(depth, candidates, torch_rng, device):
    log_probs = random_log_probs(torch_rng, depth, candidates, step=0.5)
    total = sum(candidates**d for d in range(1, depth + 1))
    everything = exhaustive(log_probs.tolist(), total)
    for budget in range(1, min(total + 2, 127) + 1):
        assert build(log_probs, budget, device).rank_tuples() == everything[:budget]


def test_all_scores_equal_gives_lexicographic_order(device):
    nodes = build(torch.zeros(2, 3), 12, device).rank_tuples()
    assert nodes == sorted(
        itertools.chain(*(itertools.product(range(3), repeat=d) for d in (1, 2)))
    )


def test_a_tie_between_a_node_and_its_child_pops_the_node_first(device):
    log_probs = torch.tensor([[-1.0, -1.0], [0.0, -2.0]])
    assert build(log_probs, 4, device).rank_tuples() == [(0,), (0, 0), (1,), (1, 0)]


# Prefixes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"always_spine": True},
        {"policy": "chain"},
        {"policy": "static", "static_tree": [(0,), (1,), (1, 1), (0, 1), (0, 0), (0, 0, 1), (2,)]},
    ],
    ids=["ddtree", "always-spine", "chain", "static"],
)
def test_a_prefix_is_the_tree_of_that_budget(options, torch_rng, device):
    log_probs = random_log_probs(torch_rng, 5, 4, step=0.25)
    whole = build(log_probs, 14, device, **options)
    for n in range(1, 15):
        assert same(whole.prefix(n), build(log_probs, n, device, **options))


def test_parents_come_first_and_depths_follow_them(torch_rng, device):
    nodes = build(random_log_probs(torch_rng, 8, 6), 100, device)
    assert len(nodes) == 100
    for i, (parent, depth) in enumerate(zip(nodes.parents, nodes.depths, strict=True)):
        assert -1 <= parent < i
        assert depth == (1 if parent < 0 else nodes.depths[parent] + 1)


def test_prefix_of_nothing_and_of_more_than_there_is(device):
    nodes = build(torch.tensor([[-0.5, -1.0]]), 9, device)
    assert len(nodes) == 2
    assert len(nodes.prefix(0)) == 0
    assert same(nodes.prefix(9), nodes)
    with pytest.raises(ValueError, match="0 nodes or more, not -1"):
        nodes.prefix(-1)


# Scores --------------------------------------------------------------------------------------


def test_float32_inputs_are_summed_in_float64(device):
    """Sums that float32 rounds to a tie are still told apart."""
    log_probs = torch.tensor([[-1.0, -1.5], [-(2.0**-30), -0.5 - 2.0**-24]])
    # (1, 0) has -1.5 - 2^-30, (0, 1) has -1.5 - 2^-24: float32 has -1.5 for both and for (1,).
    assert build(log_probs, 5, device).rank_tuples() == [(0,), (0, 0), (1,), (1, 0), (0, 1)]


def test_float64_inputs_are_not_rounded(device):
    log_probs = torch.tensor([[-1.0], [-1e-12]], dtype=torch.float64)
    wide = torch.tensor([[-1.0, -1.0 - 1e-12], [-2e-12, -5.0]], dtype=torch.float64)
    assert len(build(log_probs, 2, device)) == 2
    # In float32 (0,) and (1,) tie, and (0, 0) comes before (1,).
    assert build(wide, 3, device).rank_tuples() == [(0,), (1,), (0, 0)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_keep_their_values(dtype, torch_rng, device):
    log_probs = random_log_probs(torch_rng, 4, 5).to(dtype)
    nodes = build(log_probs, 20, device).rank_tuples()
    assert nodes == best_first(log_probs.double().tolist(), 20)


def test_minus_infinity_means_no_such_node(device):
    log_probs = torch.tensor([[-0.1, -3.0, NEG_INF], [-0.2, NEG_INF, NEG_INF]])
    assert build(log_probs, 10, device).rank_tuples() == [(0,), (0, 0), (1,), (1, 0)]
    assert len(build(torch.full((3, 3), NEG_INF), 10, device)) == 0


def test_one_candidate_gives_the_chain(torch_rng, device):
    nodes = build(random_log_probs(torch_rng, 6, 1), 10, device)
    assert nodes.rank_tuples() == [(0,) * d for d in range(1, 7)]


# Batches -------------------------------------------------------------------------------------

SHAPES = [
    # budget, depth, candidates
    (1, 1, 1),
    (7, 15, 8),
    (31, 15, 8),
    (32, 4, 40),
    (63, 15, 16),
    (127, 15, 16),
]


@pytest.mark.parametrize(("budget", "depth", "candidates"), SHAPES)
@pytest.mark.parametrize("block_r", [1, 4])
def test_every_field_of_every_request_of_a_batch(
    budget, depth, candidates, block_r, torch_rng, device
):
    requests, slots = 3, [4, 0, 2]
    log_probs = torch.cat(
        [
            random_log_probs(torch_rng, 1, depth, candidates),
            random_log_probs(torch_rng, 1, depth, candidates, step=0.5),
            random_log_probs(torch_rng, 1, depth, candidates, missing=0.5),
        ]
    )
    top_tokens = torch.randint(1, 250_000, (requests, depth, candidates), generator=torch_rng)
    tree = DraftTree.allocate(5, budget, device, depth)
    out_tokens = torch.full((requests, budget), -7, dtype=torch.int64, device=device)
    _launch(
        tree,
        log_probs.to(device),
        top_tokens.to(device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        BestFirst(),
        out_tokens,
        block_r=block_r,
    )
    for request, slot in enumerate(slots):
        nodes = best_first(log_probs[request].tolist(), budget)
        assert_slot_holds(tree, slot, nodes, top_tokens[request])
    assert torch.equal(out_tokens, tree.tokens[slots])


def random_batch(rng: torch.Generator, requests: int, depth: int, candidates: int, device):
    log_probs = random_log_probs(rng, requests, depth, candidates, step=0.25)
    tokens = torch.randint(1, 1000, (requests, depth, candidates), generator=rng)
    return log_probs.to(device), tokens.to(device)


def test_padded_requests_and_other_slots_are_untouched(torch_rng, device):
    log_probs, top_tokens = random_batch(torch_rng, 3, 4, 4, device)
    tree = DraftTree.allocate(4, 9, device, 4)
    for buffer in (tree.tokens, tree.parents, tree.depths, tree.ranks, tree.ancestors):
        buffer.fill_(-99)
    tree.num_nodes.fill_(-99)
    out_tokens = torch.full((3, 9), -7, device=device)
    slots = torch.tensor([-1, 2, -1], dtype=torch.int32, device=device)
    build_draft_trees(tree, log_probs, top_tokens, slots, BestFirst(), out_tokens=out_tokens)
    for slot in (0, 1, 3):
        for buffer in (tree.tokens, tree.parents, tree.depths, tree.ranks, tree.ancestors):
            assert (buffer[slot] == -99).all()
        assert tree.num_nodes[slot] == -99
    assert (out_tokens[[0, 2]] == -7).all()
    nodes = best_first(log_probs[1].tolist(), 9)
    assert_slot_holds(tree, 2, nodes, top_tokens[1])


def test_a_smaller_tree_leaves_nothing_of_the_larger_one_before_it(torch_rng, device):
    log_probs, top_tokens = random_batch(torch_rng, 1, 6, 4, device)
    tree = DraftTree.allocate(1, 40, device, 6)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    build_draft_trees(tree, log_probs, top_tokens, slots, BestFirst())
    assert tree.num_nodes[0] == 40
    log_probs[0, 0, 1:] = NEG_INF
    log_probs[0, 1] = NEG_INF
    build_draft_trees(tree, log_probs, top_tokens, slots, BestFirst())
    assert_slot_holds(tree, 0, [(0,)], top_tokens[0])


def test_an_empty_tree_is_what_allocation_leaves(torch_rng, device):
    _, top_tokens = random_batch(torch_rng, 1, 3, 3, device)
    tree, fresh = DraftTree.allocate(1, 70, device, 3), DraftTree.allocate(1, 70, device, 3)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    nowhere = torch.full((1, 3, 3), NEG_INF, device=device)
    build_draft_trees(tree, nowhere, top_tokens, slots, BestFirst())
    assert_slot_holds(tree, 0, [], top_tokens[0])
    assert torch.equal(tree.ancestors, fresh.ancestors)
    assert torch.equal(tree.parents, fresh.parents)


def test_strided_inputs_are_read_by_their_strides(torch_rng, device):
    log_probs, top_tokens = random_batch(torch_rng, 4, 6, 8, device)
    tree = DraftTree.allocate(2, 12, device, 3)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
    part = (slice(None, None, 2), slice(1, 4), slice(0, 5))
    build_draft_trees(tree, log_probs[part], top_tokens[part], slots, BestFirst())
    for slot, request in ((0, 0), (1, 2)):
        nodes = best_first(log_probs[request, 1:4, :5].tolist(), 12)
        assert_slot_holds(tree, slot, nodes, top_tokens[request, 1:4, :5])


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_nan_scores_make_no_nodes_and_no_harm(torch_rng, device):
    log_probs, top_tokens = random_batch(torch_rng, 2, 3, 3, device)
    log_probs[0] = math.nan
    log_probs[1, 1] = math.nan
    tree = DraftTree.allocate(2, 12, device, 3)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
    build_draft_trees(tree, log_probs, top_tokens, slots, BestFirst())
    assert tree_nodes(tree, 0) == []
    assert tree_nodes(tree, 1) == [(0,), (1,), (2,)]


def test_no_requests_is_no_work(device):
    tree = DraftTree.allocate(1, 3, device)
    nothing = torch.zeros(0, 2, 2, device=device)
    slots = torch.zeros(0, dtype=torch.int32, device=device)
    build_draft_trees(tree, nothing, nothing.long(), slots, BestFirst())
    assert tree.num_nodes[0] == 0


@pytest.mark.slow
def test_many_random_batches(torch_rng, device):
    for budget, depth, candidates in [(127, 15, 127), (127, 127, 4), (64, 15, 8), (95, 7, 20)]:
        log_probs = random_log_probs(torch_rng, 24, depth, candidates)
        coarse = torch.rand(24, generator=torch_rng) < 0.5
        log_probs[coarse] = (log_probs[coarse] * 4).round() / 4
        top_tokens = torch.randint(1, 9999, log_probs.shape, generator=torch_rng)
        tree = DraftTree.allocate(24, budget, device, depth)
        slots = torch.randperm(24, generator=torch_rng).int()
        build_draft_trees(
            tree, log_probs.to(device), top_tokens.to(device), slots.to(device), BestFirst()
        )
        for request, slot in enumerate(slots.tolist()):
            nodes = best_first(log_probs[request].tolist(), budget)
            assert_slot_holds(tree, slot, nodes, top_tokens[request])


# The spine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_always_spine_pops_the_spine_then_the_best(missing, torch_rng, device):
    log_probs = random_log_probs(torch_rng, 6, 4, missing=missing)
    nodes = build(log_probs, 25, device, always_spine=True).rank_tuples()
    assert nodes == best_first(log_probs.tolist(), 25, always_spine=True)
    reach = next((d for d in range(6) if log_probs[d, 0] == NEG_INF), 6)
    assert nodes[:reach] == [(0,) * d for d in range(1, reach + 1)]


def test_always_spine_changes_only_what_a_spine_of_the_best_tree_would_lack(torch_rng, device):
    """The rest of the budget goes to the most probable other nodes."""
    log_probs = random_log_probs(torch_rng, 6, 4)
    spine = {(0,) * d for d in range(1, 7)}
    nodes = build(log_probs, 20, device, always_spine=True).rank_tuples()
    others = [node for node in best_first(log_probs.tolist(), 127) if node not in spine]
    assert nodes[6:] == others[:14]


# Fixed shapes --------------------------------------------------------------------------------


def test_chain_is_the_spine_up_to_depth_or_budget(torch_rng, device):
    log_probs = random_log_probs(torch_rng, 5, 3)
    for budget in (1, 4, 5, 9):
        nodes = build(log_probs, budget, device, policy="chain")
        assert nodes.rank_tuples() == [(0,) * d for d in range(1, min(budget, 5) + 1)]
        assert nodes.parents.tolist() == list(range(-1, len(nodes) - 1))


def test_chain_stops_at_a_position_with_no_candidate(device):
    log_probs = torch.tensor([[-1.0], [-1.0], [NEG_INF], [-1.0]])
    assert build(log_probs, 9, device, policy="chain").rank_tuples() == [(0,), (0, 0)]


def test_static_tree_keeps_the_given_order_with_parents_moved_up(torch_rng, device):
    log_probs = random_log_probs(torch_rng, 3, 4)
    shape = [(2,), (0, 1, 0), (0, 0), (2, 3)]
    shape += [(0,), (0, 1)]
    nodes = build(log_probs, 10, device, policy="static", static_tree=shape).rank_tuples()
    assert nodes == [(2,), (0,), (0, 1), (0, 1, 0), (0, 0), (2, 3)]


@pytest.mark.parametrize("policy", ["chain", "static"])
@pytest.mark.parametrize("block_r", [1, 4])
def test_fixed_shapes_write_every_field_and_close_gaps(policy, block_r, torch_rng, device):
    """Nodes whose token, or whose ancestor's token, is impossible are left out."""
    depth, candidates, budget = 4, 3, 37
    shape = [node for d in range(1, 4) for node in itertools.product(range(3), repeat=d)]
    if policy == "chain":
        shape = [(0,) * d for d in range(1, depth + 1)]
    log_probs = random_log_probs(torch_rng, 3, depth, candidates, missing=0.3)
    log_probs[1] = random_log_probs(torch_rng, depth, candidates)
    top_tokens = torch.randint(1, 1000, log_probs.shape, generator=torch_rng)
    resolved = make_policy(
        policy,
        budget=budget,
        depth=depth,
        candidates=candidates,
        device=device,
        static_tree=shape if policy == "static" else None,
    )
    tree = DraftTree.allocate(3, budget, device, depth)
    out_tokens = torch.full((3, budget), -7, device=device)
    slots = torch.tensor([2, 0, -1], dtype=torch.int32, device=device)
    _launch(
        tree,
        log_probs.to(device),
        top_tokens.to(device),
        slots,
        resolved,
        out_tokens,
        block_r=block_r,
    )
    for request, slot in ((0, 2), (1, 0)):
        nodes = fixed_shape(log_probs[request].tolist(), shape, budget)
        assert_slot_holds(tree, slot, nodes, top_tokens[request])
        assert torch.equal(out_tokens[request], tree.tokens[slot])
    assert tree.num_nodes[1] == 0
    assert (out_tokens[2] == -7).all()


# Errors --------------------------------------------------------------------------------------

GOOD = torch.tensor([[-0.5, -1.5], [-0.25, -2.0]])


@pytest.mark.parametrize(
    ("log_probs", "sentence"),
    [
        (torch.tensor([-0.5, -1.0]), r"\[depth, k\].*not \[2\]"),
        (torch.zeros(1, 2, 2), r"\[depth, k\].*not \[1, 2, 2\]"),
        (torch.zeros(0, 4), r"at least one of each, not \[0, 4\]"),
        (torch.zeros(4, 0), r"at least one of each, not \[4, 0\]"),
        (torch.zeros(2, 2, dtype=torch.int64), "floating point, not torch.int64"),
        ([[-0.5, -1.0], [-0.5]], "table of numbers"),
        ("abc", "table of numbers"),
        (torch.tensor([[-0.5, -1.0], [-2.0, -1.0]]), "row 1 rises from rank 0 to 1"),
        (torch.tensor([[-0.5, math.nan]]), r"NaN at \[0, 1\]"),
        (torch.tensor([[-0.5, -1.0], [0.125, -1.0]]), r"0.125 at \[1, 0\].*at most 0"),
        (torch.tensor([[math.inf, -1.0]]), "at most 0"),
    ],
)
def test_bad_log_probs_are_refused_in_a_sentence(log_probs, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        build_draft_tree(log_probs, 3)
    assert str(caught.value).endswith((".", "?"))


@pytest.mark.parametrize("budget", [0, -1, 128, 10_000])
def test_a_budget_out_of_range_is_refused(budget):
    with pytest.raises(ValueError, match=f"between 1 and 127 nodes, not {budget}"):
        build_draft_tree(GOOD, budget)
    with pytest.raises(ValueError, match=f"between 1 and 127 nodes, not {budget}"):
        DraftTree.allocate(1, budget, "cpu")


@pytest.mark.parametrize("budget", [1.5, "7", None, True])
def test_a_budget_that_is_not_a_number_of_nodes_is_refused(budget):
    with pytest.raises(ValueError, match="whole number of nodes"):
        build_draft_tree(GOOD, budget)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"policy": "beam"}, "unknown policy 'beam': choose one of ddtree, chain, static"),
        ({"policy": "static"}, "needs static_tree"),
        ({"policy": "chain", "static_tree": [(0,)]}, "belongs to policy 'static', not to 'chain'"),
        ({"policy": "chain", "always_spine": True}, "belongs to policy 'ddtree', not to 'chain'"),
    ],
)
def test_bad_policies_are_refused_in_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build_draft_tree(GOOD, 3, **options)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ([], "it has no nodes"),
        (5, "must be a list of rank tuples"),
        ("00", "must be a list of rank tuples"),
        ([()], r"\(\) is not a node"),
        ([0], "0 is not a node"),
        (["0"], "'0' is not a node"),
        ([(0, "1")], "is not a node"),
        ([(0.0,)], "is not a node"),
        ([(True,)], "is not a node"),
        ([(-1,)], "is not a node"),
        ([(0,), (0,)], r"\[0\] appears twice"),
        ([(0,), (1, 0)], r"parent of node \[1, 0\] is missing; add \[1\]"),
        ([(0,), (2,)], r"\[2\] has rank 2, but ranks go from 0 to 1 \(2 candidates"),
        ([(0,), (0, 0), (0, 0, 0)], r"\[0, 0, 0\] is at depth 3, but there are 2"),
        ([(rank,) for rank in range(128)], "128 nodes are more than the limit, 127"),
    ],
)
def test_malformed_static_trees_are_refused_in_a_sentence(shape, sentence):
    with pytest.raises(ValueError, match=f"static tree: .*{sentence}"):
        build_draft_tree(GOOD, 3, "static", static_tree=shape)


def test_launcher_refuses_shapes_that_do_not_belong_together(device):
    tree = DraftTree.allocate(2, 3, device, 2)
    scores = torch.zeros(1, 2, 2, device=device)
    tokens = torch.zeros(1, 2, 2, dtype=torch.int64, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    deep = torch.zeros(1, 3, 2, device=device)
    chain = make_policy("chain", budget=3, depth=3, candidates=1, device=device)
    cases = [
        ((scores[0], tokens[0], slots, BestFirst()), {}, "requests, depth, candidates"),
        ((scores, tokens[:, :1], slots, BestFirst()), {}, "requests, depth, candidates"),
        ((scores, tokens, slots[:0], BestFirst()), {}, r"slots must be \[1\], not \[0\]"),
        ((scores, tokens, slots, chain), {}, r"fixed shape \(3 nodes, depth 3"),
        ((deep, deep.long(), slots, BestFirst()), {}, "allocated for nodes of depth 2 at most"),
        (
            (scores, tokens, slots, BestFirst()),
            {"out_tokens": tokens[0]},
            r"out_tokens must be \[1, 3\], not \[2, 2\]",
        ),
        (
            (scores.transpose(1, 2), tokens, slots, BestFirst()),
            {},
            "next to each other in memory",
        ),
    ]
    for arguments, options, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            build_draft_trees(tree, *arguments, **options)


@pytest.mark.parametrize("policy", ["ddtree", "static"])
def test_a_slot_marked_spine_only_gets_a_chain_and_its_neighbours_their_trees(
    policy, torch_rng, device
):
    requests, depth, candidates, budget = 3, 4, 3, 11
    shape = [[0], [1], [0, 0], [0, 1], [0, 0, 0], [1, 0]] if policy == "static" else None
    scores = torch.rand(requests, depth, candidates, generator=torch_rng).neg()
    scores = scores.sort(-1, descending=True).values.to(device)
    tokens = torch.arange(scores.numel(), device=device).view_as(scores)
    slots = torch.tensor([2, 0, 3], dtype=torch.int32, device=device)
    chosen = make_policy(
        policy,
        budget=budget,
        depth=depth,
        candidates=candidates,
        device=device,
        static_tree=shape,
    )
    free, marked = (DraftTree.allocate(4, budget, device) for _ in range(2))
    build_draft_trees(free, scores, tokens, slots, chosen)
    only = torch.tensor([1, 0, 0, 0], dtype=torch.int32, device=device)
    build_draft_trees(marked, scores, tokens, slots, chosen, spine_only=only)
    spine = 3 if policy == "static" else depth
    assert int(marked.num_nodes[0]) == spine
    assert marked.parents[0, : spine + 1].tolist() == list(range(-1, spine))
    assert marked.tokens[0, :spine].tolist() == tokens[1, :spine, 0].tolist()
    for slot in (2, 3):
        assert marked.parents[slot].equal(free.parents[slot])
        assert marked.tokens[slot].equal(free.tokens[slot])
