# SPDX-License-Identifier: Apache-2.0
"""The role nvidia_host on real systemd hosts with fake GPUs (fake_nvidia.py).

node2 is an NVSwitch host, node3 has pairs of GPUs on PCIe, node1 has no GPU.
"""

import fake_nvidia
import pytest
from lab_hosts import changed

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

SWITCHED, PAIRS, BARE = 2, 3, 1
PLAYBOOK = "tests/hosts/nvidia_host.yml"
HELD = {
    "libnvidia-compute-580-server",
    "nvidia-fabricmanager-580",
    "nvidia-kernel-common-580-server",
    "nvidia-modprobe",
    "nvidia-persistenced",
    "nvidia-utils-580-server",
}


class Hosts:
    """The hosts with GPUs, and plays of the role on them."""

    def __init__(self, lab):
        self.lab = lab
        groups = {"h200": [SWITCHED], "rtx6000": [PAIRS], "cpu_demo": [BARE]}
        # The lab lends a venv, which is not the role's to remove.
        lent = {number: {"vllm_service_install": False} for number in (SWITCHED, PAIRS, BARE)}
        self.inventory = lab.inventory("example", groups, lent)

    def play(self, *arguments, on=(SWITCHED, PAIRS), **variables):
        limit = ",".join(f"node{number}" for number in on)
        return self.lab.play(
            PLAYBOOK, "--limit", limit, *arguments, inventory=self.inventory, **variables
        )

    def run(self, number, command):
        return self.lab.run(number, command).strip()

    def query(self, number, field):
        text = self.run(number, f"nvidia-smi --query-gpu={field} --format=csv,noheader,nounits")
        return set(text.splitlines())

    def refused(self, number, *words, **variables):
        """A preflight that refuses in a sentence with these words, and changes nothing."""
        done = self.play("--tags", "preflight", on=[number], **variables)
        assert done.returncode != 0
        said = done.stdout + done.stderr
        assert "changed=0" in said
        for word in words:
            assert word in said, said


@pytest.fixture(scope="module")
def hosts(lab):
    fake_nvidia.install(lab, SWITCHED, fake_nvidia.NVSWITCH)
    fake_nvidia.install(lab, PAIRS, fake_nvidia.PCIE_PAIRS)
    lab.run(PAIRS, "systemctl enable nvidia-fabricmanager.service")  # where it cannot start
    made = Hosts(lab)
    assert changed(made.play()) > 0
    yield made
    fake_nvidia.remove(lab, SWITCHED)
    fake_nvidia.remove(lab, PAIRS)


def test_a_second_run_changes_nothing(hosts):
    assert changed(hosts.play()) == 0
    assert changed(hosts.play("--check", "--diff")) == 0


def test_the_fabric_manager_runs_on_the_nvswitch_host_alone(hosts):
    unit = "nvidia-fabricmanager.service"
    assert hosts.run(SWITCHED, f"systemctl is-active {unit}") == "active"
    assert hosts.query(SWITCHED, "fabric.state") == {"Completed"}
    assert hosts.run(PAIRS, f"systemctl is-active {unit} || true") == "inactive"
    assert hosts.run(PAIRS, f"systemctl is-enabled {unit} || true") == "disabled"
    assert hosts.run(PAIRS, "systemctl list-units --failed --no-legend") == ""


def test_unattended_upgrade_cannot_replace_the_driver(hosts):
    for number in (SWITCHED, PAIRS):
        held = hosts.run(number, "apt-mark showhold").split()
        assert set(held) == HELD  # and not libnvidia-container1, the toolkit's


def test_libraries_of_another_version_than_the_module_are_refused(hosts, lab):
    try:
        fake_nvidia.set_version(lab, PAIRS, "library", "580.173.02")
        hosts.refused(
            PAIRS,
            "The loaded kernel module (580.159.04) and the installed libraries are of different "
            "versions",
            "Reboot the host",
        )
    finally:
        fake_nvidia.set_version(lab, PAIRS, "library", fake_nvidia.DRIVER)


def test_a_fabric_manager_of_another_version_is_refused(hosts, lab):
    try:
        fake_nvidia.set_version(lab, SWITCHED, "fabricmanager", "580.95.05")
        hosts.refused(SWITCHED, "driver's version, 580.159.04", "there is 580.95.05")
    finally:
        fake_nvidia.set_version(lab, SWITCHED, "fabricmanager", fake_nvidia.DRIVER)


def test_cuda_that_fails_with_802_is_refused_although_nvidia_smi_is_fine(hosts, lab):
    try:
        fake_nvidia.set_cuda(lab, SWITCHED, 802)
        assert len(hosts.query(SWITCHED, "uuid")) == 8
        done = hosts.play("--tags", "verify", on=[SWITCHED])
        assert done.returncode != 0
        said = done.stdout + done.stderr
        assert "cuInit answered 802" in said
        assert "the fabric manager has not finished" in said
    finally:
        fake_nvidia.set_cuda(lab, SWITCHED, 0)


def test_a_power_limit_out_of_range_is_refused(hosts):
    hosts.refused(
        PAIRS, "is 650, and the GPUs take 150.0 to 600.0 W", nvidia_host_power_limit_w=650
    )


def test_a_host_without_the_persistence_daemon_is_refused(hosts):
    unit = "/lib/systemd/system/nvidia-persistenced.service"
    hosts.run(PAIRS, f"mv {unit} /root/ && systemctl daemon-reload")
    try:
        hosts.refused(PAIRS, "There is no nvidia-persistenced.service: install the package")
    finally:
        hosts.run(PAIRS, f"mv /root/nvidia-persistenced.service {unit} && systemctl daemon-reload")


