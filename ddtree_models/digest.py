# SPDX-License-Identifier: Apache-2.0
"""Digests of files: SHA-256, and git's for the small files of a repository."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

from .wanted import WantedFile

BLOCK = 1 << 22


class Digests:
    """SHA-256 of what passes by, and git's digest if a size is given."""

    def __init__(self, size: int | None) -> None:
        self._sha256 = hashlib.sha256()
        # Git hashes the length first, so it is known only where the size is.
        self._git: Any = None
        if size is not None:
            self._git = hashlib.sha1(usedforsecurity=False)
            self._git.update(b"blob %d\0" % size)

    def update(self, block: bytes) -> None:
        self._sha256.update(block)
        if self._git is not None:
            self._git.update(block)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def fault(self, wanted: WantedFile) -> str:
        """Why this is not the wanted file; empty if it is."""
        if wanted.sha256:
            if self.sha256 != wanted.sha256:
                return f"its SHA-256 is {self.sha256}, not {wanted.sha256}"
        elif self._git is None or self._git.hexdigest() != wanted.git_sha1:
            return f"its git digest is not {wanted.git_sha1}"
        return ""


def blocks(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while True:
            block = file.read(BLOCK)
            if not block:
                return
            yield block


def of_file(path: str, git: bool = False) -> Digests:
    """Digests of a whole file."""
    digests = Digests(os.path.getsize(path) if git else None)
    for block in blocks(path):
        digests.update(block)
    return digests
