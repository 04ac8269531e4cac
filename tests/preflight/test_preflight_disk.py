# SPDX-License-Identifier: Apache-2.0
"""What is to come has its room on the disk where it will be, and what is there needs none."""

import json

import pytest
from fake_host import FakeHost

from ddtree_preflight import checks
from ddtree_preflight.host import Done
from ddtree_preflight.request import Request


@pytest.fixture
def host(tmp_path):
    return FakeHost(tmp_path)


def sentences(host, level="refuse", **request):
    found = checks.run(Request(**request), host)
    return {finding.check: finding.sentence for finding in found if finding.level == level}


def test_needs_on_one_disk_add_up(host):
    disk = [{"path": "/srv", "mib": 300, "what": "models"}, {"path": "/var", "mib": 300}]
    host.free = 599
    found = sentences(host, disk=disk)["disk"]
    assert found.startswith("599 MiB of disk are free, and 600 are needed: 300 for models in /srv")
    host.free = 600
    assert "disk" not in sentences(host, disk=disk)


def test_a_model_that_is_there_as_it_is_wanted_needs_no_room(host):
    model = {"name": "m", "repo": "o/m", "revision": "a" * 40, "gigabytes": 1}
    disk = [{"path": "/srv/m", "mib": 300, "record": "/state/m.json", "model": model}]
    host.free = 100
    assert "disk" in sentences(host, disk=disk)
    host.write("srv/m/config.json", "{}")
    assert "disk" in sentences(host, disk=disk)  # somebody's folder, never fetched
    identity = {"repo": "o/m", "revision": "a" * 40, "exclude": []}
    host.write("state/m.json", json.dumps({"identity": identity, "files": {}}))
    assert "disk" not in sentences(host, disk=disk)
    # Another revision, other files of it, another origin: all of it may have to come.
    for change in (
        {"revision": "b" * 40},
        {"exclude": ["*.md"]},
        {"repo": None, "url": "https://mirror", "manifest_sha256": "c" * 64},
    ):
        wanted = [{**disk[0], "model": {**model, **change}}]
        assert "300 for /srv/m" in sentences(host, disk=wanted)["disk"], change
    host.write("state/m.json", "{")
    assert "disk" in sentences(host, disk=disk)


def test_what_an_interrupted_fetch_has_brought_takes_its_room_already(host):
    disk = [{"path": "/srv/m", "mib": 300, "partial": "/srv/.m.partial"}]
    host.free = 250
    assert "disk" in sentences(host, disk=disk)
    part = host.root / "srv/.m.partial/sub/weights.part"
    part.parent.mkdir(parents=True)
    with part.open("wb") as file:
        file.truncate(60 * 2**20)
    assert "disk" not in sentences(host, disk=disk)
    assert sentences(host, "pass", disk=disk)["disk"] == "250 MiB of disk are free, 240 needed"


def test_a_venv_needs_its_room_until_it_is_made(host):
    """Beside the one that is served from, which takes its own already."""
    disk = [
        {
            "path": "/opt/v",
            "mib": 9000,
            "what": "a venv",
            "made": "/opt/v.0123456789ab/made-from",
        }
    ]
    host.free = 8999
    host.write("opt/v.ba9876543210/made-from", "another")
    assert "9000 for a venv in /opt/v" in sentences(host, disk=disk)["disk"]
    host.write("opt/v.0123456789ab/made-from", "key")
    assert "disk" not in sentences(host, disk=disk)


IMAGE_ROOM = {"mib": 100, "image": "i:1", "digest": "sha256:a", "record": "/etc/note"}


@pytest.mark.parametrize(
    ("inspected", "digest", "note", "needed"),
    [
        (Done(1, "No such image: i:1"), "sha256:a", "", True),
        (Done(0, "sha256:a\n"), "sha256:a", "", False),
        (Done(0, "sha256:b\n"), "sha256:a", "", True),
        (Done(0, "sha256:b\n"), "sha256:a", "sha256:a sha256:b i:1\n", False),
        (Done(0, "sha256:b\n"), "sha256:a", "sha256:a sha256:b i:2\n", True),
        (Done(0, "sha256:b\n"), "", "", False),
    ],
)
def test_an_image_needs_its_room_where_it_is_to_be_loaded(host, inspected, digest, note, needed):
    """By the same rule as the role vllm_service loads it."""
    host.free = 99
    host.write("etc/note", note)
    host.answers["docker image inspect --format {{.Id}} i:1"] = inspected
    disk = [{**IMAGE_ROOM, "digest": digest, "path": "/var/tmp", "what": "its archive"}]
    assert ("disk" in sentences(host, disk=disk)) == needed


@pytest.mark.parametrize(
    ("said", "folder"),
    [
        (None, "/var/lib/docker"),
        (Done(1, "Cannot connect to the Docker daemon"), "/var/lib/docker"),
        (Done(0, "/data/docker [[Backing Filesystem extfs]]\n"), "/data/docker"),
        (
            Done(0, "/data/docker [[driver-type io.containerd.snapshotter.v1]]\n"),
            "/var/lib/containerd",
        ),
    ],
)
def test_an_image_needs_its_room_where_docker_keeps_images(host, said, folder):
    if said:
        host.answers["docker info"] = said
    disk = [{**IMAGE_ROOM, "path": "/var/lib/docker", "what": "the image", "docker": True}]
    host.free = 99
    assert f"100 for the image in {folder}" in sentences(host, disk=disk)["disk"]
