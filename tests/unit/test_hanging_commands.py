# SPDX-License-Identifier: Apache-2.0
"""Host-side programs and a driver that hangs: what waits in it is not ended by SIGKILL either."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

import ddtree_health.errors
import ddtree_health.unit
import ddtree_preflight.host
import ddtree_topology.errors
import ddtree_topology.host

ROOT = Path(__file__).parents[2]
HANGING = ["sleep", "300"]
LIMIT_S = 0.2


def health(monkeypatch):
    with pytest.raises(ddtree_health.errors.HealthError) as caught:
        ddtree_health.unit.run_command(HANGING, LIMIT_S)
    return str(caught.value)


def preflight(monkeypatch):
    done = ddtree_preflight.host.run_command(HANGING, LIMIT_S)
    return "did not answer" if done.hung else f"ended with {done.status}"


def topology(monkeypatch):
    monkeypatch.setattr(ddtree_topology.host, "_TIMEOUT_S", LIMIT_S)
    with pytest.raises(ddtree_topology.errors.TopologyError) as caught:
        ddtree_topology.host.run_command(HANGING)
    return str(caught.value)


def nvidia_host(monkeypatch):
    source = (ROOT / "roles/nvidia_host/files/facts.py").read_text()
    program, end, _ = source.rpartition("\nmain(")
    assert end
    names = {}
    exec(compile(program, "facts.py", "exec"), names)
    names["TIMEOUT_S"] = LIMIT_S
    status, said = names["ask"](*HANGING)
    assert status == 124
    return said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ask", [health, preflight, topology, nvidia_host])
def test_a_command_that_cannot_be_killed_is_given_up_on(monkeypatch, ask):
    """As nvidia-smi in uninterruptible sleep: waiting for its end would be waiting for ever."""
    asked = []

    def kill(process):
        asked.append(process)

    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    try:
        assert "did not answer" in ask(monkeypatch)
        assert len(asked) == 1
    finally:
        monkeypatch.undo()
        for process in asked:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(10)
