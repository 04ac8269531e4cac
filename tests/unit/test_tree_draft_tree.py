# SPDX-License-Identifier: Apache-2.0
"""The DraftTree object: shapes, the empty state, and what importing the package does."""

import os
import subprocess
import sys

import pytest
import torch

from ddtree_vllm.tree import DraftTree


@pytest.mark.parametrize(
    ("budget", "words"), [(1, 1), (31, 1), (32, 2), (63, 2), (64, 3), (127, 4)]
)
def test_fields_have_the_documented_shapes(budget, words, device):
    tree = DraftTree.allocate(3, budget, device, max_depth=15)
    assert (tree.num_slots, tree.budget, tree.num_rows, tree.num_words) == (
        3,
        budget,
        budget + 1,
        words,
    )
    assert tree.tokens.shape == (3, budget)
    assert tree.tokens.dtype == torch.int64
    for field, shape in (
        (tree.parents, (3, budget + 1)),
        (tree.depths, (3, budget + 1)),
        (tree.ranks, (3, budget)),
        (tree.ancestors, (3, budget + 1, words)),
        (tree.num_nodes, (3,)),
    ):
        assert field.shape == shape
        assert field.dtype == torch.int32
    assert tree.max_depth == min(15, budget)
    assert tree.nbytes() == 3 * (8 * budget + 4 * (3 * budget + 2 + (budget + 1) * words + 1))


@pytest.mark.parametrize("budget", [1, 31, 127])
def test_a_new_tree_is_a_root_and_padding(budget, device):
    tree = DraftTree.allocate(2, budget, device)
    assert tree.max_depth == budget
    assert (tree.tokens == 0).all()
    assert (tree.parents == -1).all()
    assert (tree.depths == 0).all()
    assert (tree.ranks == -1).all()
    assert (tree.num_nodes == 0).all()
    identity = torch.eye(budget + 1, dtype=torch.bool, device=device)
    assert torch.equal(tree.ancestor_matrix(1), identity)


@pytest.mark.parametrize("kwargs", [{"num_slots": 0}, {"max_depth": 0}])
def test_sizes_below_one_are_refused(kwargs):
    (name,) = kwargs
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        DraftTree.allocate(**{"num_slots": 1, "budget": 3, "device": "cpu", **kwargs})


def run_without_gpu(code: str) -> subprocess.CompletedProcess:
    """A fresh Python that sees no GPU and has no TRITON_INTERPRET, as a tool would start."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_tool_without_gpu_needs_nothing_but_the_import():
    code = (
        "from ddtree_vllm.tree import build_draft_tree;"
        "print(build_draft_tree([[-0.5, -2.0]], 2).ranks.tolist())"
    )
    done = run_without_gpu(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[0, 1]"


def test_cpu_tensors_without_the_interpreter_get_a_sentence():
    code = (
        "import triton.language\n"
        "from ddtree_vllm.tree import build_draft_tree, top_k_log_probs; import torch\n"
        "for call in (lambda x: build_draft_tree(x, 2), lambda x: top_k_log_probs(x, 2)):\n"
        "    try: call(torch.tensor([[-0.5, -2.0]]))\n"
        "    except RuntimeError as error: print(error)\n"
    )
    done = run_without_gpu(code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "TRITON_INTERPRET=1 before Triton is first imported" in line
