# SPDX-License-Identifier: Apache-2.0
"""What images/build.sh asks of podman, by a stand-in for it."""

import os
import shutil
import subprocess

from building import ROOT

from ddtree_vllm import __version__

# Writes down what it is asked; every file of its images carries the time of the commit.
PODMAN = """#!/bin/sh
echo "$*" >>"$ASKED"
case "$*" in
  *"/usr/bin/stat"*) echo "$SOURCE_DATE_EPOCH";;
  *"image inspect"*) echo 1000000;;
  *docker-archive:*) for word in "$@"; do
    case $word in docker-archive:*) file=${word#docker-archive:}; echo x >"${file%%:*}";; esac
  done;;
esac
"""


def test_an_archive_of_a_stand_in_podman_holds_the_name_that_the_roles_ask_for(tmp_path):
    """podman calls its images localhost/..., and Docker would load them by that name."""
    for name in ("images/build.sh", "images/sbom.py", "images/cpu/Containerfile"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "ddtree_vllm").mkdir()
    shutil.copy(ROOT / "ddtree_vllm/__init__.py", tmp_path / "ddtree_vllm")
    podman = tmp_path / "podman"
    podman.write_text(PODMAN)
    podman.chmod(0o755)
    asked, archive = tmp_path / "asked", tmp_path / "out/cpu.tar"
    done = subprocess.run(
        ["bash", tmp_path / "images/build.sh", "cpu"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "ENGINE": "podman",
            "ARCHIVE": str(archive),
            "ASKED": str(asked),
            "SOURCE_DATE_EPOCH": "7",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (saved,) = [line for line in asked.read_text().splitlines() if "docker-archive:" in line]
    name = f"ddtree-vllm:{__version__}-cpu"
    assert saved == f"push --quiet ddtree-vllm:cpu docker-archive:{archive}:{name}"
