# SPDX-License-Identifier: Apache-2.0
"""The role preflight on real hosts: everything at once, on the screen and in a file, nothing changed.

`ddtree_preflight` itself is tested without hosts, in tests/preflight.
"""

import json
from pathlib import Path

import pytest
from lab_hosts import ROOT, changed

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(900)]

NODES = (1, 2)
TWO_3090 = ROOT / "tests/topology/fixtures/10-2x-rtx3090-nvlink-nv4.txt"
STUB = {"vllm_service_venv": "/opt/stub", "vllm_service_install": False}
# What a run could have left.
SNAPSHOT = (
    "{ find / -xdev -newer /root/before -not -path '/proc/*' -not -path '/sys/*' -not -path '/run/*' "
    "-not -path '/var/log/*' -not -path '/tmp/*' -not -path '/root/.ansible*' -not -path '/dev/*' "
    "-not -path /root -type f; } | sort"
)


@pytest.fixture
def preflight(lab, tmp_path):
    """Runs site.yml with the tag; returns what it did and the report."""
    report = tmp_path / "reports/preflight.json"  # the folder is made

    def run(nodes=NODES, host_vars=None, **variables):
        inventory = lab.inventory("cpu-demo", {"ddtree": nodes}, host_vars)
        done = lab.play(
            "site.yml", "--tags", "preflight", inventory=inventory,
            **{**STUB, "preflight_report": str(report), **variables},
        )  # fmt: skip
        return done, json.loads(report.read_text()) if report.exists() else None

    return run


def test_a_host_that_can_serve_is_told_so(preflight):
    done, report = preflight()
    assert changed(done) == 0
    assert report["refused"] == []
    for name in ("node1", "node2"):
        host = report["hosts"][name]
        assert host["refused"] == []
        assert {"check": "user", "level": "pass", "sentence": "root"} in host["findings"]
        assert [group["port"] for group in host["groups"]] == [8000]
        assert host["host"]["cpus"] > 0


def test_every_refusal_is_said_at_once_and_nothing_is_changed(lab, preflight):
    lab.run(1, "touch -d '1 second ago' /root/before")
    done, report = preflight(
        host_vars={1: {"gpu_topology_first_port": 22, "preflight_memory_mib": 99999999}},
        health_stall_after=1,
        model_store_models=[{"name": "a", "repo": "owner/name"}],
    )
    assert done.returncode == 2
    words = [
        "MiB of memory, and 99999999 are needed",
        "port 22 is taken by sshd (pid ",
        "not below health_interval (15)",
        "model a pins no revision",
    ]
    told = " ".join(report["hosts"]["node1"]["refused"])
    for word in words:
        assert word in told, told
        assert word in done.stdout, done.stdout
    assert len(report["hosts"]["node1"]["refused"]) == len(words)
    # The other host has two of them, and is in the same report.
    assert len(report["hosts"]["node2"]["refused"]) == 2
    assert report["refused"] == ["node1", "node2"]
    assert "changed=0" in done.stdout
    assert lab.run(1, SNAPSHOT) == ""


def test_a_host_that_is_not_reached_is_in_the_report(preflight):
    done, report = preflight(host_vars={2: {"ansible_host": "10.78.0.99"}})
    assert done.returncode != 0
    assert report["hosts"]["node1"]["refused"] == []
    assert "it could not be looked at" in report["hosts"]["node2"]["refused"][0]
    assert report["refused"] == ["node2"]


def test_a_report_of_another_day_is_not_left_where_no_host_is_reached(preflight):
    assert preflight()[1]["refused"] == []
    gone = {1: {"ansible_host": "10.78.0.98"}, 2: {"ansible_host": "10.78.0.99"}}
    done, report = preflight(host_vars=gone)
    assert done.returncode != 0
    assert report["refused"] == ["node1", "node2"]


def test_a_refused_host_is_left_as_it_is_by_a_whole_run(lab, tmp_path):
    inventory = lab.inventory("cpu-demo", {"ddtree": [1]})
    done = lab.play(
        "site.yml", inventory=inventory,
        **{**STUB, "preflight_memory_mib": 99999999, "preflight_report": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert "changed=0" in done.stdout
    assert "Refused, and nothing was changed" in done.stdout
    assert lab.run(1, "ls /etc/ddtree /opt/ddtree 2>/dev/null || true").strip() in (
        "",
        "/opt/ddtree:\nvenv",
    )
    assert not list(Path(tmp_path).iterdir())


def test_what_is_to_be_served_and_is_nowhere_is_refused(preflight):
    done, report = preflight(
        (1,),
        vllm_service_checkpoints=[],
        vllm_service_model="/root/model",
        vllm_service_drafter="/srv/ddtree/models/drafter",
        vllm_service_install=True,
        vllm_service_requirements=["/nowhere/pins.txt"],
        vllm_service_wheels=[],
    )
    assert done.returncode == 2
    told = " ".join(report["hosts"]["node1"]["refused"])
    for words in (
        "vllm_service_model is /root/model, which the service does not see",
        "vllm_service_drafter is /srv/ddtree/models/drafter, which is not on this host",
        "/nowhere/pins.txt is not on the controller",
        "vllm_service_wheels names no file",
    ):
        assert words in told, told
    _, report = preflight((1,), vllm_service_mode="container", vllm_service_image="of:none")
    assert "of:none is not on this host" in " ".join(report["hosts"]["node1"]["refused"])


def test_what_is_tolerated_only_warns(preflight):
    done, report = preflight((1,), preflight_memory_mib=99999999, preflight_tolerate=["memory"])
    assert done.returncode == 0, done.stdout
    levels = {item["check"]: item["level"] for item in report["hosts"]["node1"]["findings"]}
    assert levels["memory"] == "warn"
    assert "MiB of memory, and 99999999 are needed" in done.stdout


def test_a_host_without_a_driver_is_refused_if_it_is_to_have_gpus(preflight):
    done, report = preflight((1,), gpu_topology_cpu_only=False)
    assert done.returncode == 2
    told = " ".join(report["hosts"]["node1"]["refused"])
    assert "there is no NVIDIA driver on this host" in told
    assert "nvidia-smi is not on this host" in told  # the planner, too


def test_what_the_planner_refuses_and_leaves_out_is_in_the_report(preflight):
    """A mixed pair, from a recorded matrix: there is no GPU here."""
    mixed = [
        {"name": "NVIDIA GeForce RTX 3090", "uuid": "GPU-a", "memory_mib": 24576},
        {"name": "NVIDIA RTX A4000", "uuid": "GPU-b", "memory_mib": 16376},
    ]
    variables = {
        "gpu_topology_cpu_only": False,
        "gpu_topology_matrix": TWO_3090.read_text(),
        "gpu_topology_gpus": mixed,
    }
    done, report = preflight((1,), gpu_topology_tensor_parallel=2, **variables)
    assert done.returncode == 2
    refused = {
        item["sentence"] for item in report["hosts"]["node1"]["findings"]
        if (item["check"], item["level"]) == ("topology", "refuse")
    }  # fmt: skip
    assert len(refused) == 1
    assert "RTX A4000" in refused.pop()
