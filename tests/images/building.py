# SPDX-License-Identifier: Apache-2.0
"""Builds images with buildah, as `make image` does, on a base made from Debian's packages."""

import os
import subprocess
from pathlib import Path

import lab_hosts

ROOT = Path(__file__).parents[2]
BASE = "localhost/ddtree-test-base:12"
BUILD_TIMEOUT_S = 1800

STAND_IN = """
ARG BASE
FROM ${BASE}
ARG VLLM
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3-pip \\
 && rm -rf /var/lib/apt/lists/*
COPY constraints/cpu.txt /tmp/
# Debian guards its own folder; /usr/local is where vLLM's image has packages too.
RUN --mount=type=secret,id=ca-certificates \\
    if [ -s /run/secrets/ca-certificates ]; then export PIP_CERT=/run/secrets/ca-certificates; fi \\
 && grep -E '^(pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions|safetensors)==' \\
      /tmp/cpu.txt >/tmp/some.txt \\
 && python3 -m pip install -q --no-deps --break-system-packages -r /tmp/some.txt \\
 && rm /usr/lib/python3*/EXTERNALLY-MANAGED \\
 && d=$(echo /usr/local/lib/python3*/dist-packages)/vllm-$VLLM.dist-info && mkdir "$d" \\
 && printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: %s\\n' "$VLLM" >"$d/METADATA"
ENTRYPOINT ["vllm", "serve"]
"""


def base_image() -> str:
    """Stands in for debian:12-slim where no registry is reachable: the same packages, from Debian."""
    known = subprocess.run(
        ["buildah", "images", "--json"], check=True, capture_output=True, text=True, timeout=60
    )
    if BASE in known.stdout:
        return BASE
    folder = lab_hosts.work_folder()
    folder.mkdir(parents=True, exist_ok=True)
    tar = folder / "image-base.tar"
    if not tar.exists():
        build = ["mmdebstrap", "--variant=minbase", "bookworm", tar.with_suffix(".part.tar")]
        subprocess.run(build, check=True, capture_output=True, timeout=900)
        tar.with_suffix(".part.tar").rename(tar)
    container = buildah("from", "scratch")
    buildah("add", container, str(tar), "/")
    buildah("config", "--cmd", "/bin/bash", container)
    buildah("commit", "--format", "docker", "--rm", container, BASE)
    return BASE


def stand_in(vllm: str) -> str:
    """Stands in for vLLM's own image, of some version: its layout (Python's packages for the whole
    system, pip) and vLLM's metadata without vLLM. Returns its name."""
    file = lab_hosts.work_folder() / "stand-in.Containerfile"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(STAND_IN)
    tag = f"localhost/ddtree-test-vllm:{vllm}"
    call = ["bud", "--layers", "--isolation", "chroot", "--format", "docker", "--tag", tag]
    call += ["--build-arg", f"BASE={base_image()}", "--build-arg", f"VLLM={vllm}"]
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        call += ["--secret", f"id=ca-certificates,src={certificates}"]
    buildah(*call, "--file", str(file), str(ROOT))
    return tag


def buildah(*words: str) -> str:
    done = subprocess.run(
        ["buildah", *words], check=False, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def make_image(target: str, *arguments: str, root: Path = ROOT, **variables: str) -> str:
    """`make image`, with what pip needs on this machine handed on to the build; returns its output."""
    environment = {
        **os.environ,
        "ENGINE": "buildah",
        "ISOLATION": "chroot",
        "IMAGE": target,
        **variables,
    }
    certificates, wheels = os.environ.get("PIP_CERT"), os.environ.get("PIP_FIND_LINKS", "")
    if certificates:
        environment.setdefault("CA_BUNDLE", certificates)
    if Path(wheels).is_dir() and wheels:
        environment.setdefault("WHEELS", wheels)
    log = lab_hosts.work_folder() / f"image-{target}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        done = subprocess.run(
            ["make", "image", *arguments],
            cwd=root,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=BUILD_TIMEOUT_S,
        )
    said = log.read_text(errors="replace")
    assert done.returncode == 0, said[-4000:]
    return said
