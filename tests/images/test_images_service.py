# SPDX-License-Identifier: Apache-2.0
"""The image as site.yml deploys it: container mode on a real systemd host with Docker, asked from another."""

import json
import shutil
import time

import pytest
from building import ROOT
from lab_hosts import changed

from ddtree_vllm import __version__

pytestmark = [pytest.mark.hosts, pytest.mark.engine, pytest.mark.timeout(3600)]

UNIT, CONTAINER = "ddtree-vllm@0.service", "ddtree-vllm-0"
IMAGE, NEXT = f"ddtree-vllm:{__version__}-cpu", "ddtree-vllm:next"
READY_S = 900  # 30 s on two idle cores; shared ones take longer
LIMITS = {
    "vllm_service_start_timeout": READY_S,
    "vllm_service_drain_timeout": 240,
    # Looks that leave the cores to the engine.
    "health_interval": 30,
    "health_stall_after": 60,
    "health_generate_timeout": 50,
    # What finds an engine that hangs without work: a request whose client has gone is none.
    "health_generate_every": 60,
}


class Deployment:
    def __init__(self, lab, archive):
        self.lab = lab
        self.inventory = lab.inventory("cpu-container", {"ddtree": [1]})
        self.variables = {**LIMITS, "vllm_service_image_archive": str(archive)}

    def play(self, playbook="site.yml", *arguments, **variables):
        return self.lab.play(
            playbook,
            *arguments,
            inventory=self.inventory,
            timeout=1800,
            **{**self.variables, **variables},
        )

    def show(self, name):
        return self.lab.run(1, f"systemctl show --property={name} --value {UNIT}").strip()

    def container(self):
        return self.lab.inspect(CONTAINER)

    def wait_for_another(self, than, within=READY_S):
        """Waits for another container that serves; returns its id."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            look = self.lab.try_run(1, f"docker inspect --format '{{{{.Id}}}}' {CONTAINER}")
            if (
                look.returncode == 0
                and look.stdout.strip() != than
                and self.show("ActiveState") == "active"
            ):
                return look.stdout.strip()
            time.sleep(2)
        raise AssertionError(f"no other container serves within {within} s")

    def ask(self, *options):
        """The smoke test's program on the other host."""
        done = self.lab.try_run(
            2,
            f"python3 /root/remote.py --url http://node1:8000 --timeout 300 {' '.join(options)}",
            900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout[: done.stdout.rindex("}") + 1])


@pytest.fixture(scope="module")
def deployment(loaded, archive):
    lab = loaded
    lab.put(2, ROOT / "ddtree_vllm/smoke/remote.py", ROOT / "tests/images/streaming_client.py")
    made = Deployment(lab, archive)
    began = time.monotonic()
    assert changed(made.play()) > 0
    print(f"deployed in {time.monotonic() - began:.0f} s")
    return made


def test_a_second_run_changes_nothing(deployment):
    before = deployment.container()["Id"]
    assert changed(deployment.play()) == 0
    assert deployment.container()["Id"] == before


def test_another_host_chats_through_trees(deployment):
    report = deployment.ask("--exact", "--min-acceptance", "1.2", "--max-tokens", "24")
    assert report["model"] == "demo"
    assert report["same_alone_and_together"] == report["prompts"] == 3
    assert report["chat_pieces"] > 1
    done = deployment.play("playbooks/smoke.yml")
    assert done.returncode == 0, done.stdout


