# SPDX-License-Identifier: Apache-2.0
"""Whether the GPUs of each group can really talk: an all-reduce, timed out and checked.

That the driver reports peer access proves nothing: copies have run at full speed on machines where
NCCL hung while it started. So each group runs `rank.py` once per GPU, first with P2P on. If any
group fails, all groups run again with P2P off, which says whether the fallback works. The verdict
holds for the whole host.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import rank as rank_module
from .errors import TopologyError
from .switches import NCCL_OFF, VERDICT_VERSION

TIMEOUT_S = 120.0  # importing torch and starting NCCL on a cold disk can take most of a minute
_GRACE_S = 5.0  # how long a killed rank may take to die
_TAIL_BYTES = 4000
_RANK_PROGRAM = os.path.abspath(rank_module.__file__)
_NOT_INITIALISED = ("error 802", "system not yet initialized")


def probe(
    plan: Mapping[str, Any],
    *,
    backend: str = "nccl",
    python: str = sys.executable,
    timeout_s: float = TIMEOUT_S,
    most_elements: int = 0,
    rank_program: str = _RANK_PROGRAM,
) -> dict[str, Any]:
    """All-reduces over each group of a plan; all groups at once, as they will serve.

    Args:
        plan: what `planner.plan` returned.
        backend: "nccl", or "gloo" to run the same program without GPUs.
        python: an interpreter that has torch.
        timeout_s: limit of one round, seconds; there are at most two.
        most_elements: largest all-reduce, float32 elements; 0 for the program's own.
        rank_program: what each rank runs.

    Returns:
        The verdict: version, backend, p2p (bool, never true on gloo), collectives (bool: they work
        with P2P on or off), because (a sentence), fingerprint (the plan's) and one entry per group
        in groups.

    Raises:
        TopologyError: the plan has no GPU to probe, `python` cannot be run or has no torch, or the
            GPUs are not free. None of these says anything of the links.
    """
    listed = plan.get("groups", [])
    if not isinstance(listed, list) or not all(_is_group(group) for group in listed):
        raise TopologyError(
            "what is to be probed is no plan: `ddtree-topology plan --json` makes one"
        )
    groups = [group for group in listed if group.get("gpus")]
    if not groups:
        raise TopologyError("the plan has no group with GPUs: there is nothing to probe")
    command = [python, rank_program, "--backend", backend]
    if most_elements:
        command += ["--most-elements", str(most_elements)]

    on = _round(groups, command, {}, backend, timeout_s)
    off: list[dict[str, Any]] = []
    passed = _all_passed(on)
    if not passed and backend == "nccl":
        off = _round(groups, command, NCCL_OFF, backend, timeout_s)
    without_access = [
        group for number, group in enumerate(groups) if on[number]["peer_access"] is False
    ]
    # Without peer access NCCL got there through host memory; nothing else should try.
    p2p = passed and backend == "nccl" and not without_access
    collectives = passed or (bool(off) and _all_passed(off))
    because = _because(groups, on, off, backend, without_access)
    return {
        "version": VERDICT_VERSION,
        "backend": backend,
        "p2p": p2p,
        "collectives": collectives,
        "because": because,
        "fingerprint": dict(plan.get("fingerprint", {})),
        "groups": [
            {
                "gpus": list(group["gpus"]),
                "uuids": list(group.get("uuids", [])),
                "with_p2p": on[number],
                "without_p2p": off[number] if off else None,
            }
            for number, group in enumerate(groups)
        ],
    }


def _is_group(group: Any) -> bool:
    parts = (group.get(part, []) for part in ("gpus", "uuids")) if isinstance(group, dict) else [0]
    return all(isinstance(part, list) for part in parts)


def _all_passed(results: Sequence[Mapping[str, Any]]) -> bool:
    return all(result["status"] == "passed" for result in results)


def _because(
    groups: Sequence[Mapping[str, Any]],
    on: Sequence[Mapping[str, Any]],
    off: Sequence[Mapping[str, Any]],
    backend: str,
    without_access: Sequence[Mapping[str, Any]],
) -> str:
    """The verdict in words."""
    if _all_passed(on):
        if backend == "gloo":
            return "On gloo every group's sums were right, which says nothing of P2P."
        if without_access:
            names = " nor ".join(_names(group) for group in without_access)
            return f"P2P is off: CUDA reports no peer access among {names}; all sums were right."
        return "P2P is on: every group finished its all-reduces with the right sums."
    because = f"P2P is off: {_failures(groups, on)}"
    if off and _all_passed(off):
        because += "; without P2P every group's sums were right"
    elif off:
        because += f"; without P2P {_failures(groups, off)}"
    said = " ".join(result["detail"] for result in on).lower()
    if any(sign in said for sign in _NOT_INITIALISED):
        because += (
            "; CUDA does not initialise (802): on an NVSwitch host start nvidia-fabricmanager, of "
            "the driver's own version"
        )
    return because + "."


def _failures(groups: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for number, result in enumerate(results):
        if result["status"] != "passed":
            parts.append(f"the all-reduce over {_names(groups[number])} {result['meaning']}")
    return " and ".join(parts)


def _names(group: Mapping[str, Any]) -> str:
    return ", ".join(f"GPU{gpu}" for gpu in group["gpus"])


def _round(
    groups: Sequence[Mapping[str, Any]],
    command: Sequence[str],
    extra: Mapping[str, str],
    backend: str,
    timeout_s: float,
) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(groups)) as pool:
        results = list(
            pool.map(lambda group: _run_group(group, command, extra, backend, timeout_s), groups)
        )
    for number, result in enumerate(results):
        if result["status"] == "unable":
            said = (result["detail"].splitlines() or ["it does not say why"])[-1]
            raise TopologyError(
                f"nothing was probed over {_names(groups[number])}: {said}. Name an interpreter "
                "that has torch with --python, stop what uses the GPUs, and probe again"
            )
    return results


def _run_group(
    group: Mapping[str, Any],
    command: Sequence[str],
    extra: Mapping[str, str],
    backend: str,
    timeout_s: float,
) -> dict[str, Any]:
    """Runs one rank per GPU and waits for all, for one failure, or for the limit."""
    size = len(group["gpus"])
    environment = {key: value for key, value in os.environ.items() if key not in NCCL_OFF}
    environment.update(extra)
    if backend == "nccl":
        visible = group.get("uuids") or [str(gpu) for gpu in group["gpus"]]
        environment.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES=",".join(visible))
    else:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddtree-probe-") as folder:
        store = os.path.join(folder, "store")
        ranks: list[subprocess.Popen[bytes]] = []
        with contextlib.ExitStack() as stack:
            logs = [
                stack.enter_context(open(os.path.join(folder, f"rank{rank}"), "w+b"))
                for rank in range(size)
            ]
            try:
                for rank in range(size):
                    arguments = ["--rank", str(rank), "--world-size", str(size)]
                    arguments += ["--store", store, "--timeout", str(timeout_s)]
                    ranks.append(
                        subprocess.Popen(
                            [*command, *arguments],
                            stdin=subprocess.DEVNULL,
                            stdout=logs[rank],
                            stderr=subprocess.STDOUT,
                            env=environment,
                            start_new_session=True,
                        )
                    )
                codes = _wait(ranks, started + timeout_s)
            except OSError as error:
                raise TopologyError(f"the probe cannot run {command[0]}: {error}") from None
            finally:
                stuck = _kill(ranks)
            status, meaning, speaker = _judge(codes, timeout_s)
            detail = "" if status == "passed" else _tail(logs[speaker])
            reports = [_report(log) for log in logs] if status == "passed" else []
            if not all(reports) and status == "passed":
                status, meaning = "failed", "ended without a report"
    if stuck:
        meaning += f" (process {', '.join(map(str, stuck))} cannot even be killed)"
    return {
        "status": status,
        "meaning": meaning,
        "seconds": round(time.monotonic() - started, 2),
        "peer_access": _all_of([report.get("peer_access") for report in reports]),
        "detail": detail,
    }


def _all_of(answers: Sequence[Any]) -> bool | None:
    return None if not answers or None in answers else all(answers)


def _report(log: Any) -> dict[str, Any]:
    """The rank's JSON line; a rank that says nothing has checked nothing."""
    for line in reversed(_tail(log).splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                report = json.loads(line)
                if isinstance(report, dict) and report.get("checked"):
                    return report
    return {}


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Exit statuses, None for a rank still running when the time or a peer's failure ended it."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if None not in codes or any(codes) or time.monotonic() >= deadline:
            return codes
        time.sleep(0.02)


def _judge(codes: Sequence[int | None], timeout_s: float) -> tuple[str, str, int]:
    """Status, what happened in words, and the rank whose output tells most."""
    numbered = list(enumerate(codes))
    for rank, code in numbered:
        if code == rank_module.WRONG:
            return "wrong", "gave wrong sums", rank
    for rank, code in numbered:
        if code == rank_module.UNABLE:
            return "unable", "could not be tried", rank
    for rank, code in numbered:
        if code:
            return "failed", f"failed (rank {rank}, exit status {code})", rank
    for rank, code in numbered:
        if code is None:
            return "timeout", f"did not finish within {timeout_s:g} s", rank
    return "passed", "passed", 0


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Ends every rank with its children; returns those that outlive SIGKILL (stuck in a driver)."""
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    stuck = []
    for rank in ranks:
        try:
            rank.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            stuck.append(rank.pid)
    return stuck


def _tail(log: Any) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _TAIL_BYTES))
    return str(log.read().decode(errors="replace")).strip()
