# SPDX-License-Identifier: Apache-2.0
"""The role container_runtime on real hosts.

Installation: real apt and a real signed repository, whose packages stand in for Docker and the NVIDIA
container toolkit. Configuration (slow): Debian's real Docker, too old for CDI, which is what makes
the role refuse it for GPUs.
"""

import json
import sys

import lab_hosts
import pytest
from lab_hosts import changed
from package_repository import PackageRepository

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

NODE = 1
PORT = 8790
URL = f"http://10.78.0.1:{PORT}"
PLAY = "tests/hosts/plays/container_runtime.yml"
UNINSTALL = "tests/hosts/plays/container_runtime_uninstall.yml"
UUIDS = ["GPU-11111111-2222-4333-8444-555555555555", "GPU-66666666-2222-4333-8444-555555555555"]
DOCKER = """#!/bin/sh
case "$1" in
  --version) echo "Docker version 29.1.3, build 1234567" ;;
  ps) cat /run/stand-in-containers 2>/dev/null ;;
  info) echo false ;;
esac
"""
DOCKER_SERVICE = """[Service]
ExecStart=/usr/bin/sleep infinity
[Install]
WantedBy=multi-user.target
"""
# As nvidia-ctk cdi generate: a device for each GPU, and libraries named by the driver's version.
NVIDIA_CTK = """#!/bin/sh
out=/dev/stdout
for word; do case $word in --output=*) out=${word#--output=} ;; esac; done
{
  echo "cdiVersion: 0.7.0"
  echo "kind: nvidia.com/gpu"
  echo "devices:"
  nvidia-smi | while read -r uuid; do echo "- name: $uuid"; done
  echo "containerEdits: {mounts: [{hostPath: /usr/lib/libcuda.so.$(cat /run/driver)}]}"
} >"$out"
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory, lab):
    made = PackageRepository(tmp_path_factory.mktemp("packages") / "www")
    made.publish_key("linux/debian/gpg")
    made.publish_key("nvidia/gpgkey")
    suite = "linux/debian/dists/bookworm"
    version = "5:29.1.3-1~debian.12~bookworm"
    made.add(suite, "docker-ce", version, {"lib/systemd/system/docker.service": DOCKER_SERVICE})
    made.add(suite, "docker-ce-cli", version, {"usr/bin/docker": DOCKER})
    made.add(
        suite, "containerd.io", "2.2.0-1~debian.12~bookworm", {"usr/bin/containerd": "#!/bin/sh\n"}
    )
    made.sign(suite, "stable/binary-amd64")
    flat = "nvidia/stable/deb/amd64"
    for name in ("nvidia-container-toolkit", "libnvidia-container-tools", "libnvidia-container1"):
        made.add(flat, name, "1.20.0-1", {f"usr/share/{name}/about": "stands in\n"})
    made.add(flat, "nvidia-container-toolkit-base", "1.20.0-1", {"usr/bin/nvidia-ctk": NVIDIA_CTK})
    made.sign(flat)
    server = lab.outside_in_background(
        sys.executable, "-m", "http.server", str(PORT), "--directory", str(made.folder)
    )
    lab.outside("bash", "-c", f"for i in $(seq 100); do echo >/dev/tcp/10.78.0.1/{PORT} && exit; "
                "sleep 0.1; done; exit 1")  # fmt: skip
    yield made
    server.terminate()
    server.communicate(timeout=30)


@pytest.fixture(scope="module")
def runtime(lab, repository):
    """Plays the role on a host whose nvidia-smi names two GPUs; takes back everything at the end."""
    inventory = lab.inventory("cpu-demo", {"ddtree": [NODE]})
    listed = "\\n".join(UUIDS)
    lab.run(
        NODE,
        # No mirror is reached, and apt would wait for it.
        "mv /etc/apt/sources.list /root/ 2>/dev/null; echo 580.159.04 >/run/driver; "
        f"printf '#!/bin/sh\\nprintf \"{listed}\\\\n\"\\n' >/usr/local/bin/nvidia-smi && "
        "chmod 755 /usr/local/bin/nvidia-smi",
    )
    variables = {
        "gpu_topology_cpu_only": False,
        "container_runtime_enabled": True,
        "container_runtime_docker_repository": f"{URL}/linux",
        "container_runtime_docker_key_checksum": repository.key_checksum,
        "container_runtime_toolkit_repository": f"{URL}/nvidia",
        "container_runtime_toolkit_key_checksum": repository.key_checksum,
    }

    def play(*arguments, playbook=PLAY, **more):
        return lab.play(playbook, *arguments, inventory=inventory, **{**variables, **more})

    yield play
    lab.run(
        NODE,
        "apt-get purge -qy docker-ce docker-ce-cli containerd.io 'nvidia-container-toolkit*' "
        "'libnvidia-container*' && rm -rf /usr/local/bin/nvidia-smi /etc/docker && "
        "mv /root/sources.list /etc/apt/ 2>/dev/null; true",
    )


def spec(lab):
    return lab.run(NODE, "cat /etc/cdi/nvidia.yaml")


def test_a_key_that_is_not_the_known_one_is_refused(lab, runtime):
    done = runtime(container_runtime_docker_key_checksum="sha256:" + "0" * 64)
    assert done.returncode != 0
    assert "checksum" in done.stdout
    assert lab.try_run(NODE, "command -v docker").returncode != 0


def test_docker_and_the_toolkit_come_from_their_repositories_and_gpus_are_named_by_uuid(
    lab, runtime
):
    lab.run(
        NODE, 'mkdir -p /etc/docker && echo \'{"data-root": "/data"}\' >/etc/docker/daemon.json'
    )
    assert changed(runtime()) > 0
    installed = lab.run(
        NODE, "dpkg-query -Wf '${Package} ${Version}\\n' | grep -e docker -e nvidia"
    )
    assert "docker-ce 5:29.1.3-1~debian.12~bookworm" in installed
    assert "nvidia-container-toolkit 1.20.0-1" in installed
    for uuid in UUIDS:
        assert f"- name: {uuid}" in spec(lab)
    assert json.loads(lab.run(NODE, "cat /etc/docker/daemon.json")) == {
        "data-root": "/data",
        "features": {"cdi": True},
        "log-opts": {"max-size": "50m", "max-file": "3"},
    }
    assert lab.run(NODE, "systemctl is-active docker; systemctl is-enabled docker ddtree-cdi").split() == [
        "active", "enabled", "enabled"
    ]  # fmt: skip
    assert lab.run(NODE, "systemd-analyze verify ddtree-cdi.service 2>&1") == ""


def test_a_second_run_changes_nothing_and_restarts_nothing(lab, runtime):
    before = lab.run(NODE, "systemctl show -p InvocationID --value docker")
    done = runtime()
    assert changed(done) == 0
    assert "Docker is restarted" not in done.stdout
    assert changed(runtime("--check", "--diff")) == 0
    assert lab.run(NODE, "systemctl show -p InvocationID --value docker") == before


def test_a_changed_configuration_restarts_docker_and_says_whom_that_stops(lab, runtime):
    before = lab.run(NODE, "systemctl show -p InvocationID --value docker")
    lab.run(NODE, "echo somebodys-database >/run/stand-in-containers")
    smaller = {"container_runtime_log_max_size": "8m"}
    there = lab.run(NODE, "cat /etc/docker/daemon.json")
    wanted = {"preflight_report": "", "playbook": "site.yml"}
    told = runtime("--tags", "preflight", **wanted, **smaller)
    assert "which stops somebodys-database" in told.stdout
    for _ in range(2):  # a refusal leaves nothing behind that would look done
        refused = runtime(**smaller)
        assert refused.returncode != 0
        assert "which stops somebodys-database" in refused.stdout
        assert lab.run(NODE, "cat /etc/docker/daemon.json") == there
        assert lab.run(NODE, "systemctl show -p InvocationID --value docker") == before
    done = runtime(container_runtime_restart=True, **smaller)
    assert changed(done) > 0
    assert "Docker is restarted, and with it somebodys-database" in done.stdout
    assert lab.run(NODE, "systemctl show -p InvocationID --value docker") != before
    assert changed(runtime(**smaller)) == 0
    # A run that was cut off after it wrote: the next one restarts Docker.
    before = lab.run(NODE, "systemctl show -p InvocationID --value docker")
    lab.run(NODE, "touch /run/ddtree-docker-restart")
    assert changed(runtime(container_runtime_restart=True, **smaller)) == 1
    assert lab.run(NODE, "systemctl show -p InvocationID --value docker") != before
    assert changed(runtime(**smaller)) == 0
    lab.run(NODE, "rm /run/stand-in-containers")


def test_a_host_that_serves_natively_is_asked_nothing_of_its_docker(lab, runtime):
    """Also where the role preflight asks; an old Docker of others would be refused."""
    lab.run(NODE, "cp /usr/bin/docker /root/docker && sed -i 's/29.1.3/20.10.24/' /usr/bin/docker")
    try:
        wanted = {"preflight_report": "", "playbook": "site.yml"}
        refused = runtime("--tags", "preflight", **wanted)
        assert "Docker 20.10.24 is on this host" in refused.stdout
        native = runtime("--tags", "preflight", container_runtime_enabled="auto", **wanted)
        assert "Docker 20.10.24" not in native.stdout
    finally:
        lab.run(NODE, "cp /root/docker /usr/bin/docker")


def test_another_driver_is_named_anew_at_the_next_boot(lab, runtime):
    assert "libcuda.so.580.159.04" in spec(lab)
    lab.run(NODE, "echo 580.173.02 >/run/driver && systemctl restart ddtree-cdi.service")
    assert "libcuda.so.580.173.02" in spec(lab)
    order = lab.run(NODE, "systemctl show -p Before --value ddtree-cdi.service")
    assert "docker.service" in order
    assert changed(runtime()) >= 1  # the size of the logs, back to its default
    assert changed(runtime()) == 0


def test_a_gpu_that_the_toolkit_does_not_see_is_refused(lab, runtime):
    broken = "/usr/bin/nvidia-ctk"
    lab.run(
        NODE,
        f"cp {broken} /root/ctk && sed -i 's/^  nvidia-smi |/  nvidia-smi | head -1 |/' {broken}",
    )
    try:
        done = runtime()
        assert done.returncode != 0
        assert f"does not name {UUIDS[1]}" in done.stdout
    finally:
        lab.run(NODE, f"cp /root/ctk {broken}")
    assert changed(runtime()) >= 1


def test_uninstalling_leaves_docker_with_the_keys_of_others(lab, runtime):
    """Containers of others run on: what is taken out counts from Docker's next restart."""
    lab.run(NODE, "echo somebodys-database >/run/stand-in-containers")
    before = lab.run(NODE, "systemctl show -p InvocationID --value docker")
    done = runtime(playbook=UNINSTALL)
    assert changed(done) > 0
    assert "until it is restarted, which would stop somebodys-database" in done.stdout
    assert lab.run(NODE, "systemctl show -p InvocationID --value docker") == before
    assert json.loads(lab.run(NODE, "cat /etc/docker/daemon.json")) == {"data-root": "/data"}
    left = lab.run(NODE, "find /etc -name '*ddtree*'; ls -d /etc/cdi 2>/dev/null || true")
    assert left.strip() in ("", "/etc/ddtree")
    assert lab.run(NODE, "systemctl is-active docker").strip() == "active"
    assert changed(runtime(playbook=UNINSTALL)) == 0


