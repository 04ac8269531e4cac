# SPDX-License-Identifier: Apache-2.0
"""Three hosts from nothing to a watched service and back, through site.yml as it is.

node1 has no GPU and serves the demo pair on the real engine. node2 is an NVSwitch host and node3 has
pairs of GPUs on PCIe: their GPUs are fake (fake_nvidia.py), and so is their engine (stub/), which
starts in a second.
"""

import json
import time

import fake_nvidia
import pytest
from lab_hosts import changed

pytestmark = [pytest.mark.hosts, pytest.mark.engine, pytest.mark.timeout(1500)]

DEMO, SWITCHED, PAIRS = 1, 2, 3
NODES = (DEMO, SWITCHED, PAIRS)
STUB = {
    "vllm_service_venv": "/opt/stub",
    "vllm_service_install": False,
    "vllm_service_host": "0.0.0.0",
    # The hub is not reached, and the machine is smaller than the one that is played.
    "model_store_models": [],
    "vllm_service_model": "/opt/stub",
    "vllm_service_drafter": "/opt/stub",
    "preflight_memory_mib": 1024,
    "health_expect": " name",
    "health_interval": 5,
    "health_alert_after": 0,
}
HOST_VARS = {
    # The lab lends the project's own packages. A machine that is busy otherwise makes a step of the
    # interpreter last minutes; what a hang is, test_hosts_engine.py asks.
    DEMO: {
        "vllm_service_install": False,
        "health_interval": 5,
        "health_generate_timeout": 120,
        "health_stall_after": 600,
    },
    SWITCHED: {**STUB, "gpu_topology_objective": "latency"},
    PAIRS: STUB,
}
INSTANCES = {DEMO: "0", SWITCHED: "0", PAIRS: "0 1 2 3"}
# Files with their modes, owners and sizes, accounts, packages, units and settings of a host ...
PRUNED = (
    *("/proc", "/sys", "/dev", "/tmp", "/var/tmp", "/run/user", "/run/systemd", "/run/host"),
    *("/run/fake-nvidia", "/root/.ansible", "/var/log", "/opt/lent", "/opt/stub", "/opt/ddtree"),
)
# ... but for what time and the tools themselves write.
OF_OTHERS = "|".join(
    (
        r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?",
        r"/etc/\.pwd\.lock",
        r"/run/(utmp|motd.*|sshd|blkid.*|knobs.*)",
        r"/var/lib/(dpkg|systemd)/.*",
        r"/var/cache/(ldconfig|apt).*",
    )
)
SNAPSHOT = f"""
find / -xdev {" ".join(f"-path {path} -prune -o" for path in PRUNED)} \
  -type f -printf '%p %m %u %s\\n' -o -printf '%p %m %u\\n' | grep -vE '^({OF_OTHERS}) ' | sort
getent passwd; getent group; dpkg --get-selections
systemctl list-unit-files --no-legend --plain | awk '{{print $1, $2}}'
sysctl vm.swappiness vm.max_map_count kernel.numa_balancing vm.zone_reclaim_mode
"""


def snapshot(lab, number):
    return lab.run(number, SNAPSHOT).splitlines()


def wait_until_active(lab, number, within):
    """Waits for every instance of a host."""
    end = time.monotonic() + within
    for instance in INSTANCES[number].split():
        unit = f"ddtree-vllm@{instance}.service"
        while lab.try_run(number, f"systemctl is-active {unit}").stdout.strip() != "active":
            assert time.monotonic() < end, lab.journal(number, unit)
            time.sleep(0.5)


class Fleet:
    """The three hosts, plays on all of them, and how long each took."""

    def __init__(self, lab, inventory):
        self.lab, self.inventory = lab, inventory
        self.before = {number: snapshot(lab, number) for number in NODES}
        self.seconds = {}

    def play(self, playbook="site.yml", *arguments, what="", **variables):
        began = time.monotonic()
        done = self.lab.play(playbook, *arguments, inventory=self.inventory, **variables)
        self.seconds[what or playbook] = time.monotonic() - began
        return done

    def plan(self, number):
        return json.loads(self.lab.run(number, "cat /etc/ddtree/topology.json"))


@pytest.fixture(scope="module")
def fleet(lab):
    fake_nvidia.install(lab, SWITCHED, fake_nvidia.NVSWITCH)
    fake_nvidia.install(lab, PAIRS, fake_nvidia.PCIE_PAIRS)
    groups = {"cpu_demo": [DEMO], "h200": [SWITCHED], "rtx6000": [PAIRS]}
    made = Fleet(lab, lab.inventory("example", groups, HOST_VARS))
    made.foreseen = changed(made.play("site.yml", "--check", "--diff", what="check"))
    made.checked = {number: snapshot(lab, number) for number in NODES}
    assert changed(made.play(what="first run")) > 0
    yield made
    print("; ".join(f"{what} {took:.0f} s" for what, took in made.seconds.items()))
    fake_nvidia.remove(lab, SWITCHED)
    fake_nvidia.remove(lab, PAIRS)


def test_check_mode_on_bare_hosts_foresees_changes_and_makes_none(fleet):
    assert fleet.foreseen > 0
    assert fleet.checked == fleet.before


def test_a_second_run_changes_nothing_and_both_take_less_than_5_minutes(fleet):
    assert changed(fleet.play(what="second run")) == 0
    assert fleet.seconds["first run"] + fleet.seconds["second run"] < 300, fleet.seconds


