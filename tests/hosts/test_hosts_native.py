# SPDX-License-Identifier: Apache-2.0
"""A bare host to a served chat in native mode: the venv from the real pins and wheels, nothing lent.

The host reaches no index: what `pip download` fetches of constraints/cpu.txt is a folder that it reads.
"""

import os
import subprocess
import sys

import lab_hosts
import pytest
from lab_hosts import ROOT, changed

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]

NODE = 1


@pytest.fixture(scope="module")
def wheelhouse():
    folder = lab_hosts.work_folder() / "wheelhouse"
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder)]
    # torch's build without CUDA is on its own index.
    pip += ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    pip += ["--requirement", str(ROOT / "constraints/cpu.txt")]
    subprocess.run(pip, check=True, timeout=1500)
    subprocess.run(["make", "wheels"], cwd=ROOT, check=True, env=os.environ, timeout=600)
    return folder


@pytest.fixture(scope="module")
def bare(wheelhouse):
    lab = lab_hosts.Lab(1, lab_hosts.work_folder() / "native", lend_venv=False, shown=(wheelhouse,))
    try:
        lab.up()
        yield lab
    finally:
        lab.down()


def test_a_bare_host_serves_from_a_venv_of_the_pins(bare, wheelhouse):
    inventory = bare.inventory("cpu-demo", {"ddtree": [NODE]})
    variables = {
        "vllm_service_pip_options": ["--no-index", "--find-links", str(wheelhouse)],
        "vllm_service_system_packages": [],  # no mirror is reachable; the host has them
        "health_generate_timeout": 120,
        "health_stall_after": 600,
    }
    assert changed(bare.play("site.yml", inventory=inventory, timeout=1800, **variables)) > 0
    assert changed(bare.play("site.yml", inventory=inventory, timeout=600, **variables)) == 0
    done = bare.play("playbooks/smoke.yml", inventory=inventory)
    assert done.returncode == 0, done.stdout
    listed = bare.run(NODE, "/opt/ddtree/venv/bin/python -m pip freeze --all", 120).splitlines()
    has = {line.lower().replace("_", "-") for line in listed}
    pins = (ROOT / "constraints/cpu.txt").read_text().splitlines()
    wanted = {pin for pin in pins if "==" in pin and pin[0] != "#" and ";" not in pin}
    assert len(wanted) > 100
    assert {pin.lower().replace("_", "-") for pin in wanted} - has == set()
    assert changed(bare.play("playbooks/uninstall.yml", inventory=inventory, **variables)) > 0
    assert bare.run(NODE, "ls -A /opt/ddtree /srv/ddtree 2>/dev/null || true") == ""
