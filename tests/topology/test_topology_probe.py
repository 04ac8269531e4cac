# SPDX-License-Identifier: Apache-2.0
"""The collective probe: with stubs for ranks, with gloo on CPUs, and on real GPUs."""

import os
import sys
import time
from itertools import combinations

import pytest
import topology_machines as machines
from test_topology_switches import switched

from ddtree_topology import host
from ddtree_topology.errors import TopologyError
from ddtree_topology.planner import plan
from ddtree_topology.probe import probe

PASSED = """echo '{"checked": 1, "wrong": 0, "peer_access": true}'"""


@pytest.fixture
def stub(tmp_path):
    """Probes a plan with a shell script in place of each rank; its arguments are rank.py's."""

    def run(made, script, **options):
        program = tmp_path / "rank.sh"
        program.write_text(script + "\n")
        return probe(made, **{"python": "/bin/sh", "rank_program": str(program), **options})

    return run


def pairs(number="03", **request):
    matrix = machines.machine(number)
    return plan(matrix, machines.alike(matrix.count), tensor_parallel=2, **request)


def test_a_passed_probe_turns_p2p_on_everywhere(stub):
    made = pairs()
    assert switched(made) is False
    verdict = stub(made, PASSED)
    assert (verdict["p2p"], verdict["collectives"]) == (True, True)
    assert [group["with_p2p"]["status"] for group in verdict["groups"]] == ["passed"] * 4
    assert [group["without_p2p"] for group in verdict["groups"]] == [None] * 4
    assert switched(pairs(verdict=verdict)) is True


def test_all_reduce_hangs_although_p2p_says_ok(stub):
    # One group of four hangs as long as P2P is on; its ranks ignore the request to end.
    script = f"""
    case "$CUDA_VISIBLE_DEVICES,$NCCL_P2P_DISABLE" in
      GPU-00000002,GPU-00000003,) trap '' TERM; sleep 60; sleep 60;;
    esac
    {PASSED}"""
    made = pairs("12")
    assert switched(made) is True
    started = time.monotonic()
    verdict = stub(made, script, timeout_s=1.5)
    assert time.monotonic() - started < 15
    assert [group["with_p2p"]["status"] for group in verdict["groups"]] == ["passed", "timeout"]
    assert [group["without_p2p"]["status"] for group in verdict["groups"]] == ["passed"] * 2
    assert verdict["because"] == (
        "P2P is off: the all-reduce over GPU2, GPU3 did not finish within 1.5 s; without P2P every "
        "group's sums were right."
    )
    # The verdict of one group sets every switch of all groups.
    assert switched(pairs("12", verdict=verdict)) is False


def test_wrong_sums_turn_p2p_off(stub):
    made = pairs()
    verdict = stub(made, f'[ "$NCCL_P2P_DISABLE" ] || exit 3\n{PASSED}')
    assert verdict["groups"][0]["with_p2p"]["status"] == "wrong"
    assert "the all-reduce over GPU0, GPU1 gave wrong sums" in verdict["because"]
    assert switched(pairs(verdict=verdict)) is False


def test_a_failing_rank_ends_its_group_at_once(stub):
    script = f"""[ "$NCCL_P2P_DISABLE" ] && {{ {PASSED}; exit; }}
    case " $* " in *" --rank 1 "*) echo 'NCCL error: unhandled'; exit 1;; esac
    sleep 60"""
    started = time.monotonic()
    verdict = stub(pairs("10"), script, timeout_s=60)
    assert time.monotonic() - started < 20
    (group,) = verdict["groups"]
    assert group["with_p2p"]["meaning"] == "failed (rank 1, exit status 1)"
    assert group["with_p2p"]["detail"] == "NCCL error: unhandled"


def test_nothing_works_is_no_plan(stub):
    verdict = stub(pairs("10"), "exit 3")
    assert (verdict["p2p"], verdict["collectives"]) == (False, False)
    with pytest.raises(TopologyError, match="failed with P2P on and off"):
        pairs("10", verdict=verdict)


def test_nvidia_smi_is_fine_cuda_still_fails_802(stub):
    said = "RuntimeError: Unexpected error from cudaGetDeviceCount(): Error 802: system not yet in"
    verdict = stub(pairs("01"), f"echo '{said}'; exit 1")
    assert verdict["because"].endswith(
        "CUDA does not initialise (802): on an NVSwitch host start nvidia-fabricmanager, of the "
        "driver's own version."
    )
    with pytest.raises(TopologyError, match="start nvidia-fabricmanager"):
        pairs("01", verdict=verdict)


def test_no_peer_access_turns_p2p_off_although_the_sums_are_right(stub):
    verdict = stub(pairs("06"), PASSED.replace("true", "false"))
    assert (verdict["p2p"], verdict["collectives"]) == (False, True)
    assert verdict["because"].startswith("P2P is off: CUDA reports no peer access among GPU0, GPU1")


