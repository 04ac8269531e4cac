# SPDX-License-Identifier: Apache-2.0
"""What a walk tallies, and what becomes of it on the metrics endpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch
from prometheus_client import CollectorRegistry, generate_latest

from ddtree_vllm.engine.tree_metrics import _SIZE, _VERIFICATIONS, TreeCounters
from ddtree_vllm.sampling.walk import Tally, WalkOutput, read_tally, walk_trees
from ddtree_vllm.tree import DraftTree

# Rows: 1 and 4 are the root's children, 2 and 3 are 1's, 5 is 3's.
PARENTS = [-1, 0, 1, 1, 0, 3]
RANKS = [0, 0, 1, 1, 0]
TOKENS = [10, 20, 21, 11, 30]


def walked(sampled: list[int], rows: int, device) -> Tally | None:
    tree = DraftTree.allocate(1, 5, device)
    tree.parents[0] = torch.tensor(PARENTS, dtype=torch.int32)
    tree.ranks[0] = torch.tensor(RANKS, dtype=torch.int32)
    tree.tokens[0] = torch.tensor(TOKENS)
    tree.num_nodes[0] = 5
    copied = torch.full((1, 8), 77, dtype=torch.int64, device=device)
    output = WalkOutput.allocate(1, 5, device)
    output.sampled_tokens, output.tally = copied[:, :6], copied[:, 6]
    starts = torch.tensor([0, rows], dtype=torch.int32, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    walk_trees(
        tree, slots, starts, torch.tensor(sampled[:rows], device=device), output, tree_rows=None
    )
    assert copied[0, 7] == 77
    assert copied[0, 0] == sampled[0]
    return read_tally(int(copied[0, 6]))


def test_a_path_along_first_choices_wins_nothing(device) -> None:
    assert walked([10, 20, 5, 0, 0, 0], 6, device) == Tally(5, 2, 0)


def test_a_branch_wins_its_node_and_all_below_it(device) -> None:
    assert walked([10, 21, 0, 30, 0, 4], 6, device) == Tally(5, 3, 2)
    assert walked([11, 0, 0, 0, 6, 0], 6, device) == Tally(5, 1, 1)


def test_only_rows_that_were_verified_count(device) -> None:
    assert walked([10, 21, 0, 30, 0, 4], 4, device) == Tally(3, 2, 1)
    assert walked([10, 21, 0, 30, 0, 4], 1, device) is None


def test_nothing_accepted_is_still_a_verification(device) -> None:
    assert walked([9, 0, 0, 0, 0, 0], 6, device) == Tally(5, 0, 0)


def exposed(counters: TreeCounters) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(counters)
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def test_two_processes_share_the_counters_of_a_file(tmp_path) -> None:
    path = tmp_path / "counters"
    path.write_bytes(bytes(_SIZE))
    server = TreeCounters(str(path))
    assert exposed(server) == {}
    code = (
        "from ddtree_vllm.engine.tree_metrics import TreeCounters\n"
        f"worker = TreeCounters({str(path)!r})\n"
        "worker.begin(5, 3)\n"
        # verified | accepted << 8 | branch wins << 16; 0: not a tree
        "worker.count([5 | 3 << 8 | 2 << 16, 0, 3 | 1 << 8])\n"
        "worker.count([0])\n"
        "worker.count([4])\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "0")}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
    assert exposed(server) == {
        "ddtree:budget_nodes": 5,
        "ddtree:budget_in_use_nodes": 4,
        "ddtree:verifications_total": 3,
        "ddtree:drafted_nodes_total": 12,
        'ddtree:accepted_nodes_total{depth="1"}': 2,
        'ddtree:accepted_nodes_total{depth="2"}': 1,
        'ddtree:accepted_nodes_total{depth="3"}': 1,
        "ddtree:branch_wins_total": 2,
        'ddtree:acceptance_length_tokens_bucket{le="1.0"}': 1,
        'ddtree:acceptance_length_tokens_bucket{le="2.0"}': 2,
        'ddtree:acceptance_length_tokens_bucket{le="3.0"}': 2,
        'ddtree:acceptance_length_tokens_bucket{le="4.0"}': 3,
        'ddtree:acceptance_length_tokens_bucket{le="+Inf"}': 3,
        "ddtree:acceptance_length_tokens_count": 3,
        "ddtree:acceptance_length_tokens_sum": 7,
    }


def test_a_scrape_in_the_middle_of_a_step_waits_for_its_end(tmp_path) -> None:
    path = tmp_path / "counters"
    path.write_bytes(bytes(_SIZE))
    server, worker = TreeCounters(str(path)), TreeCounters(str(path))
    worker.begin(5, 3)

    def walks() -> Iterator[int]:
        yield 5 | 1 << 8

    class Slow(np.ndarray):
        """Adds to one counter at a time, as slowly as a worker that has lost its core."""

        def __setitem__(self, key, value) -> None:
            super().__setitem__(key, value)
            if key == _VERIFICATIONS:
                half_done.set()
                time.sleep(0.003)

    half_done = threading.Event()
    worker._values = worker._values.view(Slow)
    step = threading.Thread(target=worker.count, args=(walks(),))
    step.start()
    assert half_done.wait(10)
    seen = exposed(server)
    step.join(10)
    assert seen["ddtree:verifications_total"] == 1
    assert seen['ddtree:accepted_nodes_total{depth="1"}'] == 1
    assert seen["ddtree:acceptance_length_tokens_sum"] == 2
