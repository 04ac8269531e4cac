# SPDX-License-Identifier: Apache-2.0
"""The image, built once or taken from DDTREE_IMAGE_ARCHIVE, and two hosts with Docker."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/hosts"))

import lab_hosts  # noqa: E402

from ddtree_vllm import __version__  # noqa: E402

BASE = "localhost/ddtree-test-base:12"
TOOLS = ("buildah", "mmdebstrap")
BUILD_TIMEOUT_S = 1800


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Asked for and impossible is an error: left out, it would look like a pass."""
    ours = [i for i in items if i.path.parent == Path(__file__).parent]
    if config.getoption("--hosts") and any(i.get_closest_marker("hosts") for i in ours):
        why = lab_hosts.missing()
        absent = [tool for tool in TOOLS if shutil.which(tool) is None]
        if absent and not os.environ.get("DDTREE_IMAGE_ARCHIVE"):
            why = why or f"apt-get install --no-install-recommends {' '.join(absent)}"
        if why:
            raise pytest.UsageError(f"the tests of the images cannot run: {why}")


@pytest.fixture(scope="session", autouse=True)
def build_storage(request):
    """buildah's storage of these tests alone: what a killed run left, and each build's layers, go.

    The base image and the images that have a name stay for the next run.
    """
    if not request.config.getoption("--hosts") or shutil.which("buildah") is None:
        yield
        return
    folder = lab_hosts.work_folder() / "containers"
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "storage.conf"
    settings.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n'
    )
    os.environ["CONTAINERS_STORAGE_CONF"] = str(settings)

    def clear():
        buildah("rm", "--all")
        buildah("rmi", "--prune", "--force")

    with (folder / "lock").open("w") as lock:
        # One run at a time: the other one's containers would go too.
        fcntl.flock(lock, fcntl.LOCK_EX)
        clear()
        yield
        clear()


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


@pytest.fixture(scope="session")
def archive() -> Path:
    """Archive of the image without a GPU, where the inventory cpu-container looks for it."""
    given = os.environ.get("DDTREE_IMAGE_ARCHIVE")
    if given:
        return Path(given)
    path = ROOT / "build/images/cpu.tar"
    print(make_image("cpu", BASE=base_image(), ARCHIVE=str(path))[-400:])
    return path


class ImageLab(lab_hosts.Lab):
    """node1 serves, node2 asks."""

    def put(self, number: int, *files: Path) -> None:
        """Copies files into /root of a host."""
        for file in files:
            shutil.copy(file, self.folder / f"lab/hosts/node{number}/root/root/{file.name}")

    def inspect(self, name: str) -> dict:
        """What Docker of node1 says of a container or an image."""
        return json.loads(self.run(1, f"docker inspect {name}"))[0]


@pytest.fixture(scope="session")
def lab():
    hosts = ImageLab(
        2,
        lab_hosts.work_folder() / "docker",
        lend_venv=False,
        packages=("docker.io", "iptables"),
        shown=(ROOT,),
    )
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


@pytest.fixture(scope="session")
def loaded(lab, archive):
    """The lab, once node1's Docker has the image; loaded from this machine's disk, not over ssh."""
    lab.put(1, archive)
    lab.run(1, f"docker load --quiet --input /root/{archive.name} && rm /root/{archive.name}", 1200)
    lab.run(1, f"docker tag ddtree-vllm:{__version__}-cpu ddtree-vllm:cpu")
    return lab


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Adds the journal of our units to a failed test."""
    report = yield
    hosts = item.funcargs.get("lab") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and hosts is not None:
        report.sections.append(("journal of node1", hosts.journal(1, "ddtree-*")))
    return report