def test_check_mode_tells_of_each_drift_and_changes_nothing(hosts):
    drift = (
        "nvidia-smi -pm 0; rm /dev/char/195:3 /dev/nvidia-uvm; sysctl -qw vm.swappiness=61; "
        "apt-mark unhold nvidia-utils-580-server"
    )
    hosts.run(SWITCHED, drift)
    done = hosts.play("--check", "--diff", on=[SWITCHED])
    assert changed(done) == 3  # the hold, the kernel setting, what a boot takes away
    for words in (
        "persistence mode of GPU-00000007",
        "/dev/nvidia-uvm is missing; nvidia-modprobe makes it",
        "/dev/char/195:3 does not lead to /dev/nvidia3",
        "vm.swappiness = 10",
    ):
        assert words in done.stdout
    assert hosts.query(SWITCHED, "persistence_mode") == {"Disabled"}
    assert hosts.run(SWITCHED, "sysctl -n vm.swappiness") == "61"
    assert changed(hosts.play(on=[SWITCHED])) == 3
    assert hosts.query(SWITCHED, "persistence_mode") == {"Enabled"}
    assert hosts.run(SWITCHED, "readlink /dev/char/195:3") == "../nvidia3"
    assert hosts.run(SWITCHED, "stat -c %t:%T /dev/nvidia-uvm") == "1fe:0"
    assert hosts.run(SWITCHED, "sysctl -n vm.swappiness") == "10"
    assert set(hosts.run(SWITCHED, "apt-mark showhold").split()) == HELD


def test_a_boot_takes_nothing_away(hosts, lab):
    assert changed(hosts.play(on=[SWITCHED], nvidia_host_power_limit_w=500)) > 0
    assert hosts.query(SWITCHED, "power.limit") == {"500.00"}
    lab.reboot(SWITCHED)
    assert hosts.run(SWITCHED, "systemctl is-active ddtree-nvidia-host.service") == "active"
    assert hosts.query(SWITCHED, "persistence_mode") == {"Enabled"}
    assert hosts.query(SWITCHED, "power.limit") == {"500.00"}
    assert hosts.query(SWITCHED, "fabric.state") == {"Completed"}
    # CUDA in a service without privileges cannot make it.
    assert hosts.run(SWITCHED, "readlink /dev/char/510:0") == "../nvidia-uvm"
    for index in range(8):
        assert hosts.run(SWITCHED, f"readlink /dev/char/195:{index}") == f"../nvidia{index}"
    assert changed(hosts.play(on=[SWITCHED], nvidia_host_power_limit_w=500)) == 0


def test_a_host_without_a_driver_is_refused_and_gets_none(hosts):
    hosts.refused(BARE, "nvidia-smi does not answer", "nvidia_host_driver_install")
    assert hosts.run(BARE, "dpkg --list | grep -c nvidia || true") == "0"


@pytest.mark.slow
def test_a_driver_is_installed_when_asked_for(hosts, lab):
    packages = [f"{name}={fake_nvidia.DRIVER}-1" for name in sorted(HELD)]
    fake_nvidia.offer(lab, BARE, fake_nvidia.PCIE_PAIRS)
    try:
        hosts.refused(BARE, "names no package", nvidia_host_driver_install=True)
        asked = {"nvidia_host_driver_install": True, "nvidia_host_driver_packages": packages}
        assert changed(hosts.play(on=[BARE], **asked)) > 0
        assert len(hosts.query(BARE, "uuid")) == 8
        assert set(hosts.run(BARE, "apt-mark showhold").split()) == HELD
        assert changed(hosts.play(on=[BARE], **asked)) == 0
    finally:
        changed(lab.play("playbooks/uninstall.yml", "--limit", "node1", inventory=hosts.inventory))
        fake_nvidia.withdraw(lab, BARE)


def test_a_package_is_noted_before_it_is_held(hosts):
    """A run that is cut off in between must not leave it held for ever."""
    hosts.run(
        SWITCHED,
        "apt-mark unhold nvidia-utils-580-server && "
        "sed -i /nvidia-utils-580-server/d /etc/ddtree/nvidia-held",
    )
    # The hold fails: its program is away for that time.
    hosts.run(SWITCHED, "mv /usr/bin/dpkg /usr/bin/dpkg.away")
    try:
        assert hosts.play("--tags", "driver", on=[SWITCHED]).returncode != 0
    finally:
        hosts.run(SWITCHED, "mv /usr/bin/dpkg.away /usr/bin/dpkg")
    assert "nvidia-utils-580-server" in hosts.run(SWITCHED, "cat /etc/ddtree/nvidia-held").split()
    assert changed(hosts.play(on=[SWITCHED])) > 0


def test_uninstall_leaves_the_driver_and_nothing_else(hosts, lab):
    done = lab.play("playbooks/uninstall.yml", "--limit", "node2,node3", inventory=hosts.inventory)
    assert changed(done) > 0
    for number in (SWITCHED, PAIRS):
        assert hosts.run(number, "apt-mark showhold") == ""
        assert hosts.run(number, "sysctl -n vm.swappiness") == "60"
        left = hosts.run(
            number, "find /etc /usr/local /var /run -xdev -name '*ddtree*' -not -path '/run/host*'"
        )
        assert left == ""
        assert len(hosts.query(number, "uuid")) == 8
