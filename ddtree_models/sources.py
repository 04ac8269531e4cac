# SPDX-License-Identifier: Apache-2.0
"""Where models come from: a repository of Hugging Face, an HTTP mirror, a directory of the host.

The hub is asked in its own HTTP interface instead of through `huggingface_hub`: the hosts have
Python and nothing else, and that package, at 2.4, does not continue a file that a killed process left.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol

from .errors import InterruptedTransfer, ModelsError
from .wanted import MANIFEST, Config, Model, WantedFile, check_path, read_manifest

TIMEOUT_S = 60
_USER_AGENT = "ddtree-models"
_LATER = (408, 425, 429, 500, 502, 503, 504)


class Source(Protocol):
    """A model at its origin."""

    def files(self) -> list[WantedFile]:
        """Every file of the model, those excluded left out."""

    def reach(self) -> None:
        """Asks as little as shows that the files can be had, before any is.

        Raises:
            ModelsError: they cannot.
        """

    def open(self, path: str, offset: int) -> Any:
        """Context manager: the file from `offset` on, and the offset it really starts at."""


def source_of(model: Model, config: Config, token: str) -> Source:
    if model.repo:
        return Hub(model, config.endpoint, token)
    if model.url:
        return Mirror(model)
    return Directory(model)


class _KeepTokenHome(urllib.request.HTTPRedirectHandler):
    """Files lie on other hosts than the hub's; those must not see the token."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and _origin(new.full_url) != _origin(req.full_url):
            new.remove_header("Authorization")
        return new


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_KeepTokenHome())


class _Web:
    """GET with ranges; errors become sentences."""

    def __init__(self, what: str, token: str = "") -> None:
        self._what, self._token, self._opener = what, token, _opener()

    @contextmanager
    def get(self, url: str, offset: int = 0, method: str = "GET") -> Iterator[tuple[Any, int]]:
        """The answer, and the offset at which it starts.

        Raises:
            InterruptedTransfer: asking again may help.
            ModelsError: it will not.
        """
        headers = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if offset:
            headers["Range"] = f"bytes={offset}-"
        try:
            with self._opener.open(
                urllib.request.Request(url, headers=headers, method=method), timeout=TIMEOUT_S
            ) as answer:
                yield answer, _start(answer)
        except urllib.error.HTTPError as error:
            raise self._refusal(url, error.code) from None
        # Python 3.9 does not yet call socket.timeout TimeoutError. Of TLS: a record that came damaged;
        # a certificate that is not trusted comes as the reason of an URLError.
        except (  # noqa: UP041
            http.client.HTTPException,
            socket.timeout,
            TimeoutError,
            ConnectionError,
            ssl.SSLError,
        ) as error:
            raise InterruptedTransfer(f"{_place(url)}: {error or type(error).__name__}") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise ModelsError(
                    f"{_place(url)} shows a certificate that this host does not trust "
                    f"({error.reason.verify_message}); install its authority's certificate"
                ) from None
            raise InterruptedTransfer(f"{_place(url)} is not reached: {error.reason}") from None

    def _refusal(self, url: str, status: int) -> ModelsError:
        if status in _LATER:
            return InterruptedTransfer(f"{_place(url)} answered {status}")
        if status in (401, 403):
            how = "with the token given" if self._token else "without a token"
            return ModelsError(
                f"{_place(url)} refuses {self._what} {how} ({status}): accept its conditions there, "
                "and set model_store_token to a token of the account that did"
            )
        if status == 404:
            return ModelsError(f"{url} is not there (404)")
        return ModelsError(f"{url} answered {status}")


def _start(answer: Any) -> int:
    """Offset of a partial answer, 0 of a whole one: a server may know no ranges."""
    if answer.status != 206:
        return 0
    unit, _, rest = (answer.headers.get("Content-Range") or "").partition(" ")
    first = rest.partition("-")[0]
    if unit != "bytes" or not first.isdigit():
        raise ModelsError(f"{answer.url} answered a range without saying which")
    return int(first)


