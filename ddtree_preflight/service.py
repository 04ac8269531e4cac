# SPDX-License-Identifier: Apache-2.0
"""What is to be served: the checkpoints, and the image that serves them."""

from __future__ import annotations

from collections.abc import Iterator

from .host import Host
from .report import Finding, passed, refuse
from .request import Request

# The unit of native mode has ProtectHome=yes.
_HIDDEN = ("/home", "/root", "/run/user")


def _is_hidden(path: str) -> bool:
    return any(path.startswith(f"{top}/") for top in _HIDDEN)


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
        elif not item.get("comes") and not host.exists(path):
            yield refuse(
                "checkpoints",
                f"{what} is {path}, which is not on this host, and neither model_store_models nor "
                "vllm_service_checkpoints brings it",
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
