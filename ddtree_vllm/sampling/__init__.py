# SPDX-License-Identifier: Apache-2.0
"""From the target's logits at every row of a tree to the tokens of the accepted path."""

from ddtree_vllm.sampling.walk import WalkOutput, walk_trees

__all__ = ["WalkOutput", "walk_trees"]
