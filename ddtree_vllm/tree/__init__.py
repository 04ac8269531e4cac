# SPDX-License-Identifier: Apache-2.0
"""The draft tree: what it is, how it is built, and which policies choose its nodes.

    from ddtree_vllm.tree import build_draft_tree

    nodes = build_draft_tree(log_probs, budget=31)   # log_probs: float [depth, k], rows sorted
    nodes.parents, nodes.depths, nodes.ranks         # in pop order
    nodes.prefix(15)                                 # the tree of budget 15

The engine builds the trees of a whole batch with `build_draft_trees`, into a `DraftTree`.
"""

from ddtree_vllm.tree import _interpreter  # noqa: F401  (first: see there)

# isort: split
from ddtree_vllm.tree.builder import build_draft_tree, build_draft_trees
from ddtree_vllm.tree.candidates import top_k_log_probs
from ddtree_vllm.tree.draft_tree import MAX_BUDGET, DraftTree
from ddtree_vllm.tree.nodes import RankTuple, TreeNodes
from ddtree_vllm.tree.policies import (
    POLICIES,
    BestFirst,
    FixedShape,
    TreePolicy,
    check_static_tree,
    make_policy,
)

__all__ = [
    "MAX_BUDGET",
    "POLICIES",
    "BestFirst",
    "DraftTree",
    "FixedShape",
    "RankTuple",
    "TreeNodes",
    "TreePolicy",
    "build_draft_tree",
    "build_draft_trees",
    "check_static_tree",
    "make_policy",
    "top_k_log_probs",
]
