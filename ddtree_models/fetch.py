# SPDX-License-Identifier: Apache-2.0
"""Fetches a model: several files at a time, each continued where it stopped, each verified.

Files are put together in a folder beside the store's and the whole replaces it at the end, so that
an engine never sees half a model. What the folder already has is taken over by a hard link.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from . import digest
from .errors import InterruptedTransfer, ModelsError
from .sources import Source
from .store import Store, require_root
from .wanted import Config, Model, WantedFile

# In a row and without a byte between them; a byte starts the count anew.
ATTEMPTS = 6
_FIRST_PAUSE_S = 1.0
_REPORT_EVERY_S = 10.0
_PART = ".part"
_BLOCK = 1 << 20


class Progress:
    """Counts bytes of all transfers and says now and then how far they are."""

    def __init__(self, name: str, total: int, files: int, say: Callable[[str], None]) -> None:
        self._name, self._total, self._files, self._say = name, total, files, say
        self._lock = threading.Lock()
        self._began = self._said = time.monotonic()
        self.kept = self.moved = self.done = 0

    def keep(self, amount: int) -> None:
        """Bytes that need no transfer: they are here already."""
        with self._lock:
            self.kept += amount

    def move(self, amount: int) -> None:
        with self._lock:
            self.moved += amount
            now = time.monotonic()
            if now - self._said < _REPORT_EVERY_S:
                return
            self._said = now
        self._say(self.text())

    def finish(self) -> None:
        with self._lock:
            self.done += 1

    def text(self) -> str:
        here = self.kept + self.moved
        rate = self.moved / max(time.monotonic() - self._began, 0.001)
        left = f", {_span((self._total - here) / rate)} left" if rate and self._total > here else ""
        return (
            f"{self._name}: {size_text(here)} of {size_text(self._total)}, "
            f"{self.done} of {self._files} files, {rate / 1e6:.0f} MB/s{left}"
        )


def size_text(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB" if amount >= 1e8 else f"{amount / 1e6:.1f} MB"


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def fetch(
    store: Store,
    model: Model,
    source: Source,
    config: Config,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Brings a model into the store.

    Raises:
        ModelsError: names the file, or what else is wrong. What was transferred is kept.
    """
    require_root(config.folder)
    wanted = _listing(source, pause, say)
    staging = store.staging(model)
    store.begin(model)
    _sweep(staging, wanted)
    sha256s: dict[str, str] = {}
    for file in wanted:
        taken = _take_over(store, model, file)
        if taken:
            sha256s[file.path] = taken
    todo = sorted(
        (file for file in wanted if file.path not in sha256s),
        key=lambda file: -(file.size or 0),  # the largest first: none is left alone at the end
    )
    _check_space(todo, staging, config)
    progress = Progress(model.name, sum(file.size or 0 for file in wanted), len(wanted), say)
    for file in wanted:
        if file.path in sha256s:
            progress.keep(file.size or 0)
            progress.finish()
    if todo:
        say(f"{model.name}: fetching {len(todo)} of {len(wanted)} files from {model.origin}")
    sha256s.update(_transfer(source, todo, staging, config.workers, progress, pause))
    store.put(model, sha256s)
    say(f"{progress.text()}, verified")


def reach(
    store: Store,
    model: Model,
    source: Source,
    pause: Callable[[float], None] = time.sleep,
    attempts: int = 2,
) -> None:
    """Asks the origin of a model that is yet to come whether it can be had; nothing else is asked.

    Raises:
        ModelsError: it cannot, and why.
    """
    record = store.record(model)
    if record is not None and dict(record.identity) == model.identity:
        return
    for attempt in range(attempts):
        try:
            return source.reach()
        except InterruptedTransfer:
            if attempt == attempts - 1:
                raise
            pause(_FIRST_PAUSE_S)


def _listing(
    source: Source, pause: Callable[[float], None], say: Callable[[str], None]
) -> list[WantedFile]:
    for attempt in range(ATTEMPTS):
        try:
            return source.files()
        except InterruptedTransfer as error:
            if attempt == ATTEMPTS - 1:
                raise
            say(f"{error}; asking again")
            pause(_FIRST_PAUSE_S * 2**attempt)
    raise AssertionError


def _sweep(staging: str, wanted: Sequence[WantedFile]) -> None:
    """Makes the staging folder, and removes from it what no longer belongs there."""
    os.makedirs(staging, mode=0o755, exist_ok=True)
    known = {file.path for file in wanted} | {file.path + _PART for file in wanted}
    for directory, folders, names in os.walk(staging, topdown=False):
        for name in names:
            path = os.path.join(directory, name)
            if os.path.relpath(path, staging) not in known:
                os.remove(path)
        for name in folders:
            path = os.path.join(directory, name)
            if not os.path.islink(path) and not os.listdir(path):
                os.rmdir(path)


def _take_over(store: Store, model: Model, file: WantedFile) -> str:
    """SHA-256 of a file that need not come again, put into the staging folder; "" if it must."""
    staged = os.path.join(store.staging(model), file.path)
    if os.path.exists(staged):
        digests = digest.of_file(staged, git=not file.sha256)
        if not digests.fault(file):
            return digests.sha256
        os.remove(staged)
    present = os.path.join(store.folder(model), file.path)
    if os.path.islink(present) or not os.path.isfile(present):
        return ""
    if file.size is not None and os.path.getsize(present) != file.size:
        return ""
    known = store.intact(model, file.path)
    if not known or known != file.sha256:
        digests = digest.of_file(present, git=not file.sha256)
        if digests.fault(file):
            return ""
        known = digests.sha256
    os.makedirs(os.path.dirname(staged), mode=0o755, exist_ok=True)
    if os.stat(present).st_uid != os.geteuid():
        # Somebody else's file could be changed by them after it was verified: only a copy is ours.
        return ""
    os.link(present, staged)
    return known


