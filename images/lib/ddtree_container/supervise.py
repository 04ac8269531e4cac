# SPDX-License-Identifier: Apache-2.0
"""PID 1: passes signals on, reaps every process, and ends with a code that can be trusted."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Set

STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}
PASSED_ON = STOPS | {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
ENDED_BY_ITSELF = 1
_PR_SET_CHILD_SUBREAPER = 36


class StopRequest(BaseException):
    """A stop that came before there was something to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Raises StopRequest out of what stands in it. PID 1 without handlers never notices a stop."""

    def stop(number: int, _: object) -> None:
        raise StopRequest(number)

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hold_signals() -> Set[int]:
    """Keeps signals for run() from here on; returns the mask that the command gets."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    stop_note: str = "",
    mask: Set[int] | None = None,
) -> int:
    """Runs a command to its end; returns the exit code of the container.

    The command's own, 128 + n if signal n ended it, and 1 instead of 0 if nobody asked it to end:
    vLLM's server ends with 0 when its engine has died.

    Args:
        stop_note: what is said when a stop comes.
        mask: of hold_signals(), where signals are held already.
    """
    if os.getpid() != 1:
        # Behind another PID 1: orphans still come here.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Waited for instead of handled: nothing can come between two lines.
    if mask is None:
        mask = hold_signals()
    # A session of its own: Ctrl-C at a terminal comes here alone, and is passed on once.
    child = subprocess.Popen(
        list(command),
        env=dict(environment),
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),  # noqa: PLW1509 - one thread
    ).pid
    asked = False
    while True:
        number = signal.sigwait(PASSED_ON | {signal.SIGCHLD})
        if number != signal.SIGCHLD:
            if number in STOPS and not asked:
                asked = True
                say(f"{signal.Signals(number).name}: {stop_note or 'passed on'}")
            with contextlib.suppress(ProcessLookupError):
                # vLLM drains on SIGTERM, and knows nothing of SIGQUIT.
                os.kill(child, signal.SIGTERM if number in STOPS else number)
            continue
        code = _reap(child)
        if code is None:
            continue
        if code == 0 and not asked:
            say(
                "the server ended without being asked to: its engine died, and the log above says why"
            )
            return ENDED_BY_ITSELF
        return code


def _reap(child: int) -> int | None:
    """Takes every process that has ended; the exit code of `child` if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended


def say(sentence: str) -> None:
    print(f"ddtree-entrypoint: {sentence}", file=sys.stderr, flush=True)
