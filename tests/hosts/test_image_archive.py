# SPDX-License-Identifier: Apache-2.0
"""Which image of an archive is loaded, with real Ansible and a stand-in for Docker. No host."""

import hashlib
import io
import json
import re
import tarfile

import pytest
from lab_hosts import ROOT
from role_plays import run_playbook

pytestmark = [pytest.mark.ansible, pytest.mark.timeout(120)]

IMAGE = "ddtree-vllm:1-cpu"
# Knows an image by what the file of its name holds; SALT makes that another digest than the archive's.
DOCKER = """#!/bin/sh
cd "$(dirname "$0")"
case "$1 $2" in
  "image inspect")
    [ -f "$3" ] || { echo "No such image: $3" >&2; exit 1; }
    echo "[{\\"Id\\": \\"$(cat "$3")\\"}]";;
  "load --quiet")
    echo loaded >>loads
    manifest=$(tar --extract --to-stdout --file "$4" manifest.json)
    tag=$(echo "$manifest" | sed 's/.*"RepoTags": \\["docker.io\\/library\\/\\([^"]*\\)".*/\\1/')
    echo "sha256:$SALT$(echo "$manifest" | grep -oE '[0-9a-f]{64}')" >"$tag"
    echo "Loaded image: $tag";;
  "image rm") rm "$3";;
  *) exit 9;;
esac
"""


class Docker:
    """A host with a stand-in for Docker, and the tasks that find the image."""

    def __init__(self, folder):
        self.folder, self.salt = folder, ""
        self.archive = folder / "image.tar"
        self.program = folder / "docker"
        self.program.write_text(DOCKER)
        self.program.chmod(0o755)

    def build(self, content, tag=IMAGE):
        """What `make image` would save."""
        digest = hashlib.sha256(content.encode()).hexdigest()
        manifest = [{"Config": f"{digest}.json", "RepoTags": [f"docker.io/library/{tag}"]}]
        with tarfile.open(self.archive, "w") as tar:
            text = json.dumps(manifest).encode()
            entry = tarfile.TarInfo("manifest.json")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
        return f"sha256:{digest}"

    @property
    def image(self):
        path = self.folder / IMAGE
        return path.read_text().strip() if path.exists() else ""

    @property
    def loads(self):
        path = self.folder / "loads"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def find(self, *arguments, part="image", image=IMAGE):
        """Runs the tasks of a part; returns how many of them changed something."""
        role = ROOT / "roles/vllm_service"
        book = {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars_files": [str(role / part / "main.yml") for part in ("defaults", "vars")],
            "tasks": [{"ansible.builtin.include_tasks": str(role / f"tasks/{part}.yml")}],
        }
        given = {
            "vllm_service_mode": "container",
            "vllm_service_image": image,
            "vllm_service_image_archive": str(self.archive),
            "vllm_service_docker": str(self.program),
            "vllm_service_config_dir": str(self.folder),
        }
        (self.folder / "play.yml").write_text(json.dumps([book]))
        done = run_playbook(
            self.folder,
            *("-i", "localhost,", "-e", json.dumps(given), *arguments, self.folder / "play.yml"),
            SALT=self.salt,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return int(re.search(r"changed=(\d+)", done.stdout)[1])


@pytest.fixture
def docker(tmp_path):
    return Docker(tmp_path)


def test_an_image_that_was_built_again_under_its_tag_is_loaded(docker):
    first = docker.build("one")
    assert docker.find() > 0
    assert docker.image == first
    second = docker.build("two")
    assert docker.find("--check") == 1
    assert docker.image == first
    assert docker.find() > 0
    assert docker.image == second
    assert docker.find() == 0
    assert docker.loads == 2


def test_a_docker_that_knows_images_by_another_digest_loads_each_once(docker):
    """As one does that keeps images in containerd."""
    docker.salt = "5a17"
    docker.build("one")
    assert docker.find() > 0
    assert docker.find() == 0
    assert docker.loads == 1


def test_an_archive_of_another_image_replaces_none(docker):
    docker.build("one", tag="ddtree-vllm:2-cpu")
    (docker.folder / IMAGE).write_text("sha256:there")
    assert docker.find() == 0
    assert (docker.image, docker.loads) == ("sha256:there", 0)


def test_what_does_not_say_what_it_holds_replaces_no_image(docker):
    docker.archive.write_text("no archive")
    (docker.folder / IMAGE).write_text("sha256:there")
    assert docker.find() == 0
    assert (docker.image, docker.loads) == ("sha256:there", 0)


def test_uninstalling_removes_the_images_that_were_loaded_and_no_others(docker):
    """Whether a run has loaded it or an operator, it is the same image under the same name."""
    theirs = docker.build("one")
    (docker.folder / IMAGE).write_text(theirs)
    assert docker.find() == 0
    assert docker.find(part="unload") == 0
    assert docker.image == theirs

    for tag in ("ddtree-vllm:2", "ddtree-vllm:3", "ddtree-vllm:4"):
        docker.build(tag, tag=tag)
        assert docker.find(image=tag) > 0
    (docker.folder / "ddtree-vllm:3").write_text("sha256:theirs")
    assert docker.find(part="unload", image=IMAGE) == 1
    left = {path.name for path in docker.folder.glob("ddtree-vllm:*")}
    assert left == {IMAGE, "ddtree-vllm:3"}


def test_uninstalling_a_host_without_docker_or_note_removes_no_image(docker):
    assert docker.find(part="unload") == 0
    docker.build("one")
    assert docker.find() > 0
    docker.program.unlink()
    assert docker.find(part="unload") == 0