def _check_space(todo: Sequence[WantedFile], staging: str, config: Config) -> None:
    here = sum(
        os.path.getsize(path)
        for path in (os.path.join(staging, file.path + _PART) for file in todo)
        if os.path.exists(path)
    )
    needed = sum(file.size or 0 for file in todo) - here
    found = os.statvfs(staging)
    free = found.f_bavail * found.f_frsize - config.reserve_mib * 2**20
    if needed > free:
        raise ModelsError(
            f"{config.folder} has {size_text(max(free, 0))} free beside the {config.reserve_mib} MiB "
            f"that stay free, and {size_text(needed)} are to come: make room, or name another "
            "model_store_dir"
        )


def _transfer(
    source: Source,
    todo: Sequence[WantedFile],
    staging: str,
    workers: int,
    progress: Progress,
    pause: Callable[[float], None],
) -> dict[str, str]:
    """Path -> SHA-256. The first failure stops the others at their next block."""
    stop = threading.Event()
    sha256s: dict[str, str] = {}
    with ThreadPoolExecutor(workers) as pool:
        waiting: dict[Future[str], WantedFile] = {
            pool.submit(_file, source, file, staging, progress, pause, stop): file for file in todo
        }
        failures: list[BaseException] = []
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                file = waiting.pop(future)
                error = future.exception()
                if error is None:
                    sha256s[file.path] = future.result()
                    continue
                failures.append(error)
                stop.set()
                for other in waiting:
                    other.cancel()
                waiting = {other: name for other, name in waiting.items() if not other.cancelled()}
        if failures:
            raise failures[0]
    return sha256s


class _Stopped(ModelsError):
    """Another file failed."""


def _file(
    source: Source,
    file: WantedFile,
    staging: str,
    progress: Progress,
    pause: Callable[[float], None],
    stop: threading.Event,
) -> str:
    """Transfers one file, from where an earlier attempt ended; returns its SHA-256."""
    path = os.path.join(staging, file.path)
    part = path + _PART
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    kept = os.path.getsize(part) if os.path.exists(part) else 0
    progress.keep(kept)
    failed = 0
    fault = ""
    while True:
        before = os.path.getsize(part) if os.path.exists(part) else 0
        try:
            digests = _attempt(source, file, part, progress, stop)
        except InterruptedTransfer as error:
            after = os.path.getsize(part) if os.path.exists(part) else 0
            failed = 1 if after > before else failed + 1
            if failed >= ATTEMPTS:
                raise ModelsError(
                    f"{file.path}: {error}, {ATTEMPTS} times in a row. What came is kept; a new run continues"
                ) from None
            pause(_FIRST_PAUSE_S * 2 ** (failed - 1))
            continue
        fault = digests.fault(file)
        if not fault:
            os.replace(part, path)
            progress.finish()
            return digests.sha256
        size = os.path.getsize(part)
        os.remove(part)
        progress.move(-size)
        if not kept:
            # All of it came from there just now: asking again brings the same.
            raise ModelsError(f"{file.path} is corrupted at its origin: {fault}")
        kept = 0  # perhaps what lay here was: once more from the start


def _attempt(
    source: Source, file: WantedFile, part: str, progress: Progress, stop: threading.Event
) -> digest.Digests:
    """One request; its data and what was there before are the file.

    Raises:
        InterruptedTransfer: it ended early.
    """
    digests = _digests(file)
    have = os.path.getsize(part) if os.path.exists(part) else 0
    # Without a size nothing tells a part from a whole.
    if have and (file.size is None or have > file.size):
        os.remove(part)
        progress.move(-have)
        have = 0
    for block in digest.blocks(part) if have else ():
        digests.update(block)
    if have and have == file.size:
        return digests
    if file.size == 0:
        open(part, "wb").close()
        return digests
    with source.open(file.path, have) as (answer, start):
        if start != have:
            # The server knows no ranges and sends the whole.
            digests = _digests(file)
            progress.move(-have)
            have = 0
        # Unbuffered: what a killed process has taken is on disk.
        with open(part, "ab" if have else "wb", buffering=0) as output:
            while True:
                if stop.is_set():
                    raise _Stopped(f"{file.path}: stopped, since another file failed")
                # read1: what has come so far, so that little is lost when the process ends.
                block = answer.read1(_BLOCK)
                if not block:
                    break
                try:
                    _write_all(output, block)
                except OSError as error:
                    raise ModelsError(
                        f"{part} cannot be written ({error.strerror}); what came is kept"
                    ) from None
                digests.update(block)
                have += len(block)
                progress.move(len(block))
    if file.size is not None and have < file.size:
        raise InterruptedTransfer(f"{have} of {file.size} bytes came")
    return digests


def _digests(file: WantedFile) -> digest.Digests:
    return digest.Digests(None if file.sha256 else file.size)


def _write_all(output: Any, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[output.write(view) :]
