# SPDX-License-Identifier: Apache-2.0
"""The host as the checks see it: files below a root, commands, the clock. Reads only."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TIMEOUT_S = 60.0  # a wedged driver blocks nvidia-smi for ever


@dataclass(frozen=True)
class Done:
    """What a command answered.

    Attributes:
        status: exit status; None if there is no such command, -1 if it did not answer in time.
    """

    status: int | None
    out: str

    @property
    def absent(self) -> bool:
        return self.status is None

    @property
    def hung(self) -> bool:
        return self.status == -1

    @property
    def said(self) -> str:
        """The last line, for a sentence."""
        lines = [line.strip() for line in self.out.splitlines() if line.strip()]
        return lines[-1] if lines else "nothing"


@dataclass(frozen=True)
class Permissions:
    """Of a file: its mode's bits, its owner and its group by number."""

    mode: int
    owner: int
    group: int


Run = Callable[[Sequence[str], float], Done]


def run_command(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> Done:
    """Runs a command; its standard error counts as output."""
    try:
        process = subprocess.Popen(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return Done(None, "")
    except OSError as error:
        return Done(126, str(error))
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # Not waited for to the end: what hangs in a driver is not ended by SIGKILL either.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return Done(-1, "")
    return Done(process.returncode, out)


class Host:
    """Args:
    root: where /proc, /sys and /etc are looked for.
    run: runs a command.
    """

    def __init__(self, root: str = "/", run: Run = run_command) -> None:
        self._root, self._run = root, run

    def path(self, name: str) -> str:
        return os.path.join(self._root, name.lstrip("/"))

    def read(self, name: str) -> str:
        """Text of a file, "" if it cannot be read."""
        try:
            with open(self.path(name), encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def permissions(self, name: str) -> Permissions | None:
        """Of what a path leads to, links followed; None if nothing is there."""
        try:
            found = os.stat(self.path(name))
        except OSError:
            return None
        return Permissions(found.st_mode, found.st_uid, found.st_gid)

    def names(self, folder: str) -> list[str]:
        """What is in a folder, [] if it is not there."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def target(self, name: str) -> str:
        """The path that a chain of links ends at."""
        return os.path.realpath(self.path(name))

    def run(self, *command: str, timeout_s: float = TIMEOUT_S) -> Done:
        return self._run(command, timeout_s)

    def free_mib(self, name: str) -> tuple[int, int]:
        """Free MiB of the file system that a path is on or would be on, and that file system's "
        "number."""
        place = self.path(name)
        while not os.path.isdir(place):
            place = os.path.dirname(place)
        found = os.statvfs(place)
        return found.f_bavail * found.f_frsize // 2**20, os.stat(place).st_dev

    def used_mib(self, name: str) -> int:
        """MiB of the files in a folder, 0 if it is not there."""
        total = 0
        for folder, _, names in os.walk(self.path(name)):
            for item in names:
                try:
                    total += os.lstat(os.path.join(folder, item)).st_size
                except OSError:
                    continue  # a fetch that runs has just renamed it
        return total // 2**20

    def size_mib(self, name: str) -> int:
        """Size of a mounted file system, 0 if nothing is there."""
        try:
            found = os.statvfs(self.path(name))
        except OSError:
            return 0
        return found.f_blocks * found.f_frsize // 2**20

    def now(self) -> float:
        return time.time()

    def user(self) -> int:
        return os.geteuid()