def test_a_rank_without_a_report_has_proven_nothing(stub):
    verdict = stub(pairs("10"), "exit 0")
    assert verdict["groups"][0]["with_p2p"]["meaning"] == "ended without a report"
    assert verdict["collectives"] is False


def test_a_python_without_torch_proves_nothing(tmp_path):
    """No verdict on the links: else P2P would be judged by what was never tried."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # no installed package
    bare.chmod(0o755)
    with pytest.raises(TopologyError) as refused:
        probe(pairs("10"), python=str(bare), timeout_s=60)
    assert "has no torch (No module named 'torch')" in str(refused.value)
    assert "--python" in str(refused.value)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 64.00 MiB.",
        "NCCL error\\nCuda failure 2 'out of memory'",
    ],
)
def test_full_gpus_prove_nothing_with_a_fake_torch(tmp_path, monkeypatch, said):
    (tmp_path / "torch/distributed").mkdir(parents=True)
    (tmp_path / "torch/distributed/__init__.py").write_text("")
    (tmp_path / "torch/__init__.py").write_text(
        f'class cuda:\n    def init():\n        raise RuntimeError("{said}")\n'
        "def device(*_):\n    return None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TopologyError, match=r"over GPU0, GPU1: a GPU has no memory free for it"):
        probe(pairs("10"), timeout_s=60)


def test_ranks_see_their_group_by_uuid_and_no_old_switch(stub, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    script = f"""
    [ "$CUDA_DEVICE_ORDER" = PCI_BUS_ID ] || exit 1
    [ "$CUDA_VISIBLE_DEVICES" = GPU-00000000,GPU-00000001 ] || exit 1
    [ -z "$NCCL_P2P_DISABLE" ] || exit 1
    {PASSED}"""
    assert stub(pairs("10"), script)["p2p"] is True


def test_a_hung_rank_leaves_no_process_behind(stub, tmp_path):
    script = f"echo $$ >{tmp_path}/pid.$$; sleep 60 & echo $! >{tmp_path}/pid.$!; wait"
    stub(pairs("10"), script, timeout_s=1)
    started = [int(file.read_text()) for file in tmp_path.glob("pid.*")]
    assert len(started) == 8  # two ranks, a child each, two rounds
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in started):
        assert time.monotonic() < deadline, "the probe left a process behind"
        time.sleep(0.02)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_there_must_be_something_to_probe():
    with pytest.raises(TopologyError, match="there is nothing to probe"):
        probe({"groups": [{"gpus": []}]})
    with pytest.raises(TopologyError, match="cannot run /no/python"):
        probe(pairs("10"), python="/no/python")


@pytest.mark.slow
def test_a_real_all_reduce_over_gloo():
    verdict = probe(pairs("10"), backend="gloo", most_elements=1 << 18, timeout_s=120)
    assert verdict["groups"][0]["with_p2p"]["detail"] == ""
    assert (verdict["collectives"], verdict["p2p"]) == (True, False)
    assert verdict["because"] == "On gloo every group's sums were right, which says nothing of P2P."


@pytest.mark.slow
def test_the_data_check_finds_one_wrong_element(tmp_path):
    from ddtree_topology import rank

    program = tmp_path / "corrupting_rank.py"
    program.write_text(
        "import runpy, torch.distributed as dist\n"
        "right = dist.all_reduce\n"
        "def wrong(tensor):\n"
        "    right(tensor)\n"
        "    if dist.get_rank() == 1 and tensor.numel() > 1:\n"
        "        tensor[-1] += 1\n"
        "dist.all_reduce = wrong\n"
        f"runpy.run_path({rank.__file__!r}, run_name='__main__')\n"
    )
    verdict = probe(
        pairs("10"),
        backend="gloo",
        most_elements=2560,
        timeout_s=120,
        rank_program=str(program),
    )
    assert verdict["groups"][0]["with_p2p"]["status"] == "wrong"
    assert '"wrong": 20' in verdict["groups"][0]["with_p2p"]["detail"]


@pytest.mark.gpu
def test_the_gpus_of_this_machine_talk():
    # "/" is part of every control group: other tests of this session may hold the GPUs.
    found = host.read_host(own_cgroups=["/"])
    made = host.plan_host(found, allow_degraded=True)
    verdict = probe(made, python=sys.executable, timeout_s=240)
    print(verdict)
    assert verdict["collectives"] is True
    again = host.plan_host(found, allow_degraded=True, verdict=verdict)
    assert again["p2p"]["probed"] is True
    if all(
        link.startswith("NV")
        for group in again["groups"]
        for i, j in combinations(group["gpus"], 2)
        for link in [again["gpus"][str(i)]["links"][j]]
    ):
        assert verdict["p2p"] is True
    assert "NCCL_P2P_DISABLE" not in os.environ
