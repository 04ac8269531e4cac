# SPDX-License-Identifier: Apache-2.0
"""What an engine's start waits for."""

import os
import socket

import pytest

from ddtree_health import cli, waiting
from ddtree_health.errors import HealthError
from ddtree_health.server import Server


def test_ready_is_the_first_200(engine):
    assert waiting.until_ready(Server(engine.url), timeout_s=5, pid=os.getpid()) < 5


def test_the_wait_ends_with_the_engine(engine):
    engine.health = 503
    with pytest.raises(HealthError, match="ended while it was starting"):
        waiting.until_ready(Server(engine.url), timeout_s=60, pid=1, alive=lambda pid: False)


def test_the_wait_has_a_limit(engine, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    engine.health = 503
    assert cli.main(["wait-ready", "--url", engine.url, "--timeout", "0.1"]) == 1
    assert "not ready within 0.1 s" in capsys.readouterr().err


def free(**more):
    waiting.until_free(
        **{"host": "127.0.0.1", "port": 0, "uuids": [], "free_mib": 0, "timeout_s": 0, **more}
    )


def test_a_taken_port_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(HealthError, match=rf"port {port} of 127\.0\.0\.1 is taken"):
            free(port=port)
    free(port=port)


def test_memory_still_held_is_waited_for(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_S", 0.0)
    held, given_back = "0, GPU-a, 500\n1, GPU-b, 140000\n", "0, GPU-a, 140000\n1, GPU-b, 140000\n"
    answers = [held] * 3 + [given_back]
    free(uuids=["GPU-a"], free_mib=130000, timeout_s=30, run=lambda command: answers.pop(0))
    assert answers == []


def test_memory_that_stays_held_is_named():
    with pytest.raises(HealthError, match="GPU-a has 500 MiB free of 130000 needed"):
        free(uuids=["GPU-a"], free_mib=130000, run=lambda command: "0, GPU-a, 500\n")


@pytest.mark.parametrize("free_mib", [0, 1])
def test_a_gpu_that_is_gone_is_named(free_mib):
    with pytest.raises(HealthError, match="GPU-b is not there"):
        free(uuids=["GPU-b"], free_mib=free_mib, run=lambda command: "0, GPU-a, 500\n")


def test_gpus_moved_by_one_that_is_gone_are_named():
    """By index the engine would take another instance's GPU."""
    after = "0, GPU-a, 500\n1, GPU-c, 500\n"  # GPU-b was 1, GPU-c was 2
    with pytest.raises(HealthError, match="GPU-c has index 1 now and 2 in the plan"):
        free(uuids=["GPU-c"], indices=[2], run=lambda command: after)
    free(uuids=["GPU-c"], run=lambda command: after)
    free(uuids=["GPU-a"], indices=[0], run=lambda command: after)


def test_a_driver_that_does_not_answer_yet_is_waited_for(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_S", 0.0)
    answers = [HealthError("nvidia-smi failed with exit status 9"), "0, GPU-a, 500\n"]

    def run(command):
        answer = answers.pop(0)
        if isinstance(answer, HealthError):
            raise answer
        return answer

    free(uuids=["GPU-a"], timeout_s=30, run=run)
    assert answers == []
    answers.append(HealthError("nvidia-smi failed with exit status 9"))
    with pytest.raises(HealthError, match="exit status 9"):
        free(uuids=["GPU-a"], run=run)


def test_an_index_for_each_gpu_is_asked_for(capsys):
    assert cli.main(["wait-free", "--gpus", "GPU-a,GPU-b", "--indices", "0"]) == 1
    assert "as many entries as --gpus" in capsys.readouterr().err
