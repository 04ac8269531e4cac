# SPDX-License-Identifier: Apache-2.0
"""An HTTP server with the file interface of Hugging Face, for models of a few kilobytes.

Real HTTP over a socket: ranges, HEAD, redirects of large files to another origin, tokens, paging.
`huggingface_hub` itself downloads from it in a test, so its layout is the real one. Runs in a thread
(`with HubServer(folder)`) or by itself: `python hub_server.py FOLDER PORT [TOKEN] [BYTES_PER_S]`.

FOLDER/OWNER/NAME/REVISION/... are the repositories; anything below FOLDER is also served as it lies,
which is what a mirror does.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3  # entries of a listing, so that paging happens


@dataclass
class Request:
    method: str
    path: str
    range: str
    authorized: bool
    host: str


@dataclass
class Behaviour:
    """What goes wrong, and what was asked.

    Attributes:
        token: needed for repositories; "" for none.
        cut_after, cuts: ends a transfer of weights after so many bytes, this often.
        bytes_per_s: 0 is as fast as it goes.
        failures: answers 503 this often.
        corrupt: paths whose first byte is sent wrong.
        ranges: whether ranges are known.
    """

    token: str = ""
    cut_after: int = 0
    cuts: int = 0
    bytes_per_s: int = 0
    failures: int = 0
    corrupt: set[str] = field(default_factory=set)
    ranges: bool = True
    requests: list[Request] = field(default_factory=list)


def is_lfs(path: Path) -> bool:
    return path.suffix == ".safetensors"


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address) -> None:
        """A client that hangs up, as an interrupted fetch does, is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class HubServer:
    """Attributes:
    url: of the hub.
    files_url: of the origin that large files are sent from.
    """

    def __init__(self, folder: Path, port: int = 0, address: str = "127.0.0.1") -> None:
        self.folder, self.behaviour = folder, Behaviour()
        self._servers = [
            _Server((address, wanted), self._handler())
            for wanted in ((port, port + 1) if port else (0, 0))
        ]
        for server in self._servers:
            server.daemon_threads = True
        self.url, self.files_url = (
            f"http://{address}:{server.server_address[1]}" for server in self._servers
        )

    def __enter__(self) -> HubServer:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def asked(self, part: str, method: str = "GET") -> list[Request]:
        return [
            request
            for request in self.behaviour.requests
            if part in request.path and request.method == method
        ]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                state = hub.behaviour
                path = unquote(urlsplit(self.path).path)
                authorization = self.headers.get("Authorization", "")
                state.requests.append(
                    Request(
                        self.command,
                        path,
                        self.headers.get("Range", ""),
                        bool(authorization),
                        f"http://{self.headers.get('Host', '')}",
                    )
                )
                if state.failures:
                    state.failures -= 1
                    return self._empty(503)
                parts = path.strip("/").split("/")
                at_hub = parts[:2] == ["api", "models"] or "resolve" in parts
                if at_hub and state.token and authorization != f"Bearer {state.token}":
                    return self._empty(401)
                if parts[:2] == ["api", "models"] and "tree" in parts:
                    return self._tree(parts[2:4], parts[5])
                if "resolve" in parts:
                    return self._resolve(parts[:2], parts[3], "/".join(parts[4:]))
                return self._file(hub.folder / path.strip("/"), path)

            def _empty(self, status: int, **headers: str) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": "0", **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()

            def _tree(self, repo: list[str], revision: str) -> None:
                root = hub.folder.joinpath(*repo, revision)
                if not root.is_dir():
                    return self._empty(404)
                entries = [
                    self._entry(path, path.relative_to(root).as_posix())
                    for path in sorted(root.rglob("*"))
                ]
                query = parse_qs(urlsplit(self.path).query)
                start = int(query.get("cursor", ["0"])[0])
                body = json.dumps(entries[start : start + PAGE]).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                if start + PAGE < len(entries):
                    self.send_header(
                        "Link",
                        f"<{hub.url}/api/models/{'/'.join(repo)}/tree/{revision}"
                        f'?recursive=true&cursor={start + PAGE}>; rel="next"',
                    )
                self.end_headers()
                self.wfile.write(body)

            def _entry(self, path: Path, name: str) -> dict[str, object]:
                if path.is_dir():
                    return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
                data = path.read_bytes()
                entry: dict[str, object] = {
                    "type": "file",
                    "oid": git_sha1(data),
                    "size": len(data),
                    "path": name,
                }
                if is_lfs(path):
                    sha256 = hashlib.sha256(data).hexdigest()
                    entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 134}
                return entry

            def _resolve(self, repo: list[str], revision: str, name: str) -> None:
                path = hub.folder.joinpath(*repo, revision, name)
                if not path.is_file():
                    return self._empty(404, X_Error_Code="EntryNotFound")
                data = path.read_bytes()
                if not is_lfs(path):
                    return self._file(
                        path, name, X_Repo_Commit=revision, ETag=f'"{git_sha1(data)}"'
                    )
                # As the hub does: the digest at home, the data elsewhere.
                self._empty(
                    302,
                    Location=f"{hub.files_url}/{'/'.join(repo)}/{revision}/{name}",
                    X_Repo_Commit=revision,
                    X_Linked_Size=str(len(data)),
                    X_Linked_ETag=f'"{hashlib.sha256(data).hexdigest()}"',
                )

            def _file(self, path: Path, name: str, **headers: str) -> None:
                state = hub.behaviour
                if not path.is_file():
                    return self._empty(404)
                data, start = path.read_bytes(), 0
                asked = self.headers.get("Range", "")
                if asked and state.ranges:
                    start = int(asked.removeprefix("bytes=").partition("-")[0])
                    if start >= len(data):
                        return self._empty(416)
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(data) - start))
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                for key, value in headers.items():
                    self.send_header(key.replace("_", "-"), value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                if any(name.endswith(wrong) for wrong in state.corrupt) and not start:
                    data = bytes([data[0] ^ 1]) + data[1:]
                if state.cuts and is_lfs(path) and len(data) - start > state.cut_after:
                    state.cuts -= 1
                    self.wfile.write(data[start : start + state.cut_after])
                    self.wfile.flush()
                    self.close_connection = True
                    return
                for at in range(start, len(data), 4096):
                    self.wfile.write(data[at : at + 4096])
                    if state.bytes_per_s:
                        self.wfile.flush()
                        time.sleep(4096 / state.bytes_per_s)

        return Handler


if __name__ == "__main__":
    words = [*sys.argv[1:], "", ""]
    with HubServer(Path(words[0]), int(words[1]), "0.0.0.0") as running:
        # To the hosts of a lab this machine has one address.
        running.url, running.files_url = (f"http://10.78.0.1:{int(words[1]) + i}" for i in (0, 1))
        running.behaviour.token = words[2]
        running.behaviour.bytes_per_s = int(words[3] or 0)
        # Told to whoever asks: the question is repeated with what was seen after it was read.
        asked, told = Path(words[0], "asked"), Path(words[0], "told.json")
        while True:
            question = asked.read_text() if asked.exists() else ""
            seen = [request.__dict__ for request in running.behaviour.requests]
            told.with_suffix(".new").write_text(json.dumps([question, seen]))
            told.with_suffix(".new").replace(told)
            time.sleep(0.05)