def test_each_host_serves_by_its_own_links(fleet):
    plans = {number: fleet.plan(number) for number in NODES}
    assert {n: [group["gpus"] for group in plan["groups"]] for n, plan in plans.items()} == {
        DEMO: [[]],
        SWITCHED: [[0, 1, 2, 3, 4, 5, 6, 7]],
        PAIRS: [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert plans[SWITCHED]["groups"][0]["worst_link"] == "NV18"
    assert {group["worst_link"] for group in plans[PAIRS]["groups"]} == {"PIX"}


def test_every_instance_answers_from_outside_and_is_healthy(fleet):
    """On node1 that is the real engine with the demo pair."""
    assert changed(fleet.play("playbooks/smoke.yml")) == 0
    assert changed(fleet.play("playbooks/smoke.yml", "--check", what="smoke in check mode")) == 0
    assert changed(fleet.play("playbooks/status.yml")) == 0


def test_a_vanished_gpu_is_told_and_restarts_nothing(fleet):
    def run(command):
        return fleet.lab.run(PAIRS, command).strip()

    unit, check = "ddtree-vllm@1.service", "ddtree-health@1.service"
    pid = run(f"systemctl show --property=MainPID --value {unit}")
    uuid = fleet.plan(PAIRS)["groups"][1]["uuids"][0]
    run(f"echo {uuid} >/run/fake-nvidia/lost")
    try:
        assert fleet.lab.try_run(PAIRS, f"systemctl start {check}").returncode != 0
        assert run(f"systemctl show --property=ExecMainStatus --value {check}") == "1"
        assert "a GPU has fallen off the bus" in fleet.lab.journal(PAIRS, check)
        alerts = run("journalctl -q -b -o cat -p alert -t ddtree-alert")
        assert f"{unit} is unhealthy: gpu: a GPU has fallen off the bus" in alerts
        metrics = run("cat /var/lib/ddtree-health/ddtree_health_1.prom")
        assert 'ddtree_health_check{instance_name="1",check="gpu"} 0' in metrics
        assert run(f"systemctl show --property=MainPID --value {unit}") == pid
        done = fleet.play("site.yml", "--limit", "node3", "--tags", "preflight", what="refusal")
        assert done.returncode != 0
        assert "GPU is lost" in done.stdout + done.stderr
        assert "changed=0" in done.stdout
    finally:
        run("rm /run/fake-nvidia/lost")
    run(f"systemctl start {check}")  # fails unless it is healthy


def test_memory_that_a_killed_server_has_left_is_refused_before_anything_changes(fleet):
    """By what vLLM takes of a planned GPU: the inventory says nothing of it."""
    note = "/run/fake-nvidia/used-5"
    fleet.lab.run(PAIRS, f"echo 30000 >{note}")
    try:
        done = fleet.play("site.yml", "--limit", "node3", "--tags", "preflight", what="refusal")
    finally:
        fleet.lab.run(PAIRS, f"rm {note}")
    assert done.returncode != 0
    total = fake_nvidia.PCIE_PAIRS.memory_mib
    needed = int(total * 0.92 - 1024)
    assert f"GPU 5 has {total - 30001} MiB free of {needed} needed" in done.stdout + done.stderr
    assert "GPU 4 has" not in done.stdout + done.stderr
    assert "changed=0" in done.stdout


def test_a_passed_probe_turns_p2p_on_and_the_instances_serve_by_it(fleet):
    """The probe is real, its ranks are not: there is no GPU to sum on."""
    before = fleet.plan(PAIRS)
    assert before["p2p"]["on"] is False
    rank = "/run/fake-nvidia/rank"
    script = '#!/bin/sh\necho \'{"checked": 1, "peer_access": true}\''
    fleet.lab.run(PAIRS, f"cat >{rank} <<'RANK'\n{script}\nRANK\nchmod 755 {rank}")
    command = ["/usr/local/bin/ddtree-topology", "probe", "--python", rank]
    done = fleet.play("playbooks/probe.yml", "--limit", "node3", gpu_topology_probe_command=command)
    assert done.returncode == 0, done.stdout
    after = fleet.plan(PAIRS)
    assert (after["p2p"]["on"], after["p2p"]["probed"]) == (True, True)
    assert [g["uuids"] for g in after["groups"]] == [g["uuids"] for g in before["groups"]]
    wait_until_active(fleet.lab, PAIRS, within=60)
    environments = fleet.lab.run(PAIRS, "cat /etc/ddtree/vllm-*.env")
    assert "NCCL_P2P_DISABLE" not in environments
    # The verdict is kept: the next run neither probes nor changes anything.
    assert changed(fleet.play("site.yml", "--limit", "node3", what="after the probe")) == 0


def test_a_reboot_brings_everything_back(fleet):
    began = time.monotonic()
    fleet.lab.reboot(*NODES, within=400)  # the real engine's start is part of it
    for number in NODES:
        wait_until_active(fleet.lab, number, within=200)
        timers = "systemctl list-units --no-legend --plain 'ddtree-health@*.timer'"
        assert len(fleet.lab.run(number, timers).splitlines()) == len(INSTANCES[number].split())
    fleet.seconds["reboot"] = time.monotonic() - began
    assert changed(fleet.play(what="run after the reboot")) == 0
    assert changed(fleet.play("playbooks/smoke.yml", what="smoke after the reboot")) == 0


def test_uninstall_leaves_the_hosts_as_they_were(fleet):
    assert changed(fleet.play("playbooks/uninstall.yml")) > 0
    for number in NODES:
        left = set(snapshot(fleet.lab, number)) ^ set(fleet.before[number])
        assert left == set(), f"node{number}"
        assert fleet.lab.run(number, "pgrep --uid 10001 --list-full || true") == ""
    assert changed(fleet.play("playbooks/uninstall.yml", what="second uninstall")) == 0
