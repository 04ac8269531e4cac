# SPDX-License-Identifier: Apache-2.0
"""Newer programs of Docker's for the test hosts, whose Debian 12 has Docker 20.10 and Compose 1.

Debian 13's packages of programs written in Go run there: they ask for no newer libc.
"""

import hashlib
import subprocess
import urllib.request
from pathlib import Path

import lab_hosts

COMPOSE = {
    "pool/main/d/docker-compose/docker-compose_2.26.1-4_amd64.deb": (
        "47681197cb2b1ab88206b42a1a92fc75f50d9530a6322d03494a473eed0408ea"
    ),
}
BUILDX = {
    "pool/main/d/docker-buildx/docker-buildx_0.13.1+ds1-3_amd64.deb": (
        "fcf8c48204d1603c8f209451d7827eb91bf30759578baf7704e9e1a87e5f1d7f"
    ),
}
ENGINE = {
    "pool/main/c/containerd/containerd_1.7.24~ds1-6+deb13u1_amd64.deb": (
        "ed708deb96fe476a3bce4efa5c0538dfbcf717ab9a7c7944ba7260342c25899c"
    ),
    "pool/main/d/docker.io/docker-cli_26.1.5+dfsg1-9+deb13u1+b1_amd64.deb": (
        "596647bc4ffaaaf2e2321116b8a10f6a6086ada797c17a7117798cb391a72776"
    ),
    "pool/main/d/docker.io/docker.io_26.1.5+dfsg1-9+deb13u1+b1_amd64.deb": (
        "53ae1a99f15113f0a0d2226808ec0d24ee31b3b87b87ab8ec35be09a1a2ee13b"
    ),
}


def package(file: str, sha256: str) -> Path:
    """A package, from the archive that this machine's apt is told of; fetched once."""
    path = lab_hosts.work_folder() / file.rpartition("/")[2]
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        told = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        archives = [uri for uri in dict.fromkeys(told.stdout.split()) if "security" not in uri]
        assert archives, "apt knows no archive: apt-get update"
        with urllib.request.urlopen(f"{archives[0].rstrip('/')}/{file}", timeout=300) as answer:
            data = answer.read()
        assert hashlib.sha256(data).hexdigest() == sha256, f"{file} is another than it was"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return path


def _put(lab, number, packages):
    files = [package(file, sha256) for file, sha256 in packages.items()]
    lab.put(number, *files)
    return " ".join(f"/root/{file.name}" for file in files)


def install_plugin(lab, number, packages):
    """Makes `docker compose` or `docker buildx` a command of a host; they depend on Docker alone."""
    for file in _put(lab, number, packages).split():
        lab.run(number, f"dpkg-deb --extract {file} / && rm {file}")


def install_engine(lab, number):
    """Docker 26 in place of the host's own."""
    files = _put(lab, number, ENGINE)
    lab.run(
        number,
        f"dpkg --install --auto-deconfigure --force-depends --force-confdef {files} && rm {files}",
        180,
    )