# ---- Debian's real Docker


@pytest.fixture(scope="module")
def docker_lab():
    """A host of its own, with Docker from Debian."""
    hosts = lab_hosts.Lab(
        1, lab_hosts.work_folder() / "with-docker", lend_venv=False, packages=("docker.io",)
    )
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


@pytest.mark.slow
def test_a_docker_that_is_there_is_kept_and_its_logs_are_capped(docker_lab):
    inventory = docker_lab.inventory("cpu-demo", {"ddtree": [NODE]})
    variables = {"container_runtime_enabled": True, "container_runtime_gpus": False}

    def play(**more):
        return docker_lab.play(PLAY, inventory=inventory, **{**variables, **more})

    # Too old to give a container a GPU by CDI.
    refused = play(container_runtime_gpus=True)
    assert refused.returncode != 0
    assert "Docker 20.10" in refused.stdout
    assert "changed=0" in refused.stdout
    docker_lab.run(
        NODE, 'mkdir -p /etc/docker; echo \'{"labels": ["a=b"]}\' >/etc/docker/daemon.json'
    )
    docker_lab.run(NODE, "systemctl restart docker")
    assert "Docker is restarted" in play().stdout
    assert changed(play()) == 0
    docker_lab.run(
        NODE,
        "tar -cf - -T /dev/null | docker import - empty >/dev/null && docker create --name capped empty x",
    )
    logs = json.loads(
        docker_lab.run(NODE, "docker inspect --format '{{json .HostConfig.LogConfig}}' capped")
    )
    assert logs == {"Type": "json-file", "Config": {"max-size": "50m", "max-file": "3"}}
    assert "a=b" in docker_lab.run(NODE, "docker info --format '{{.Labels}}'")
