# SPDX-License-Identifier: Apache-2.0
"""The models on this host: where they lie, what was verified, and whether it still holds.

A model is a folder of root's with read-only files and a SHA256SUMS. What was verified is noted per
file with its size and time of change, so that looking again does not read 55 GB: a file is read
again only if one of the two differs, or if everything is to be.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from . import digest
from .errors import ModelsError
from .wanted import MANIFEST, Config, Model, write_manifest

# One file a thread: hashing leaves the interpreter's lock alone.
_HASHERS = min(8, os.cpu_count() or 1)
# Ends of the names of what is noted: what was verified, and that a fetch began.
_NOTED, _BEGUN = ".json", ".begun"


@dataclass(frozen=True)
class Noted:
    """One file as it was when it was verified."""

    sha256: str
    size: int
    mtime_ns: int

    def holds(self, path: str) -> bool:
        try:
            found = os.stat(path)
        except OSError:
            return False
        return (found.st_size, found.st_mtime_ns) == (self.size, self.mtime_ns)


@dataclass(frozen=True)
class Record:
    """What was verified of a model.

    Attributes:
        identity: `Model.identity` of what was fetched.
    """

    identity: Mapping[str, Any]
    files: Mapping[str, Noted]


@dataclass
class State:
    """How a model is found.

    Attributes:
        missing: it was never fetched as it is configured now.
        faults: sentences that name a file.
        read: files whose content was read for this.
    """

    name: str
    missing: str = ""
    faults: list[str] = field(default_factory=list)
    read: int = 0

    @property
    def good(self) -> bool:
        return not self.missing and not self.faults


class Store:
    def __init__(self, config: Config) -> None:
        self._config = config

    def folder(self, model: Model) -> str:
        return os.path.join(self._config.folder, model.name)

    def staging(self, model: Model) -> str:
        """Where a model is put together; on the same file system, kept when interrupted."""
        return os.path.join(self._config.folder, f".{model.name}.partial")

    # ---- what was verified

    def record(self, model: Model) -> Record | None:
        """None if nothing is noted, or nothing that can be read: then everything is verified."""
        try:
            with open(self._record_path(model), encoding="utf-8") as file:
                data = json.load(file)
            files = {path: Noted(*values) for path, values in data["files"].items()}
            return Record(data["identity"], files)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note(self, model: Model, files: Mapping[str, str]) -> None:
        """Notes that these files were just verified."""
        noted = {}
        for path, sha256 in sorted(files.items()):
            found = os.stat(os.path.join(self.folder(model), path))
            noted[path] = (sha256, found.st_size, found.st_mtime_ns)
        self._write_record(model, {"identity": model.identity, "files": noted})

    def _doubt(self, model: Model, record: Record) -> None:
        """Notes that every file has to be read before it is believed again."""
        files = {path: (noted.sha256, -1, 0) for path, noted in record.files.items()}
        self._write_record(model, {"identity": dict(record.identity), "files": files})

    def _write_record(self, model: Model, record: Mapping[str, Any]) -> None:
        os.makedirs(self._config.state, mode=0o755, exist_ok=True)
        write(self._record_path(model), json.dumps(record, indent=1))

    def begin(self, model: Model) -> None:
        """Notes where a model is put together, before there is anything of it."""
        os.makedirs(self._config.state, mode=0o755, exist_ok=True)
        write(self._begun_path(model.name), json.dumps({"folder": self._config.folder}))

    def remove(self, name: str) -> None:
        """Removes what this store made of a model, wherever it was put then."""
        begun = self._begun_path(name)
        try:
            with open(begun, encoding="utf-8") as file:
                folder = str(json.load(file)["folder"])
        except (OSError, ValueError, KeyError, TypeError):
            folder = self._config.folder
        staging = os.path.join(folder, f".{name}.partial")
        remove_tree(staging)
        remove_tree(f"{staging}.old")
        # Begun and never finished: a folder of that name is not ours yet.
        if os.path.exists(self._noted_path(name)):
            remove_tree(os.path.join(folder, name))
        for path in (begun, self._noted_path(name)):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)

    def noted(self) -> list[str]:
        """Names of all models that were fetched or begun, also of those no longer configured."""
        try:
            names = os.listdir(self._config.state)
        except FileNotFoundError:
            return []
        ends = (_BEGUN, _NOTED)
        return sorted({name[: -len(end)] for name in names for end in ends if name.endswith(end)})

    def _record_path(self, model: Model) -> str:
        return self._noted_path(model.name)

    def _noted_path(self, name: str) -> str:
        return os.path.join(self._config.state, name + _NOTED)

    def _begun_path(self, name: str) -> str:
        return os.path.join(self._config.state, name + _BEGUN)

    def present(self, model: Model) -> bool:
        """Something of it is or was here; a model that is yet to be fetched has neither."""
        return self.record(model) is not None or os.path.lexists(self.folder(model))

    def used(self, models: Iterable[Model], words: Iterable[str]) -> list[Model]:
        """The models whose folder, or something in it, one of these words names.

        Args:
            words: of a command line; those that name no folder are passed over.
        """
        paths = [os.path.realpath(word.rpartition("=")[2]) for word in words if "/" in word]
        return [
            model
            for model in models
            for folder in [os.path.realpath(self.folder(model))]
            if any(path == folder or path.startswith(f"{folder}/") for path in paths)
        ]

    # ---- whether it holds

    def check(self, model: Model, full: bool = False, installed: bool = False) -> State:
        """Compares a model with what was noted.

        Args:
            full: reads every file, not only those whose size or time has changed.
            installed: accepts what was fetched last, whatever is configured now.
        """
        state = State(model.name)
        record = self.record(model)
        if record is None:
            state.missing = f"{model.name} was never fetched and verified on this host"
            return state
        if not installed and dict(record.identity) != model.identity:
            state.missing = f"{model.name} was fetched as something else than {model.origin}"
            return state
        folder = self.folder(model)
        to_read = [
            path
            for path, noted in sorted(record.files.items())
            if full or not noted.holds(os.path.join(folder, path))
        ]
        state.read = len(to_read)
        with ThreadPoolExecutor(_HASHERS) as pool:
            faults = pool.map(lambda path: _fault(folder, path, record.files[path]), to_read)
            state.faults = [fault for fault in faults if fault]
        state.faults += [
            f"{path} in {folder} does not belong to the model; vLLM might load it"
            for path in _weights(folder)
            if path not in record.files
        ]
        if full and state.faults:
            # Size and time are what they were: without this the next look would find it good.
            with contextlib.suppress(OSError):
                self._doubt(model, record)
        if to_read and state.good and dict(record.identity) == model.identity:
            # The service looks as its own user and cannot write; root's next look notes it.
            with contextlib.suppress(OSError):
                self.note(model, {path: noted.sha256 for path, noted in record.files.items()})
        return state

    def intact(self, model: Model, path: str) -> str:
        """SHA-256 of a file that is in the folder as it was verified, "" if it is not."""
        record = self.record(model)
        noted = record.files.get(path) if record else None
        held = noted is not None and noted.holds(os.path.join(self.folder(model), path))
        return noted.sha256 if noted is not None and held else ""

    # ---- putting in place

    def put(self, model: Model, files: Mapping[str, str]) -> None:
        """Replaces the folder by the staged one. What an engine has open stays as it is."""
        staging, folder = self.staging(model), self.folder(model)
        write(os.path.join(staging, MANIFEST), write_manifest(files))
        for path in (*files, MANIFEST):
            os.chmod(os.path.join(staging, path), 0o444)
        for directory, _, _ in os.walk(staging):
            os.chmod(directory, 0o755)
        old = f"{staging}.old"
        remove_tree(old)
        if os.path.lexists(folder):
            os.rename(folder, old)
        os.rename(staging, folder)
        remove_tree(old)
        self.note(model, files)


def _fault(folder: str, path: str, noted: Noted) -> str:
    where = os.path.join(folder, path)
    try:
        sha256 = digest.of_file(where).sha256
    except FileNotFoundError:
        return f"{where} is missing"
    except OSError as error:
        return f"{where} cannot be read ({error.strerror})"
    if sha256 != noted.sha256:
        return f"{where} is corrupted: its SHA-256 is {sha256}, not {noted.sha256}"
    return ""


def _weights(folder: str) -> Iterable[str]:
    for directory, _, names in os.walk(folder):
        for name in names:
            if name.endswith((".safetensors", ".bin", ".pt")):
                yield os.path.relpath(os.path.join(directory, name), folder)


def write(path: str, text: str) -> None:
    """Replaces a file in one step."""
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def remove_tree(path: str) -> None:
    """Removes a folder of ours, links not followed."""
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        os.remove(path)
        return
    for directory, folders, names in os.walk(path, topdown=False):
        for name in names:
            os.remove(os.path.join(directory, name))
        for name in folders:
            full = os.path.join(directory, name)
            os.remove(full) if os.path.islink(full) else os.rmdir(full)
    os.rmdir(path)


def require_root(folder: str) -> None:
    """Raises:
    ModelsError: the store cannot be written.
    """
    os.makedirs(folder, mode=0o755, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ModelsError(f"{folder} cannot be written: run this as root")