def _place(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc


class Hub:
    """A repository of Hugging Face, or of a server with the same interface."""

    def __init__(self, model: Model, endpoint: str, token: str) -> None:
        self._model, self._endpoint = model, endpoint.rstrip("/")
        self._web = _Web(model.repo, token)

    def files(self) -> list[WantedFile]:
        url: str | None = (
            f"{self._endpoint}/api/models/{self._model.repo}/tree/{self._model.revision}"
            "?recursive=true&expand=false"
        )
        found = []
        while url:
            with self._web.get(url) as (answer, _):
                try:
                    entries = json.load(answer)
                except ValueError:
                    raise ModelsError(f"{url} did not answer with JSON: no hub is there") from None
                url = _next_page(answer.headers.get("Link") or "")
            for entry in entries:
                if entry.get("type") == "file" and self._model.keeps(entry["path"]):
                    found.append(self._file(entry))
        if not found:
            raise ModelsError(f"{self._model.repo} has no file at {self._model.revision}")
        return found

    def reach(self) -> None:
        # Anybody may list a gated repository; its conditions stand before the files.
        path = min(self.files(), key=lambda file: file.size or 0).path
        with self._web.get(self._address(path), method="HEAD"):
            pass

    def _address(self, path: str) -> str:
        repo, revision = self._model.repo, self._model.revision
        return f"{self._endpoint}/{repo}/resolve/{revision}/{urllib.parse.quote(path)}"

    def _file(self, entry: dict[str, Any]) -> WantedFile:
        path = check_path(entry["path"], self._model.repo)
        lfs = entry.get("lfs") or {}
        return WantedFile(
            path,
            int(lfs.get("size", entry["size"])),
            sha256=lfs.get("oid", ""),
            git_sha1="" if lfs else entry["oid"],
        )

    @contextmanager
    def open(self, path: str, offset: int) -> Iterator[tuple[BinaryIO, int]]:
        with self._web.get(self._address(path), offset) as found:
            yield found


def _next_page(link: str) -> str | None:
    for part in link.split(","):
        address, _, relation = part.partition(";")
        if 'rel="next"' in relation:
            return address.strip().strip("<>")
    return None


class Mirror:
    """Files over HTTP, named by the SHA256SUMS beside them."""

    def __init__(self, model: Model) -> None:
        self._model, self._base = model, model.url.rstrip("/")
        self._web = _Web(model.url)

    def files(self) -> list[WantedFile]:
        sized = []
        for wanted in self._named():
            with self._web.get(self._url(wanted.path), method="HEAD") as (answer, _):
                length = answer.headers.get("Content-Length") or ""
            size = int(length) if length.isdigit() else None
            sized.append(WantedFile(wanted.path, size, sha256=wanted.sha256))
        return sized

    def reach(self) -> None:
        self._named()

    def _named(self) -> list[WantedFile]:
        where = f"{self._base}/{MANIFEST}"
        with self._web.get(where) as (answer, _):
            return _from_manifest(self._model, answer.read(), where)

    @contextmanager
    def open(self, path: str, offset: int) -> Iterator[tuple[BinaryIO, int]]:
        with self._web.get(self._url(path), offset) as found:
            yield found

    def _url(self, path: str) -> str:
        return f"{self._base}/{urllib.parse.quote(path)}"


class Directory:
    """A directory of the host, such as a mounted share, with a SHA256SUMS in it."""

    def __init__(self, model: Model) -> None:
        self._model, self._base = model, model.directory

    def files(self) -> list[WantedFile]:
        where = os.path.join(self._base, MANIFEST)
        try:
            with open(where, "rb") as file:
                manifest = file.read()
        except OSError as error:
            raise ModelsError(
                f"{where} cannot be read ({error.strerror}); "
                f"`find . -type f ! -name {MANIFEST} -exec sha256sum {{}} + >{MANIFEST}` in it writes one"
            ) from None
        sized = []
        for wanted in _from_manifest(self._model, manifest, where):
            try:
                size = os.path.getsize(os.path.join(self._base, wanted.path))
            except OSError as error:
                raise ModelsError(
                    f"{wanted.path} of {self._base} cannot be read ({error.strerror})"
                ) from None
            sized.append(WantedFile(wanted.path, size, sha256=wanted.sha256))
        return sized

    def reach(self) -> None:
        self.files()

    @contextmanager
    def open(self, path: str, offset: int) -> Iterator[tuple[BinaryIO, int]]:
        try:
            with open(os.path.join(self._base, path), "rb") as file:
                file.seek(offset)
                yield file, offset
        except OSError as error:
            raise ModelsError(f"{path} of {self._base} cannot be read ({error.strerror})") from None


def _from_manifest(model: Model, manifest: bytes, where: str) -> list[WantedFile]:
    digest = hashlib.sha256(manifest).hexdigest()
    if model.manifest_sha256 and digest != model.manifest_sha256:
        raise ModelsError(
            f"{where} is not the one that manifest_sha256 of {model.name} names: its SHA-256 is {digest}"
        )
    try:
        text = manifest.decode()
    except UnicodeDecodeError:
        raise ModelsError(f"{where} is not text") from None
    files = read_manifest(text, where)
    return [
        WantedFile(path, None, sha256=digest)
        for path, digest in files.items()
        if path != MANIFEST and model.keeps(path)
    ]
