# SPDX-License-Identifier: Apache-2.0
"""The image, built once or taken from DDTREE_IMAGE_ARCHIVE, and three hosts with Docker."""

import fcntl
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "hosts"))

import lab_hosts
from building import ROOT, base_image, buildah, make_image

from ddtree_vllm import __version__

TOOLS = ("buildah", "mmdebstrap", "podman", "runc")


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
    """node1 serves, node2 asks, node3 builds."""

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
        3,
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
