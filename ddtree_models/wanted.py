# SPDX-License-Identifier: Apache-2.0
"""What the host is to hold: the models of `models.json`, and the files of each."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ModelsError

HUB = "https://huggingface.co"
MANIFEST = "SHA256SUMS"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SOURCES = ("repo", "url", "directory")
_KEYS = {"name", "revision", "manifest_sha256", "exclude", "gigabytes", *_SOURCES}


@dataclass(frozen=True)
class WantedFile:
    """One file of a model, with what it is checked by.

    Attributes:
        path: relative, with /.
        size: bytes; None if only the transfer tells.
        sha256: hex digest; "" if the source gives `git_sha1` instead.
        git_sha1: hex digest that git gives the file, for the small files of a repository.
    """

    path: str
    size: int | None
    sha256: str = ""
    git_sha1: str = ""


@dataclass(frozen=True)
class Model:
    """One folder of the store, and where it comes from: one of `repo`, `url`, `directory`.

    Attributes:
        revision: commit of `repo`.
        manifest_sha256: digest of the SHA256SUMS of `url` or `directory`.
        exclude: patterns of files to leave out.
    """

    name: str
    repo: str = ""
    revision: str = ""
    url: str = ""
    directory: str = ""
    manifest_sha256: str = ""
    exclude: tuple[str, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the content; where a manifest does, the place it comes from does not."""
        if self.repo:
            content = {"repo": self.repo, "revision": self.revision}
        elif self.manifest_sha256:
            content = {"manifest_sha256": self.manifest_sha256}
        else:
            content = {"directory": self.directory}
        return {**content, "exclude": list(self.exclude)}

    @property
    def origin(self) -> str:
        return f"{self.repo} at {self.revision[:12]}" if self.repo else self.url or self.directory

    def keeps(self, path: str) -> bool:
        return not any(fnmatch.fnmatchcase(path, pattern) for pattern in self.exclude)


@dataclass(frozen=True)
class Config:
    """Attributes:
    folder: the store, one subfolder per model.
    state: where is noted what was verified.
    endpoint: of the hub.
    workers: transfers at a time.
    reserve_mib: disk space to leave free.
    """

    models: tuple[Model, ...]
    folder: str = "/srv/ddtree/models"
    state: str = "/var/lib/ddtree-models"
    endpoint: str = HUB
    workers: int = 8
    reserve_mib: int = 2048


def read_config(path: str) -> Config:
    """Reads `models.json`.

    Raises:
        ModelsError: it is not there, or asks for what cannot be had.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        raise ModelsError(
            f"{path} cannot be read ({error}); the role model_store writes it"
        ) from None
    return config_from(data)


def config_from(data: Mapping[str, Any]) -> Config:
    """The same from plain data.

    Raises:
        ModelsError: names the model and what is wrong with it.
    """
    if not isinstance(data, Mapping):
        raise ModelsError("the settings are no mapping with a list of models")
    listed = data.get("models", ())
    if not isinstance(listed, (list, tuple)):
        raise ModelsError("models is no list")
    models = [_model(item, position) for position, item in enumerate(listed)]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ModelsError(f"two models are called {name}")
    options = {key: data[key] for key in data if key != "models"}
    unknown = options.keys() - {"folder", "state", "endpoint", "workers", "reserve_mib"}
    if unknown:
        raise ModelsError(f"unknown settings: {', '.join(sorted(unknown))}")
    for key, least in (("workers", 1), ("reserve_mib", 0)):
        # As text too: what is given to Ansible on its command line is one.
        value = str(options.get(key, least))
        if not value.isdigit() or int(value) < least:
            raise ModelsError(f"{key} has to be {least} or more, and a whole number")
        if key in options:
            options[key] = int(value)
    return Config(tuple(models), **options)


def _model(item: Mapping[str, Any], position: int) -> Model:
    if not isinstance(item, Mapping):
        raise ModelsError(f"models[{position}] is no mapping with name, repo and the like")
    name = str(item.get("name", ""))
    what = f"model {name}" if name else f"models[{position}]"
    unknown = set(item) - _KEYS
    if unknown:
        raise ModelsError(f"{what} has unknown keys: {', '.join(sorted(unknown))}")
    if not _NAME.fullmatch(name):
        raise ModelsError(
            f"{what}: name is the name of a folder, of letters, digits, dots, dashes and underscores"
        )
    exclude = item.get("exclude") or ()
    # Of a text each character would be a pattern.
    if not isinstance(exclude, (list, tuple)) or not all(isinstance(one, str) for one in exclude):
        raise ModelsError(f"{what}: exclude is a list of patterns, such as ['*.bin']")
    given = [key for key in _SOURCES if item.get(key)]
    if len(given) != 1:
        raise ModelsError(
            f"{what} names {', '.join(given) or 'no source'}; it has to name one of repo, url and directory"
        )
    model = Model(
        name=name,
        exclude=tuple(exclude),
        **{
            key: str(item.get(key) or "")
            for key in ("repo", "revision", "url", "directory", "manifest_sha256")
        },
    )
    if model.repo and not _REPO.fullmatch(model.repo):
        raise ModelsError(f"{what}: {model.repo!r} is not OWNER/NAME")
    if model.repo and not _COMMIT.fullmatch(model.revision):
        raise ModelsError(
            f"{what} pins no revision: a branch or tag can change, so revision has to be the 40 digits of a "
            f"commit. `git ls-remote {HUB}/{model.repo} HEAD` prints the newest"
        )
    if not model.repo and model.revision:
        raise ModelsError(f"{what}: revision belongs to repo; manifest_sha256 pins the others")
    if model.url and not _SHA256.fullmatch(model.manifest_sha256):
        raise ModelsError(
            f"{what} comes from a mirror, so manifest_sha256 has to be what "
            f"`sha256sum {MANIFEST}` says there"
        )
    if model.url and not model.url.startswith(("https://", "http://")):
        raise ModelsError(f"{what}: {model.url} is not an http:// or https:// address")
    if model.directory and not model.directory.startswith("/"):
        raise ModelsError(f"{what}: directory has to be an absolute path on the host")
    if model.manifest_sha256 and not _SHA256.fullmatch(model.manifest_sha256):
        raise ModelsError(f"{what}: manifest_sha256 is not a SHA-256 digest")
    return model


def read_manifest(text: str, where: str) -> dict[str, str]:
    """Path -> SHA-256, of a file that `sha256sum` wrote.

    Raises:
        ModelsError: a line is something else, or names a path outside the folder.
    """
    files: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        digest, _, path = line.partition(" ")
        # Two characters before the name: a space, and a space or an asterisk.
        path = path[1:] if path[:1] in (" ", "*") else path
        path = path[2:] if path.startswith("./") else path
        if not _SHA256.fullmatch(digest) or not path:
            raise ModelsError(
                f"line {number} of {where} is not one that `sha256sum` writes: {line!r}"
            )
        files[check_path(path, where)] = digest
    if not files:
        raise ModelsError(f"{where} names no file")
    return files


def write_manifest(files: Mapping[str, str]) -> str:
    """What `sha256sum` would write; `sha256sum --check` reads it."""
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(files.items()))


def check_path(path: str, where: str) -> str:
    """The path itself.

    Raises:
        ModelsError: it leads out of the folder.
    """
    parts: Sequence[str] = path.split("/")
    if path.startswith("/") or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise ModelsError(f"{where} names {path!r}, which leads out of the model's folder")
    return path
