# SPDX-License-Identifier: Apache-2.0
"""What one run leaves for the next: a small JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from .errors import HealthError


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def load(path: str, incarnation: str) -> dict[str, Any]:
    """The state of the same start of the same engine; empty if there is none.

    A damaged file counts as none: the checks then begin anew, which can only delay a restart.
    """
    state = read(path) if path else {}
    return state if state.get("incarnation") == incarnation else {}


def judged_invocation(path: str) -> str:
    """systemd's name of the start that a state belongs to; empty if it has none or cannot be read.

    Unlike the incarnation it holds no boot id: in a container a service with a /proc of its own
    sees that of the machine.
    """
    return str(read(path).get("invocation") or "")


def read(path: str) -> dict[str, Any]:
    """What a file holds; nothing if it is not there or damaged."""
    try:
        with open(path, encoding="utf-8") as file:
            state = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def write(path: str, text: str) -> None:
    """Replaces a file in one step.

    Raises:
        HealthError: it cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".ddtree-health-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise HealthError(f"{path} cannot be written: {error.strerror}") from None
