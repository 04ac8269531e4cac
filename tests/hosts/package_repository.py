# SPDX-License-Identifier: Apache-2.0
"""A signed repository of Debian packages made for a test, since test hosts reach no mirror.

apt, its signatures and the packages are real; what the packages contain stands in for Docker and for
NVIDIA's container toolkit.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


class PackageRepository:
    """Args:
    folder: what is served.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._home = folder.parent / "gnupg"
        self._home.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(exist_ok=True)
        self._gpg(
            *("--pinentry-mode", "loopback", "--passphrase", ""),
            *("--quick-generate-key", "Test repository <test@example.org>", "ed25519", "sign"),
        )
        self.key = self._gpg("--armor", "--export").encode()

    @property
    def key_checksum(self) -> str:
        return "sha256:" + hashlib.sha256(self.key).hexdigest()

    def publish_key(self, path: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.key)

    def add(self, where: str, name: str, version: str, files: Mapping[str, str]) -> None:
        """Builds a package whose files are scripts or units, by path."""
        root = self.folder.parent / "build" / name
        for path, text in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            target.chmod(0o755 if "/bin/" in f"/{path}" else 0o644)
        (root / "DEBIAN").mkdir(parents=True, exist_ok=True)
        (root / "DEBIAN/control").write_text(
            f"Package: {name}\nVersion: {version}\nArchitecture: amd64\n"
            "Maintainer: Test <test@example.org>\nDescription: stands in for a package\n"
        )
        pool = self.folder / where
        pool.mkdir(parents=True, exist_ok=True)
        self._run("dpkg-deb", "--root-owner-group", "--build", str(root), str(pool))

    def sign(self, where: str, packages_at: str | None = None) -> None:
        """Writes Packages and a signed InRelease.

        Args:
            where: folder of the packages, and of InRelease unless it is a suite.
            packages_at: below a suite, the folder of Packages: stable/binary-amd64.
        """
        pool = self.folder / where
        text = self._run("dpkg-scanpackages", "--multiversion", where, cwd=self.folder)
        if packages_at is None:
            text = text.replace(f"Filename: {where}/", "Filename: ./")
            release, name = pool, "Packages"
        else:
            release, name = pool, f"{packages_at}/Packages"
            # Relative to the folder that holds dists/.
            text = text.replace(
                f"Filename: {where}/", f"Filename: {where[where.index('dists/') :]}/"
            )
        packages = release / name
        packages.parent.mkdir(parents=True, exist_ok=True)
        packages.write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        (release / "Release").write_text(
            "Origin: test\nSuite: stable\nCodename: bookworm\nArchitectures: amd64\nComponents: stable\n"
            f"Date: {self._run('date', '-Ru').strip()}\n"
            f"SHA256:\n {digest} {len(text.encode())} {name}\n"
        )
        self._gpg(
            "--pinentry-mode", "loopback", "--passphrase", "", "--clearsign", "--yes",
            "--output", str(release / "InRelease"), str(release / "Release"),
        )  # fmt: skip

    def _gpg(self, *arguments: str) -> str:
        return self._run("gpg", "--batch", "--quiet", "--homedir", str(self._home), *arguments)

    @staticmethod
    def _run(*command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=60, cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout
