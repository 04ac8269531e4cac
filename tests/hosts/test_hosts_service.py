# SPDX-License-Identifier: Apache-2.0
"""The service on a real systemd host, its engine a stand-in that starts in a second.

What systemd, the roles and the health checks do is real; `stub/bin/ddtree-vllm` behaves as vLLM does
where they touch it. test_hosts_engine.py runs the real engine.
"""

import json
import re
import shlex
import subprocess
import time
import zipfile

import pytest
from lab_hosts import ROOT, Lab, changed

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

NODE = 1
FOUR_H100 = ROOT / "tests/topology/fixtures/13-4x-h100-sxm-nv6-4nic-comma-cpus.txt"
UNIT = "ddtree-vllm@0.service"
# Everything happens in seconds; the shares between the limits are those of the defaults.
FAST = {
    "vllm_service_venv": "/opt/stub",
    "vllm_service_install": False,
    "vllm_service_restart_delay": 1,
    "vllm_service_start_limit_burst": 100,
    "vllm_service_drain_timeout": 10,
    "vllm_service_free_timeout": 5,
    "health_interval": 2,
    "health_stall_after": 5,
    "health_generate_timeout": 3,
    "health_generate_every": 4,
    "health_min_acceptance": 1.2,
}
# Words that only survive if systemd's quoting is right.
ODD_ARGUMENTS = ["--speculative", '{"a b": "c\\"d", "e": 1}', "$HOME", "%i", "back\\slash"]


class Service:
    """The service of one host, and what can be done to it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.inventory = lab.inventory("cpu-demo", {"ddtree": [NODE]})
        self.variables = dict(FAST)

    def play(self, playbook: str = "site.yml", *arguments: str, **more):
        return self.lab.play(
            playbook, *arguments, inventory=self.inventory, **{**self.variables, **more}
        )

    def apply(self, **more: object) -> int:
        """Puts other variables into effect, quicker than the whole play; returns the changes."""
        return changed(self.play("site.yml", "--tags", "plan,configure,start", **more))

    def run(self, command: str) -> str:
        return self.lab.run(NODE, command).strip()

    def show(self, name: str, unit: str = UNIT) -> str:
        return self.run(f"systemctl show --property={name} --value '{unit}'")

    @property
    def main_pid(self) -> int:
        return int(self.show("MainPID"))

    @property
    def core_pid(self) -> int:
        return int(self.run(f"pgrep -P {self.main_pid}"))

    @property
    def reloads(self) -> int:
        """How often systemd has read its units anew since the boot."""
        return int(self.run("journalctl -q -b -o cat _PID=1 | grep -c '^Reloading' || true"))

    def said(self, words: str) -> int:
        """How many lines of the checks hold these words since the boot."""
        unit = "ddtree-health@0.service"
        return int(self.run(f"journalctl -q -b -o cat -u {unit} | grep -c '{words}' || true"))

    def curl(self, *arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """curl from outside the host."""
        return self.lab.outside(
            "curl", "-sS", "--max-time", str(timeout), *arguments, timeout=timeout + 10
        )

    def wait(self, what: str, within: float, condition) -> float:
        """Waits for a condition; returns the seconds it took."""
        began = time.monotonic()
        while time.monotonic() - began < within:
            if condition():
                return time.monotonic() - began
            time.sleep(0.2)
        raise AssertionError(f"not within {within} s: {what}")

    def settled(self, pid: int) -> bool:
        """Whether the unit has failed, or runs another process than this one."""
        state = self.show("ActiveState")
        return state == "failed" or (state == "active" and self.main_pid not in (0, pid))

    def wait_until_ready(self, within: float = 30, other_than: int = 0) -> float:
        return self.wait(
            "ready",
            within,
            lambda: self.show("ActiveState") == "active" and self.main_pid != other_than,
        )


@pytest.fixture(scope="module")
def service(lab):
    made = Service(lab)
    assert changed(made.play()) > 0
    return made


@pytest.fixture(autouse=True)
def healthy_before(service):
    service.wait_until_ready()
    return service


def test_a_second_run_changes_nothing_and_reloads_nothing(service):
    pid, reloads = service.main_pid, service.reloads
    assert changed(service.play()) == 0
    assert changed(service.play("site.yml", "--check", "--diff")) == 0
    assert service.main_pid == pid
    # A daemon-reload detaches GPUs from running containers.
    assert service.reloads == reloads


def test_the_service_is_reached_from_outside_the_host(service):
    # The stand-in continues everything by " name" and a new line.
    done = service.play("playbooks/smoke.yml", "-e", "smoke_expect=name")
    assert done.returncode == 0, done.stdout
    done = service.play("playbooks/smoke.yml", "-e", "smoke_expect=Paris")
    assert done.returncode != 0
    assert "without 'Paris'" in done.stdout + done.stderr
    # From the host itself, whose port may be closed to others.
    here = ("-e", "smoke_from={{ inventory_hostname }}")
    done = service.play("playbooks/smoke.yml", "-e", "smoke_expect=name", *here)
    assert done.returncode == 0, done.stdout
    assert "127.0.0.1:8000" in done.stdout


def test_started_means_ready(service):
    service.run(f"systemctl restart {UNIT}")
    assert service.curl("-o", "/dev/null", "http://10.78.0.11:8000/health").returncode == 0


def test_the_units_are_valid_and_little_exposed(service):
    units = " ".join(
        f"/etc/systemd/system/{name}"
        for name in (
            "ddtree-vllm@0.service",
            "ddtree-health@0.service",
            "ddtree-health@0.timer",
            "ddtree-alert@0.service",
        )
    )
    assert service.run(f"systemd-analyze verify {units} 2>&1") == ""
    for unit, most in ((UNIT, 2.5), ("ddtree-health@0.service", 2.0)):
        said = service.run(f"systemd-analyze security --no-pager {unit}")
        exposure = float(re.search(r"exposure level for .*: ([\d.]+)", said).group(1))
        assert exposure <= most, said


def test_the_engine_runs_unprivileged_and_cannot_write_its_weights(service):
    pid = service.main_pid
    assert service.run(f"ps -o user= -p {pid}") == "ddtree"
    status = service.run(f"cat /proc/{pid}/status")
    assert "NoNewPrivs:\t1" in status
    assert "CapEff:\t0000000000000000" in status
    stat = "stat -c '%U %a' /srv/ddtree/models/target/model.safetensors"
    assert service.run(stat) == "root 644"
    mounts = service.run(f"cat /proc/{pid}/mountinfo")
    assert re.search(r" / / ro[, ]", mounts)
    assert re.search(r" /var/cache/ddtree-vllm/0 rw[, ]", mounts)


def test_start_timeout_is_above_the_engines_budget(service):
    budget = int(re.search(r"READY_TIMEOUT_S='(\d+)'", service.run("cat /etc/ddtree/*.env"))[1])
    assert service.show("TimeoutStartUSec") == "16min 35s"  # 900 + 45 + 5 + 45
    assert budget == 900


def test_a_killed_engine_is_back_within_10_s_although_the_exit_code_is_0(service):
    pid = service.main_pid
    service.run(f"kill -KILL {service.core_pid}")
    service.wait("the server has ended", 10, lambda: service.main_pid != pid)
    assert service.wait_until_ready(within=10, other_than=pid) < 10
    journal = service.lab.journal(NODE, UNIT)
    assert "Main process exited" not in journal.split("Scheduled restart job")[-2][-300:]
    assert "Deactivated successfully" in journal


def test_a_hung_engine_is_restarted_by_health_within_its_limit(service):
    pid = service.main_pid
    service.run(f"kill -STOP {service.core_pid}")
    assert (
        service.curl(
            "-o", "/dev/null", "-w", "%{http_code}", "http://10.78.0.11:8000/health"
        ).stdout
        == "200"
    )
    # interval + generate_every + generate_timeout, twice, stall_after, and a slow machine.
    took = service.wait("a restart", 60, lambda: service.main_pid not in (pid, 0))
    service.wait_until_ready(other_than=pid)
    said = service.lab.journal(NODE, "ddtree-health@0.service")
    assert "hung: " in said, said
    assert took > FAST["health_stall_after"] - FAST["health_generate_timeout"]


def test_an_engine_that_takes_too_much_memory_is_killed_and_restarted(service):
    try:
        assert service.apply(vllm_service_memory_max="256M") > 0
        pid = service.main_pid
        body = json.dumps({"model": "demo", "prompt": "take memory", "max_tokens": 1})
        service.curl("-d", body, "http://10.78.0.11:8000/v1/completions")
        service.wait("the kernel's kill", 30, lambda: service.main_pid != pid)
        service.wait_until_ready(other_than=pid)
        # Only control groups of version 2 tell systemd why the kernel sent its signal.
        version_2 = service.run("stat -fc %T /sys/fs/cgroup") == "cgroup2fs"
        said = service.lab.journal(NODE, UNIT)
        assert f"Failed with result '{'oom-kill' if version_2 else 'signal'}'" in said, said
        assert "hung" not in service.lab.journal(NODE, "ddtree-health@0.service", lines=20)
    finally:
        service.apply()


def test_a_full_disk_stops_no_engine_and_hides_no_hang(service):
    pid = service.main_pid
    full = "/var/lib/ddtree-health"
    service.run(f"mount -t tmpfs -o size=4k,mode=777 full {full}; cat /dev/zero >{full}/f || true")
    try:
        service.lab.try_run(NODE, "systemctl start ddtree-health@0.service")
        said = service.lab.journal(NODE, "ddtree-health@0.service")
        assert "cannot be written: No space left on device" in said
        assert service.main_pid == pid
        service.run(f"kill -STOP {service.core_pid}")
        service.wait("a restart", 60, lambda: service.main_pid not in (pid, 0))
    finally:
        service.run(f"umount {full}")
    service.wait_until_ready(other_than=pid)
    service.run("systemctl start ddtree-health@0.service")  # fails unless it is healthy


def test_a_cache_of_another_user_is_given_back(service):
    service.run("chown root:root /var/cache/ddtree-vllm/0")
    assert changed(service.play("site.yml", "--tags", "plan,install")) == 1
    assert service.run("stat -c %U /var/cache/ddtree-vllm/0") == "ddtree"


@pytest.mark.slow
def test_a_wholly_stopped_server_is_restarted(service):
    pid = service.main_pid
    service.run(f"systemctl kill --signal=STOP {UNIT}")
    service.wait("a restart", 90, lambda: service.main_pid not in (pid, 0))
    service.wait_until_ready(other_than=pid)


def test_a_busy_engine_is_not_restarted(service):
    pid, restarts = service.main_pid, service.show("NRestarts")
    said, hung = service.said("it is busy"), service.said("hung: ")
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1500})
    client = service.lab.outside_in_background(
        *("curl", "-sS", "--max-time", "120", "-H", "Content-Type: application/json"),
        *("-d", body, "http://10.78.0.11:8000/v1/completions"),
    )
    # Our own completions wait behind that one, health_generate_timeout each: twice health_stall_after.
    service.wait("checks of the busy engine", 100, lambda: service.said("it is busy") >= said + 4)
    assert service.said("hung: ") == hung
    output, _ = client.communicate(timeout=120)
    assert json.loads(output)["usage"]["completion_tokens"] == 1500
    assert (service.main_pid, service.show("NRestarts")) == (pid, restarts)


def test_no_process_outlives_the_unit(service):
    pids = service.run(f"grep -l {UNIT} /proc/[0-9]*/cgroup | cut -d/ -f3").split()
    assert len(pids) >= 3  # server, engine and a worker that ignores SIGTERM
    service.run(f"systemctl stop {UNIT}")
    left = service.run(f"for p in {' '.join(pids)}; do [ -d /proc/$p ] && echo $p; done; true")
    assert left == ""
    service.run(f"systemctl start {UNIT}")


def test_a_request_in_flight_survives_a_stop(service):
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 200})
    client = service.lab.outside_in_background(
        *("curl", "-sS", "--max-time", "60", "-H", "Content-Type: application/json"),
        *("-d", body, "http://10.78.0.11:8000/v1/completions"),
    )
    # Ours, not one of the health check's: that comes from the host itself.
    service.wait(
        "the request to arrive",
        30,
        lambda: service.run("ss -Htn state established sport = :8000 dst 10.78.0.1"),
    )
    done = service.play("playbooks/stop.yml")
    assert done.returncode == 0, done.stdout
    output, _ = client.communicate(timeout=60)
    assert json.loads(output)["usage"]["completion_tokens"] == 200
    assert service.show("ActiveState") == "inactive"
    assert service.show("ActiveState", "ddtree-health@0.timer") == "inactive"
    assert changed(service.play()) >= 1
    assert service.show("ActiveState", "ddtree-health@0.timer") == "active"


def test_a_unit_edited_by_hand_is_put_back(service):
    service.run("sed -i 's/^Restart=always/Restart=no/' '/etc/systemd/system/ddtree-vllm@.service'")
    service.run("systemctl daemon-reload")
    assert changed(service.play()) > 0
    assert service.show("Restart") == "always"
    assert changed(service.play()) == 0


def test_instances_that_exchange_their_ports_are_all_started(service):
    """As GPUs of another grouping: neither can start while the other one runs as before."""
    plan = json.loads(service.run("cat /etc/ddtree/topology.json"))
    first = plan["groups"][0]
    folder = first["cache_dir"].rpartition("/")[0]
    second = {**first, "instance": "1", "port": 8001, "cache_dir": f"{folder}/1"}
    tags = ("site.yml", "--tags", "plan,install,configure,start")

    def serve(*groups):
        assert changed(service.play(*tags, vllm_service_groups=groups, health_groups=groups)) > 0

    def port(instance):
        pid = service.show("MainPID", f"ddtree-vllm@{instance}.service")
        return service.run(f"ss -Hltnp | grep -oP ':\\K[0-9]+(?= .*pid={pid},)'")

    try:
        serve(first, second)
        assert (port(0), port(1)) == ("8000", "8001")
        serve({**first, "port": 8001}, {**second, "port": 8000})
        assert (port(0), port(1)) == ("8001", "8000")
    finally:
        service.apply()
        service.run(f"rm -rf {folder}/1")


def test_a_reload_that_a_broken_off_run_has_left_out_is_made_up_for(service):
    """The unit is as it should be, so that no task writes it and none notifies the handler."""
    unit = "/etc/systemd/system/ddtree-vllm@.service"
    pid = service.main_pid
    service.run(f"cp -a {unit} /run/unit; sed -i s/RestartSec=1/RestartSec=9/ {unit}")
    service.run(f"systemctl daemon-reload; cp /run/unit {unit}; rm /run/unit")
    assert (service.show("NeedDaemonReload"), service.show("RestartUSec")) == ("yes", "9s")
    assert service.apply() > 0
    assert (service.show("NeedDaemonReload"), service.show("RestartUSec")) == ("no", "1s")
    assert service.main_pid != pid
    assert service.apply() == 0


def test_check_mode_counts_what_would_be_started_and_enabled(service):
    timer = "ddtree-health@0.timer"

    def would_change():
        return changed(service.play("site.yml", "--tags", "plan,configure,start", "--check"))

    assert would_change() == 0
    service.run(f"systemctl disable {UNIT} {timer}")
    assert would_change() == 2
    service.run(f"systemctl stop {UNIT}")
    assert would_change() == 3
    assert service.show("ActiveState") == "inactive"
    pid = service.main_pid
    assert service.apply() > 0
    assert service.main_pid != pid
    # Of a running one the state alone is put right.
    pid = service.main_pid
    service.run(f"systemctl disable {UNIT} {timer}")
    assert service.apply() == 2
    assert service.run(f"systemctl is-enabled {UNIT} {timer}") == "enabled\nenabled"
    assert service.main_pid == pid


def test_arguments_reach_the_engine_word_for_word(service):
    try:
        assert service.apply(vllm_service_engine_args=ODD_ARGUMENTS) > 0
        said = service.run(f"journalctl -o cat -u {UNIT} | grep ^arguments | tail -1")
        assert json.loads(said.partition(" ")[2])[-5:] == ODD_ARGUMENTS
    finally:
        service.apply()


def test_the_api_key_is_a_credential(service):
    try:
        assert service.apply(vllm_service_api_key="s3cret") > 0
        url = "http://10.78.0.11:8000/v1/models"
        code = ("-o", "/dev/null", "-w", "%{http_code}")
        assert service.curl(*code, url).stdout == "401"
        assert service.curl(*code, "-H", "Authorization: Bearer s3cret", url).stdout == "200"
        service.run("systemctl start ddtree-health@0.service")  # it has the key too
        assert service.run("ps -eo args | grep -c '[s]3cret' || true") == "0"
        for expect, ok in (("name", True), ("Paris", False)):
            done = service.play(
                *("playbooks/smoke.yml", "-v"), vllm_service_api_key="s3cret", smoke_expect=expect
            )
            assert (done.returncode == 0) == ok, done.stdout
            assert "s3cret" not in done.stdout + done.stderr
        assert service.run("stat -c '%U %a' /etc/ddtree/credentials/api-key") == "root 600"
        # Gone missing: refused by systemd, not served without.
        service.run("mv /etc/ddtree/credentials/api-key /root/key")
        refused = service.lab.try_run(NODE, f"systemctl restart {UNIT}")
        assert refused.returncode != 0
        assert "status=243/CREDENTIALS" in service.lab.journal(NODE, UNIT)
        assert service.apply(vllm_service_api_key="s3cret") > 0
        assert service.curl(*code, url).stdout == "401"
    finally:
        service.apply()
    assert service.run("ls /etc/ddtree") == (
        "checkpoints-copied\nhealth-0.env\ntopology.json\nvllm-0.env"
    )


def test_a_failure_that_lasts_is_told_once_and_so_is_its_end(service):
    # echo of sh would make lines of the sentence, which quotes a backslash and an n.
    script = '# lines too\nprintf "%s\\n" "$2 $1: $3 $0" >>/run/alarm\n'
    alarm = ["/bin/sh", "-c", script, "100%", 'a "b"']
    told = {"health_alert_after": 5, "health_alert_command": alarm}
    before = service.main_pid
    # What other tests broke has been told too, and its end may be yet to come.
    service.run("systemctl stop ddtree-health@0.timer ddtree-health@0.service")
    service.run("rm -f /run/ddtree-health/0.alerts.json")

    def heard():
        return service.run("cat /run/alarm 2>/dev/null || true").splitlines()

    def ends_told():
        journal = service.run("journalctl -q -o cat -t ddtree-alert")
        return journal.splitlines().count(f"{UNIT} is healthy again")

    ends = ends_told()
    try:
        service.apply(**told, health_expect="never said")
        service.wait("the alert", 40, heard)
        checks = service.said("is unhealthy")
        service.wait("two more checks", 30, lambda: service.said("is unhealthy") >= checks + 2)
        begin = f'{UNIT} a "b": {UNIT} is'
        assert [line.startswith(f"{begin} unhealthy: generates: ") for line in heard()] == [True]
        service.apply(**told)
        service.wait("its end", 40, lambda: len(heard()) == 2)
        assert heard()[1] == f"{begin} healthy again 100%"
        assert ends_told() == ends + 1
        assert "healthy again" not in service.run("journalctl -o cat -t ddtree-alert -p alert")
        assert service.main_pid == before
    finally:
        service.run("rm -f /run/alarm")
        service.apply()


def test_an_engine_that_goes_on_raises_no_alert(service):
    """systemd 254 and newer ask for it at every restart; what an older one does by hand here."""
    told = 'journalctl -q -o cat -t ddtree-alert | grep -c "stays down" || true'
    before = service.run(told)
    service.run(f"systemctl start 'ddtree-alert@{UNIT}'")
    journal = service.lab.journal(NODE, f"ddtree-alert@{UNIT}")
    assert "exec-condition" in journal, journal
    assert service.run(told) == before


def test_an_engine_that_keeps_failing_stays_down_and_raises_the_alert(service):
    alarm = ["/bin/sh", "-c", 'echo "$0" >/run/alarm']
    try:
        service.apply(vllm_service_start_limit_burst=3, vllm_service_alert_command=alarm)
        for _ in range(5):
            pid = service.main_pid
            service.run(f"kill -KILL {pid}")
            service.wait("another start, or none", 30, lambda pid=pid: service.settled(pid))
            if service.show("ActiveState") == "failed":
                break
        assert service.show("ActiveState") == "failed"
        assert service.show("Result") == "signal"
        service.wait("the alert", 20, lambda: service.run("cat /run/alarm || true") == UNIT)
        assert f"{UNIT} stays down" in service.run("journalctl -o cat -t ddtree-alert -p alert")
        status = service.play("playbooks/status.yml")
        assert status.returncode != 0
        assert "Not healthy: 0" in status.stdout + status.stderr
    finally:
        service.run("rm -f /run/alarm")
        service.apply()
    done = service.play("playbooks/status.yml")
    assert done.returncode == 0, done.stdout
    assert "engine 0 is healthy" in done.stdout


def test_a_taken_port_is_refused_before_anything_changes(service):
    service.run(f"systemctl disable --now {UNIT}")
    service.run(
        "systemd-run --unit=squatter python3 -m http.server 8000 && "
        "for i in $(seq 50); do ss -Hltn sport = :8000 | grep -q . && break; sleep 0.1; done"
    )
    try:
        done = service.play()
        assert done.returncode != 0
        assert "Port 8000 is taken" in done.stdout + done.stderr
        assert "python3" in done.stdout + done.stderr
        assert "changed=0" in done.stdout
    finally:
        service.run("systemctl stop squatter")
        changed(service.play())


def test_container_mode_pins_each_instance_by_uuid_and_drops_privileges(service):
    """Rendered only, with a stand-in for Docker: the hosts of the lab have neither it nor a GPU."""
    uuids = [f"GPU-{letter}" for letter in "abcd"]
    variables = {
        "gpu_topology_cpu_only": False,
        "gpu_topology_matrix": FOUR_H100.read_text(),
        "gpu_topology_gpus": [
            {"name": "H100", "uuid": uuid, "memory_mib": 81559} for uuid in uuids
        ],
        "gpu_topology_tensor_parallel": 2,
        "vllm_service_mode": "container",
        "vllm_service_image": "ddtree-vllm:gpu",
        "vllm_service_free_mib": 70000,
        "vllm_service_memory_max": "64G",
        "vllm_service_api_key": "s3cret",
        "vllm_service_docker": "/usr/local/bin/docker-stand-in",
    }
    service.run(
        "printf '#!/bin/sh\\n' >/usr/local/bin/docker-stand-in; "
        "chmod 755 /usr/local/bin/docker-stand-in"
    )
    files = "/etc/systemd/system/ddtree-vllm@.service"
    try:
        # Without container_runtime, which has a Docker to configure only where it has installed one.
        some = ("--tags", "plan,configure", "--skip-tags", "container_runtime")
        done = service.play("site.yml", *some, **variables)
        assert done.returncode == 0, done.stdout
        unit = service.run(f"cat {files}")
        for words in (
            "--read-only",
            "--cap-drop ALL",
            "--security-opt no-new-privileges",
            "--shm-size 16g",
            "--user 10001:10001",
            "--pull never",
            "--memory 64g",
            "--log-driver none",
            "--env DDTREE_API_KEY_FILE=/run/secrets/api-key",
        ):
            assert words in unit
        assert "VLLM_API_KEY" not in unit
        # Docker's own unit is not there; nothing else is to be said.
        said = service.lab.try_run(NODE, f"systemd-analyze verify {files} 2>&1").stdout
        assert [line for line in said.splitlines() if "docker.service" not in line] == []
        plan = json.loads(service.run("cat /etc/ddtree/topology.json"))
        assert [group["instance"] for group in plan["groups"]] == ["0", "1"]
        for group in plan["groups"]:
            text = service.run(f"cat /etc/ddtree/vllm-{group['instance']}.env")
            environment = dict(re.findall(r"^(\w+)='?(.*?)'?$", text, re.MULTILINE))
            words = shlex.split(environment["DDTREE_CONTAINER"])
            for uuid in group["uuids"]:
                assert f"--device=nvidia.com/gpu={uuid}" in words
            assert len([word for word in words if word.startswith("--device=")]) == 2
            assert words[words.index("--publish") + 1] == f"0.0.0.0:{group['port']}:8000"
            assert words[words.index("--cpuset-cpus") + 1] == group["cpuset"]
            assert "CUDA_VISIBLE_DEVICES" not in environment
            waits = shlex.split(environment["DDTREE_WAIT"])
            assert waits[waits.index("--gpus") + 1] == ",".join(group["uuids"])
            serve = shlex.split(environment["DDTREE_SERVE"])
            assert serve[serve.index("--tensor-parallel-size") + 1] == "2"
        native = service.play("site.yml", *some, **{**variables, "vllm_service_mode": "native"})
        assert native.returncode == 0, native.stdout
        first = plan["groups"][0]
        visible = ",".join(map(str, first["gpus"]))
        assert f"CUDA_VISIBLE_DEVICES='{visible}'" in service.run("cat /etc/ddtree/vllm-0.env")
        placement = "/etc/systemd/system/ddtree-vllm@0.service.d/placement.conf"
        assert f"CPUAffinity={first['cpuset']}" in service.run(f"cat {placement}")
        unit = service.run(f"cat {files}")
        assert "DeviceAllow=char-nvidia* rw" in unit
        assert service.run(f"systemd-analyze verify {files} 2>&1") == ""
    finally:
        service.run("rm /usr/local/bin/docker-stand-in")
        service.apply()
    # The second instance is no longer planned.
    assert service.run("ls /etc/ddtree") == (
        "checkpoints-copied\nhealth-0.env\ntopology.json\nvllm-0.env"
    )


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"vllm_service_engine_args": ["--port=1"]}, "sets --port, which the plan"),
        (
            {
                "vllm_service_env": {
                    "NCCL_P2P_DISABLE": "0",
                    "DDTREE_URL": "x",
                    "OMP_NUM_THREADS": 1,
                }
            },
            "sets NCCL_P2P_DISABLE, DDTREE_URL, which the plan",
        ),
        ({"vllm_service_engine_args": ["it's"]}, "must not hold a single quote"),
        ({"vllm_service_mode": "container"}, "Container mode needs vllm_service_image"),
        (
            {
                "vllm_service_mode": "container",
                "vllm_service_image": "any",
                "vllm_service_shm_size": "64m",
                "vllm_service_groups": [{"instance": "0", "gpus": [0, 1], "port": 8000}],
            },
            "vllm_service_shm_size of at least 1g",
        ),
        ({"health_stall_after": 1}, "not below health_interval"),
        ({"vllm_service_mode": "podman"}, "value of vllm_service_mode must be one of"),
    ],
)
def test_bad_variables_are_refused_in_a_sentence(service, variables, words):
    done = service.play("site.yml", "--tags", "preflight,gpu_topology", **variables)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr, done.stdout + done.stderr


def stand_in_wheel(folder):
    """A wheel whose ddtree-vllm is the stand-in."""
    name = "ddtree_stand_in-1.0"
    path = folder / f"{name}-py3-none-any.whl"
    module = (ROOT / "tests/hosts/stub/bin/ddtree-vllm").read_text()
    module = module.replace('if __name__ == "__main__":', "def main():")
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("ddtree_stand_in.py", module)
        info = f"{name}.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: ddtree-stand-in\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        scripts = "[console_scripts]\nddtree-vllm = ddtree_stand_in:main\n"
        wheel.writestr(f"{info}/entry_points.txt", scripts)
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
def test_the_role_makes_the_venv_and_removes_it(service, tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("# none\n")
    variables = {
        "vllm_service_install": True,
        "vllm_service_venv": "/opt/made/venv",
        "vllm_service_requirements": [str(pins)],
        "vllm_service_wheels": [str(stand_in_wheel(tmp_path))],
        "vllm_service_pip_options": ["--no-index"],
        "vllm_service_system_packages": [],  # no mirror is reachable; the hosts have them
        "preflight_venv_mib": 1,
    }

    def made():
        return service.run("ls -d /opt/made/venv.[0-9a-f]*").split()

    try:
        # A directory of somebody else at that path is refused, and is not replaced.
        service.run("mkdir -p /opt/made/venv && touch /opt/made/venv/theirs")
        refused = service.play(**variables)
        assert refused.returncode != 0
        assert "/opt/made/venv is there and not made by this role" in refused.stdout
        service.run("rm /opt/made/venv/theirs && rmdir /opt/made/venv")

        assert changed(service.play(**variables)) > 0
        first = made()
        assert first == [service.run("readlink /opt/made/venv")]
        program = "/opt/made/venv/bin/ddtree-vllm"
        assert program in service.run(f"ps -o args= -p {service.main_pid}")
        pid = service.main_pid
        assert changed(service.play(**variables)) == 0
        # Which venv it is does not depend on the tags.
        assert service.apply(**variables) == 0
        assert service.main_pid == pid

        # A venv that cannot be made leaves the one that serves.
        broken = {
            **variables,
            "vllm_service_wheels": [*variables["vllm_service_wheels"], str(pins)],
        }
        assert service.play(**broken).returncode != 0
        assert service.run("readlink /opt/made/venv") == first[0]
        service.run(f"systemctl restart {UNIT}")
        pid = service.main_pid

        pins.write_text("# none, but other ones\n")
        assert changed(service.play(**variables)) > 0
        assert service.main_pid != pid
        second = made()
        assert len(second) == 1
        assert second != first
        assert changed(service.play("playbooks/uninstall.yml", **variables)) > 0
        assert service.run("ls -A /opt/made 2>/dev/null || true") == ""
    finally:
        service.run("rm -rf /opt/made")
        changed(service.play())


def test_a_reboot_brings_everything_back(service):
    service.lab.reboot(NODE)
    service.wait_until_ready(within=60)
    assert service.show("ActiveState", "ddtree-health@0.timer") == "active"
    assert changed(service.play()) == 0


def test_uninstall_keeps_what_was_there_before(service):
    """A user of the same name, a venv where the role would have made one, a folder it copies into."""
    venv, target = "/opt/operator/venv", "/srv/ddtree/models/target"
    try:
        assert changed(service.play("playbooks/uninstall.yml")) > 0
        service.run(
            "groupadd --system --gid 10001 ddtree; "
            "useradd --system --uid 10001 --gid 10001 --comment theirs ddtree; "
            f"mkdir -p {venv} {target}; touch {venv}/x {target}/theirs"
        )
        assert changed(service.play()) > 0
        container = {
            "vllm_service_mode": "container",
            "vllm_service_install": True,
            "vllm_service_venv": venv,
            "vllm_service_image": "any",
            "vllm_service_image_archive": "any.tar",
        }
        assert changed(service.play("playbooks/uninstall.yml", **container)) > 0
        assert service.run("getent passwd ddtree").split(":")[4] == "theirs"
        assert service.run(f"ls {venv}") == "x"
        assert "theirs" in service.run(f"ls {target}")
        assert service.run("ls /srv/ddtree/models") == "target"
    finally:
        service.run("rm -rf /opt/operator /srv/ddtree; userdel ddtree || true")
        changed(service.play())


def test_uninstall_leaves_nothing(service):
    try:
        assert changed(service.play("playbooks/uninstall.yml")) > 0
        left = service.run(
            "find /etc /usr/local /var/cache /var/lib /srv /run /opt -xdev -name '*ddtree*' "
            "-not -path '/opt/*' -not -path '/run/systemd/*' -not -path '/run/host*'; "
            "getent passwd | grep ddtree; getent group | grep ddtree; "
            "systemctl list-units --all --no-legend --plain 'ddtree*'; "
            "systemctl list-unit-files --no-legend 'ddtree*'; true"
        )
        assert left == ""
        assert service.curl("http://10.78.0.11:8000/health").returncode == 7
        assert changed(service.play("playbooks/uninstall.yml")) == 0
    finally:
        changed(service.play())
