# SPDX-License-Identifier: Apache-2.0
"""The real engine on a real systemd host: the demo pair, native mode, CPU."""

import json
import time

import pytest
from lab_hosts import changed

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # four starts of the engine
]

NODE, UNIT, URL = 1, "ddtree-vllm@0.service", "http://10.78.0.11:8000"
READY_S = 300  # 25 s on two idle cores; shared ones take longer
LIMITS = {
    "vllm_service_install": False,  # the lab lends the project's own packages
    "health_interval": 5,
    "health_stall_after": 30,
    "health_generate_timeout": 20,
    "health_generate_every": 10,
    "health_min_acceptance": 1.2,
}


@pytest.fixture(scope="module")
def inventory(lab):
    made = lab.inventory("cpu-demo", {"ddtree": [NODE]})
    # Another test module may have left its stand-in.
    lab.play("playbooks/uninstall.yml", inventory=made, vllm_service_install=False)
    try:
        assert changed(lab.play("site.yml", inventory=made, **LIMITS)) > 0
        yield made
    finally:
        # The next module finds the host as it was.
        lab.play("playbooks/uninstall.yml", inventory=made, vllm_service_install=False)


def show(lab, name, unit=UNIT):
    return lab.run(NODE, f"systemctl show --property={name} --value {unit}").strip()


def wait(what, within, condition):
    began = time.monotonic()
    while time.monotonic() - began < within:
        if condition():
            return time.monotonic() - began
        time.sleep(1)
    raise AssertionError(f"not within {within} s: {what}")


def wait_until_ready(lab, other_than):
    return wait(
        "ready",
        READY_S,
        lambda: show(lab, "ActiveState") == "active" and show(lab, "MainPID") != other_than,
    )


def test_the_demo_pair_serves_hangs_and_comes_back(lab, inventory):
    """One engine start for each part: they are the expensive thing here."""
    # A second run leaves the engine alone.
    pid = show(lab, "MainPID")
    assert changed(lab.play("site.yml", inventory=inventory, **LIMITS)) == 0
    assert show(lab, "MainPID") == pid

    # Completions from outside, through trees.
    done = lab.play("playbooks/smoke.yml", inventory=inventory)
    assert done.returncode == 0, done.stdout
    body = {"model": "demo", "prompt": "import os\n", "max_tokens": 64, "temperature": 0}
    answer = lab.outside(
        *("curl", "-sS", "-H", "Content-Type: application/json", "-d", json.dumps(body)),
        f"{URL}/v1/completions",
        timeout=120,
    )
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] > 0, answer.stdout
    said = lab.run(NODE, "ddtree-health --json --checks live,ready,drafts --min-acceptance 1.2")
    assert json.loads(said)["verdict"] == "healthy", said

    # The engine's process is stopped: /health stays 200, the counters rest.
    lab.run(NODE, "kill -STOP $(pgrep -u 10001 -f VLLM::EngineCore)")
    health = lab.outside("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{URL}/health")
    assert health.stdout == "200"
    took = wait("a restart by health", 120, lambda: show(lab, "MainPID") not in (pid, "0"))
    print(f"hung engine killed after {took:.0f} s")
    assert "hung: " in lab.journal(NODE, "ddtree-health@0.service")
    print(f"ready again {wait_until_ready(lab, pid):.0f} s later")

    # The engine's process is killed: the server ends with 0, and is started within 10 s.
    pid = show(lab, "MainPID")
    lab.run(NODE, "kill -KILL $(pgrep -u 10001 -f VLLM::EngineCore)")
    wait("the server's end", 60, lambda: show(lab, "MainPID") != pid)
    took = wait("a new process", 10, lambda: show(lab, "MainPID") not in (pid, "0"))
    print(f"started {took:.0f} s after the server's end")
    wait_until_ready(lab, pid)
    assert lab.play("playbooks/smoke.yml", inventory=inventory).returncode == 0

    assert changed(
        lab.play("playbooks/uninstall.yml", inventory=inventory, vllm_service_install=False)
    )
    left = lab.run(NODE, "pgrep --uid 10001 --list-full || true")
    assert left == ""
