# SPDX-License-Identifier: Apache-2.0
"""Counts what trees did and shows it on the server's /metrics.

The worker counts: what a walk tallied comes to the host with the tokens, so nothing waits for the
device. The server shows: it makes a file of counters before it starts the worker, names it in the
environment, and reads it whenever it is scraped. With --api-server-count above 1 the engine's
processes start before the servers: vLLM's metrics are then the only ones.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree_vllm.config import uses_trees
from ddtree_vllm.sampling.walk import read_tally

if TYPE_CHECKING:
    from prometheus_client import Metric
    from vllm.config import VllmConfig

FILE_VARIABLE = "DDTREE_VLLM_COUNTERS"
# Scalars, then by depth 1 to 127 the accepted nodes.
_BUDGET, _DEPTH, _VERIFICATIONS, _NODES, _BRANCH_WINS, _LAST_REQUESTS, _LAST_NODES = range(7)
# Odd while a step is being added: a scrape then reads again, so that it never sees half a step.
_SEQUENCE = 7
_FIRST_DEPTH = 8
_SIZE = 8 * (_FIRST_DEPTH + 127)


class TreeCounters:
    """int64 counters in a file that the worker writes and the server reads."""

    def __init__(self, path: str | None) -> None:
        """A path of None counts for this process alone, as in an engine without a server."""
        if path is None:
            self._values = np.zeros(_SIZE // 8, dtype=np.int64)
            return
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._values = np.frombuffer(self._map, dtype=np.int64)

    def begin(self, budget: int, depth: int) -> None:
        """Starts at zero for an engine of this budget and depth."""
        self._values[:] = 0
        self._values[_BUDGET], self._values[_DEPTH] = budget, depth

    def count(self, tallies: Iterable[int]) -> None:
        """Adds the walks of one step."""
        walks = [walk for walk in map(read_tally, tallies) if walk is not None]
        if not walks:
            return
        values = self._values
        nodes = sum(walk.verified for walk in walks)
        values[_SEQUENCE] += 1
        values[_VERIFICATIONS] += len(walks)
        values[_NODES] += nodes
        values[_BRANCH_WINS] += sum(walk.branch_wins for walk in walks)
        values[_LAST_REQUESTS], values[_LAST_NODES] = len(walks), nodes
        for walk in walks:
            values[_FIRST_DEPTH : _FIRST_DEPTH + walk.accepted] += 1
        values[_SEQUENCE] += 1

    def _snapshot(self) -> np.ndarray:
        """All counters as they were between two steps."""
        for _ in range(100):
            before = int(self._values[_SEQUENCE])
            copy = self._values.copy()
            if before % 2 == 0 and int(self._values[_SEQUENCE]) == before:
                return copy
            time.sleep(1e-4)
        # A worker that died while it added: what it left is all there will be.
        return copy

    def collect(self) -> Iterator[Metric]:
        """The counters as Prometheus metrics; nothing while no engine with trees has started."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        values = self._snapshot()
        budget, depth = int(values[_BUDGET]), int(values[_DEPTH])
        if not budget:
            return
        verifications = int(values[_VERIFICATIONS])
        by_depth = [int(n) for n in values[_FIRST_DEPTH : _FIRST_DEPTH + depth]]
        requests, nodes = int(values[_LAST_REQUESTS]), int(values[_LAST_NODES])
        yield GaugeMetricFamily(
            "ddtree:budget_nodes", "Draft nodes a request may have per step.", budget
        )
        yield GaugeMetricFamily(
            "ddtree:budget_in_use_nodes",
            "Draft nodes per request in the newest step that verified any.",
            nodes / requests if requests else 0.0,
        )
        yield CounterMetricFamily(
            "ddtree:verifications",
            "Trees verified: requests with at least one draft node, summed over steps.",
            verifications,
        )
        yield CounterMetricFamily(
            "ddtree:drafted_nodes", "Draft nodes verified.", int(values[_NODES])
        )
        accepted = CounterMetricFamily(
            "ddtree:accepted_nodes", "Draft nodes accepted, by depth.", labels=["depth"]
        )
        for i, count in enumerate(by_depth):
            accepted.add_metric([str(i + 1)], count)
        yield accepted
        yield CounterMetricFamily(
            "ddtree:branch_wins",
            "Accepted nodes from the first branch off the drafter's first choices on: tokens that "
            "its chain would not have given in that step.",
            int(values[_BRANCH_WINS]),
        )
        # A verification emits its accepted nodes and one token on top.
        longer = [verifications, *by_depth, 0]
        yield HistogramMetricFamily(
            "ddtree:acceptance_length_tokens",
            "Tokens a verification gave: accepted nodes and the bonus token.",
            buckets=[
                *((str(float(n)), verifications - longer[n]) for n in range(1, depth + 2)),
                ("+Inf", verifications),
            ],
            sum_value=verifications + sum(by_depth),
        )


def show_on_metrics_endpoint() -> None:
    """Make every frontend with trees publish their counters; a second call changes nothing."""
    from vllm.v1.engine.input_processor import InputProcessor

    init = InputProcessor.__init__
    if hasattr(init, "__wrapped__"):
        return

    # The input processor exists in the frontend alone, and before the engine's processes start.
    @functools.wraps(init)
    def publishing(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        if uses_trees(vllm_config):
            _publish()

    InputProcessor.__init__ = publishing


_published: list[TreeCounters] = []


def _publish() -> None:
    """A file of counters for the engine that is about to start, named in the environment."""
    from prometheus_client import REGISTRY

    handle, path = tempfile.mkstemp(prefix="ddtree-vllm-counters-")
    os.truncate(handle, _SIZE)
    os.close(handle)
    os.environ[FILE_VARIABLE] = path
    atexit.register(_remove, path, os.getpid())
    while _published:
        REGISTRY.unregister(_published.pop())  # type: ignore[arg-type]
    _published.append(TreeCounters(path))
    REGISTRY.register(_published[0])  # type: ignore[arg-type]


def _remove(path: str, creator: int) -> None:
    if os.getpid() == creator:
        Path(path).unlink(missing_ok=True)
