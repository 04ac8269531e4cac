# SPDX-License-Identifier: Apache-2.0
"""What is to be served: the checkpoints, and the image that serves them."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from .host import Host
from .report import Finding, passed, refuse
from .request import Request

# The unit of native mode has ProtectHome=yes.
_HIDDEN = ("/home", "/root", "/run/user")


def _is_hidden(path: str) -> bool:
    return any(path.startswith(f"{top}/") for top in _HIDDEN)


def _closed(host: Host, path: str, inside: bool) -> str:
    """The first folder on the way that nobody but its owner enters, "" if there is none.

    Args:
        inside: all that is above counts too; a container is given the folder itself.
    """
    parts = [part for part in path.split("/") if part]
    for length in range(1 if inside else len(parts), len(parts) + 1):
        folder = "/" + "/".join(parts[:length])
        found = host.permissions(folder)
        if found is None:
            return ""
        wanted = stat.S_IXOTH | (stat.S_IROTH if length == len(parts) else 0)
        # Another owner or group may be the service's own.
        if found.owner == found.group == 0 and found.mode & wanted != wanted:
            return folder
    return ""


def check_venv(host: Host, request: Request) -> Iterator[Finding]:
    """The venv, and the interpreter that it is a link to, seen from the unit.

    `ddtree-vllm doctor` runs as root and sees both wherever they are.
    """
    if request.mode != "native":
        return
    if request.installs_venv:
        program = "import os, sys; print(os.path.realpath(sys.executable))"
        python, name = host.run(request.python, "-c", program).said, "vllm_service_python"
    else:
        python, name = host.target(f"{request.venv}/bin/python"), "the Python of vllm_service_venv"
    for path, what in ((request.venv, "vllm_service_venv"), (python, name)):
        if _is_hidden(path):
            yield refuse(
                "python",
                f"{what} is {path}, which the service does not see (its unit has ProtectHome=yes): "
                "name one elsewhere, such as below /opt",
            )


def check_checkpoints(host: Host, request: Request) -> Iterator[Finding]:
    for item in request.checkpoints:
        path, what = str(item["path"]), str(item["what"])
        if not path.startswith("/"):
            yield refuse(
                "checkpoints",
                f"{what} is {path}: the service asks no hub, so it has to be a folder of the host, "
                "such as one that model_store_models brings",
            )
        elif request.mode == "native" and _is_hidden(path):
            yield refuse(
                "checkpoints",
                f"{what} is {path}, which the service does not see (its unit has ProtectHome=yes): "
                "name a folder elsewhere, such as one below /srv",
            )
        elif path.startswith("/root/"):
            yield refuse(
                "checkpoints",
                f"{what} is {path}: a container sees it at the same path, and its /root is closed to "
                "the user that serves; name a folder elsewhere, such as one below /srv",
            )
        elif not item.get("comes") and not host.exists(path):
            yield refuse(
                "checkpoints",
                f"{what} is {path}, which is not on this host, and neither model_store_models nor "
                "vllm_service_checkpoints brings it",
            )
        elif not item.get("comes") and (closed := _closed(host, path, request.mode == "native")):
            yield refuse(
                "checkpoints",
                f"{what} is {path}, and {closed} is open to root alone, not to the user that serves: "
                f"`chmod o+rx {closed}`",
            )
        else:
            yield passed("checkpoints", f"{what} is {path}")


def check_image(host: Host, request: Request) -> Iterator[Finding]:
    """In container mode; nothing is pulled."""
    if request.mode != "container" or not request.image or request.image_archive:
        return
    asked = host.run(request.docker, "image", "inspect", "--format", "{{.Id}}", request.image)
    if asked.status == 0:
        yield passed("image", f"{request.image} is on this host")
    else:
        yield refuse(
            "image",
            f"{request.image} is not on this host, and vllm_service_image_archive names no archive "
            "to load it from: `ARCHIVE=FILE make image` makes one, or `docker pull` it there",
        )
