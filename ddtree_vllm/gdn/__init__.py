# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over a draft tree, from one committed state: verify, stash, commit.

A step, per layer: `tree_causal_conv`, `verify_tree`; after the walk, once for all layers:
`commit_paths`. Rows that belong to no tree: `causal_conv`, `run_sequences`.
"""

from ddtree_vllm.gdn.commit import StateTable, commit_paths
from ddtree_vllm.gdn.conv import causal_conv, tree_causal_conv
from ddtree_vllm.gdn.recurrent import run_sequences
from ddtree_vllm.gdn.rows import TreeRows
from ddtree_vllm.gdn.stash import Stash
from ddtree_vllm.gdn.verify import verify_tree

__all__ = [
    "Stash",
    "StateTable",
    "TreeRows",
    "causal_conv",
    "commit_paths",
    "run_sequences",
    "tree_causal_conv",
    "verify_tree",
]
