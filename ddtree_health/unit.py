# SPDX-License-Identifier: Apache-2.0
"""What systemd says of the engine's unit."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .errors import HealthError

Run = Callable[[Sequence[str]], str]
_PROPERTIES = ("LoadState", "ActiveState", "SubState", "Result", "InvocationID", "NRestarts")


def run_command(command: Sequence[str], timeout_s: float = 30.0) -> str:
    """Standard output of a command.

    Raises:
        HealthError: it is missing, fails or takes longer than `timeout_s`.
    """
    name = command[0]
    try:
        process = subprocess.Popen(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise HealthError(f"{name} is not on this host") from None
    except OSError as error:
        raise HealthError(f"{name} cannot be run: {error}") from None
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # Not waited for to the end: what hangs in a driver is not ended by SIGKILL either.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        raise HealthError(f"{name} did not answer within {timeout_s:g} s") from None
    if process.returncode != 0:
        said = (err.strip() or out.strip() or "nothing").splitlines()[0]
        raise HealthError(f"{name} failed with exit status {process.returncode}: {said}")
    return out


@dataclass(frozen=True)
class Unit:
    """Attributes:
    active, sub: systemd's ActiveState and SubState.
    result: why it is not active.
    invocation: changes with every start of the unit.
    restarts: how often systemd restarted it by itself.
    """

    name: str
    active: str
    sub: str
    result: str
    invocation: str
    restarts: int


def read(name: str, run: Run = run_command) -> Unit:
    """Raises:
    HealthError: systemd cannot be asked or knows no such unit.
    """
    text = run(["systemctl", "show", f"--property={','.join(_PROPERTIES)}", name])
    found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if found.get("LoadState") not in ("loaded", "masked"):
        raise HealthError(f"systemd knows no unit {name}")
    restarts = found.get("NRestarts", "0")
    return Unit(
        name=name,
        active=found.get("ActiveState", "unknown"),
        sub=found.get("SubState", "unknown"),
        result=found.get("Result", ""),
        invocation=found.get("InvocationID", ""),
        restarts=int(restarts) if restarts.isdigit() else 0,
    )
