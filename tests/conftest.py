# SPDX-License-Identifier: Apache-2.0
"""What every test shares: the interpreter switch, seeds, and an account of what was left out."""

import os
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _num_gpus() -> int:
    """Asks the driver, not torch: torch must not be imported before TRITON_INTERPRET is set."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return 0
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        probe = subprocess.run(
            ["nvidia-smi", "-L"], check=False, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    lines = probe.stdout.splitlines() if probe.returncode == 0 else []
    return sum(line.startswith("GPU ") for line in lines)


NUM_GPUS = _num_gpus()
HAS_CUDA = NUM_GPUS > 0
if not HAS_CUDA:
    # Read by Triton when a kernel is decorated, so it has to be set before the first kernel module.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# With pytest-xdist every worker has one core.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
# An engine in this process would pin all its threads, and every child's, to the first core.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# The interpreter's products are small: a second thread costs more than it brings.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ddtree")
    group.addoption("--slow", action="store_true", help="also run tests marked slow")
    group.addoption(
        "--hosts", action="store_true", help="also run tests marked hosts: needs root and Ansible"
    )
    group.addoption(
        "--write-compatibility",
        action="store_true",
        help="write docs/compatibility.md from what the tests find, instead of checking it",
    )
    group.addoption(
        "--seed",
        type=int,
        default=None,
        help="seed of the random tests (default: a new one each run, printed when a test fails)",
    )


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--seed")
    if seed is None:
        seed = int(time.time()) % 1_000_000
    # A worker of pytest-xdist has the seed that the header prints.
    config.stash[_SEED] = getattr(config, "workerinput", {}).get("seed", seed)
    config.stash[_LEFT_OUT] = Counter()


_SEED = pytest.StashKey[int]()
_LEFT_OUT = pytest.StashKey[Counter]()


def pytest_report_header(config: pytest.Config) -> str:
    device = "cuda" if HAS_CUDA else "cpu, Triton's interpreter"
    return f"device: {device}; seed: {config.stash[_SEED]} (repeat with --seed)"


# The quick parts first, so that a broken kernel shows before any engine is started. The longest file
# of engine tests before the others: a worker that began it last would leave the other one idle.
_ORDER = {"unit": 0, "gpu": 1, "engine": 2}
_LONGEST = "test_exactness.py"


def _has_ansible() -> bool:
    wanted = os.environ.get("DDTREE_ANSIBLE_PLAYBOOK")
    return shutil.which(wanted or str(ROOT / ".venv-ansible/bin/ansible-playbook")) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out, rather than skips, what this run is not for; the summary says what and why."""
    left_out: Counter = config.stash[_LEFT_OUT]
    wants_slow = config.getoption("--slow") or "slow" in (config.getoption("markexpr") or "")
    keep, drop = [], []
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            left_out["marked gpu: no NVIDIA GPU on this machine"] += 1
            drop.append(item)
        elif item.get_closest_marker("two_gpus") and NUM_GPUS < 2:
            left_out["marked two_gpus: one NVIDIA GPU on this machine; run it on two"] += 1
            drop.append(item)
        elif item.get_closest_marker("hosts") and not config.getoption("--hosts"):
            target = "test-images" if item.path.parent.name == "images" else "test-hosts"
            left_out[f"marked hosts: run `make {target}`"] += 1
            drop.append(item)
        elif item.get_closest_marker("ansible") and not _has_ansible():
            left_out["marked ansible: no ansible-playbook; run `make ansible`"] += 1
            drop.append(item)
        elif item.get_closest_marker("slow") and not wants_slow:
            left_out["marked slow: run `make test-slow`, or pytest --slow"] += 1
            drop.append(item)
        else:
            keep.append(item)
    keep.sort(key=lambda item: (_ORDER.get(item.path.parent.name, 1), item.path.name != _LONGEST))
    items[:] = keep
    if drop:
        config.hook.pytest_deselected(items=drop)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    node.workerinput["seed"] = node.config.stash[_SEED]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every worker of pytest-xdist collects everything; the first one tells what it left out."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = dict(session.config.stash[_LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    if not error:
        node.config.stash[_LEFT_OUT] = Counter(node.workeroutput.get("left_out", {}))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    left_out = config.stash[_LEFT_OUT]
    if left_out:
        terminalreporter.section("left out", sep="-")
        for reason, count in sorted(left_out.items()):
            terminalreporter.line(f"{count} test{'s' if count > 1 else ''} {reason}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, printed into the captured output so that a failure names it."""
    value = request.config.stash[_SEED]
    print(f"seed {value}: repeat with --seed {value}")
    return value


@pytest.fixture
def rng(seed: int):
    """A numpy generator seeded by the run's seed."""
    import numpy as np

    return np.random.default_rng(seed)


@pytest.fixture
def torch_rng(seed: int):
    """A CPU torch.Generator seeded by the run's seed."""
    import torch

    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def device():
    """Where kernels run in this session: the first GPU, or the CPU under the interpreter."""
    import torch

    return torch.device("cuda" if HAS_CUDA else "cpu")