def test_the_container_has_no_privilege_and_a_read_only_root(deployment):
    look = deployment.container()
    assert look["Config"]["User"] == "10001:10001"
    assert look["Config"]["Image"] == IMAGE
    host = look["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["Privileged"] is False
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert "no-new-privileges" in host["SecurityOpt"]
    status = deployment.lab.run(1, f"docker exec {CONTAINER} cat /proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert set(fields["Uid"].split()) == {"10001"}
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    wrote = deployment.lab.try_run(1, f"docker exec {CONTAINER} touch /opt/ddtree/x")
    assert wrote.returncode == 1
    assert "Read-only file system" in wrote.stderr
    # Docker's client is root's: nothing that the engine can write is its configuration.
    environment = deployment.lab.run(
        1, "tr '\\0' '\\n' </proc/$(systemctl show -P MainPID ddtree-vllm@0)/environ"
    )
    assert not any(line.startswith("HOME=/var/cache") for line in environment.splitlines())
    # The container's own are the instance's: its caches outlive it.
    assert any(
        value.startswith("HOME=/var/cache/ddtree-vllm/0/") for value in look["Config"]["Env"]
    )
    assert "HF_HUB_OFFLINE=1" in look["Config"]["Env"]


def test_a_dead_engine_ends_the_container_with_an_error_and_is_started_again(deployment):
    before = deployment.container()["Id"]
    deployment.lab.run(1, "pkill -KILL -u 10001 -f VLLM::EngineCore")
    deployment.wait_for_another(before)
    journal = deployment.lab.journal(1, UNIT, lines=4000)
    assert "the server ended without being asked to: its engine died" in journal
    assert "Main process exited, code=exited, status=1/FAILURE" in journal
    assert deployment.ask("--max-tokens", "8")["tokens"] > 0


def test_a_reload_of_systemd_leaves_the_container_serving(deployment):
    before = deployment.container()["Id"]
    deployment.lab.run(1, "systemctl daemon-reload")
    report = deployment.ask("--max-tokens", "24")
    assert report["chat_pieces"] > 1
    assert deployment.show("ActiveState") == "active"
    assert deployment.container()["Id"] == before


def test_a_client_streams_through_a_kill_an_upgrade_and_its_way_back(deployment):
    """The kill breaks the stream that was running, and whoever asks the dying server; a drain breaks none."""
    lab = deployment.lab
    lab.run(1, f"printf 'FROM {IMAGE}\\nLABEL step=next\\n' | docker build -q -t {NEXT} -", 120)
    lab.run(2, "rm -rf /root/streams; mkdir /root/streams")
    client = lab.outside_in_background(
        *("ssh", "-i", str(lab.key), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"),
        *("-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "root@10.78.0.12"),
        "python3 /root/streaming_client.py node1 8000 /root/streams",
    )

    def seen():
        return json.loads(lab.try_run(2, "cat /root/streams/seen").stdout or '{"began": 0}')

    def wait_for_another_stream():
        """Until a stream that begins from here on has its first token."""
        end = time.monotonic() + 300
        began = seen()["began"]
        while (now := seen())["began"] <= began:
            assert time.monotonic() < end, now
            time.sleep(0.2)

    try:
        before = deployment.container()["Id"]
        wait_for_another_stream()
        lab.run(1, "pkill -KILL -u 10001 -f VLLM::EngineCore")
        deployment.wait_for_another(before)
        wait_for_another_stream()
        killed = seen()["broken"]
        assert killed
        for tag in (NEXT, IMAGE):
            before = deployment.container()["Id"]
            wait_for_another_stream()
            assert changed(deployment.play(vllm_service_image=tag)) > 0
            after = deployment.container()
            assert after["Id"] != before
            assert after["Config"]["Image"] == tag
            assert ("step" in after["Config"]["Labels"]) == (tag == NEXT)
            wait_for_another_stream()
        lab.run(2, "touch /root/streams/stop")
        output, errors = client.communicate(timeout=300)
    finally:
        client.kill()
    told = json.loads(output or "{}")
    print(told, errors)
    assert told["broken"] == killed
    assert told["finished"] >= 3
    drained = (
        f"journalctl --unit={UNIT} --output=cat | grep -c 'SIGTERM: requests in flight have 240 s'"
    )
    assert int(lab.run(1, drained)) == 2


def test_the_api_key_is_asked_for_and_docker_does_not_show_it(deployment):
    lab, secret = deployment.lab, "not-for-docker-inspect"
    url = "http://node1:8000/v1/models"
    code = "curl -sS -o /dev/null -w '%{http_code}' --max-time 30"
    before = deployment.container()["Id"]
    assert changed(deployment.play(vllm_service_api_key=secret)) > 0
    try:
        assert deployment.container()["Id"] != before
        assert lab.run(2, f"{code} {url}") == "401"
        assert lab.run(2, f"{code} -H 'Authorization: Bearer {secret}' {url}") == "200"
        assert secret not in json.dumps(deployment.container())
        assert lab.run(1, "ps -eo args | grep -c '[n]ot-for-docker' || true").strip() == "0"
        lab.run(1, "systemctl start ddtree-health@0.service")  # fails unless it is healthy
        kept = lab.run(1, "stat -c '%u %a' /run/ddtree-vllm/0.api-key").strip()
        assert kept == "10001 400"
    finally:
        assert changed(deployment.play()) > 0
    assert lab.run(2, f"{code} {url}") == "200"
    assert lab.run(1, "ls /run/ddtree-vllm").split() == ["0.started-with"]


def test_a_hung_engine_is_killed_with_its_container(deployment):
    before = deployment.container()["Id"]
    deployment.lab.run(1, "pkill -STOP -u 10001 -f VLLM::EngineCore")
    deployment.wait_for_another(before)
    assert "hung: " in deployment.lab.journal(1, "ddtree-health@0.service")
    left = deployment.lab.run(1, "docker ps --all --quiet | wc -l").strip()
    assert left == "1"


def test_an_archive_is_loaded_where_the_host_lacks_its_image(deployment, tmp_path):
    """A small image: the archive goes over ssh."""
    lab = deployment.lab
    lab.run(1, "printf 'FROM scratch\\nCOPY hostname /\\n' >/root/Small", 30)
    lab.run(
        1,
        "cd /etc && docker build -q -t small:1 -f /root/Small . && docker save -o /root/s.tar small:1",
        120,
    )
    lab.run(1, "docker image rm small:1")
    archive = tmp_path / "small.tar"
    shutil.copy(lab.folder / "lab/hosts/node1/root/root/s.tar", archive)
    small = {"vllm_service_image": "small:1", "vllm_service_image_archive": str(archive)}
    done = deployment.play("site.yml", "--tags", "install", **small)
    assert changed(done) > 0
    assert lab.inspect("small:1")["RepoTags"] == ["small:1"]
    other = {**small, "vllm_service_image": "large:1"}
    done = deployment.play("site.yml", "--tags", "install", **other)
    assert "does not hold large:1" in done.stdout
    # systemd keeps folders of its own there.
    assert lab.run(1, "find /var/tmp -mindepth 1 -maxdepth 1 ! -name 'systemd-private-*'") == ""


def test_an_image_that_is_nowhere_is_refused_in_a_sentence(deployment):
    before = deployment.container()["Id"]
    done = deployment.play(vllm_service_image="ddtree-vllm:none", vllm_service_image_archive="")
    assert done.returncode != 0
    assert "ddtree-vllm:none is not on this host" in done.stdout
    assert deployment.container()["Id"] == before


def test_uninstall_leaves_no_container_and_no_image_but_those_loaded_by_hand(deployment):
    """The role found IMAGE, which an operator had loaded; it has loaded small:1 itself."""
    assert deployment.lab.run(1, "docker images --quiet small:1") != ""
    assert changed(deployment.play("playbooks/uninstall.yml")) > 0
    assert deployment.lab.run(1, "docker ps --all --quiet; docker images --quiet small:1") == ""
    assert deployment.lab.run(1, f"docker images --quiet {IMAGE}") != ""
    assert deployment.lab.run(1, "docker volume ls --quiet") == ""
