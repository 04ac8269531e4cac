# SPDX-License-Identifier: Apache-2.0
"""ddtree-topology, as an operator runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import topology_machines as machines

from ddtree_topology.cli import main

ROOT = Path(__file__).parents[2]
PASSED = """echo '{"checked": 1, "peer_access": true}'"""


def test_plan_as_json(capsys):
    assert main(["plan", "--matrix", str(machines.path("03")), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [group["gpus"] for group in made["groups"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert made["why"][1].startswith("TP 4 for latency")


@pytest.mark.parametrize("file", sorted(machines.FIXTURES.glob("*.txt")), ids=lambda f: f.name[:3])
def test_every_fixture_gives_a_plan_or_a_sentence(file, capsys):
    status = main(["plan", "--matrix", str(file), "--json"])
    said = capsys.readouterr()
    answer = json.loads(said.out)
    if file.name.startswith(("16b", "25")):
        assert status == 2
        assert said.err == f"ddtree-topology: refused: {answer['refused']}\n"
    else:
        assert status == 0
        assert answer["groups"]
        assert answer["why"]


def test_options_reach_the_planner(capsys, tmp_path):
    inventory = tmp_path / "gpus.json"
    inventory.write_text(
        json.dumps(
            [{"name": "RTX 4090", "uuid": f"GPU-{i}", "memory_mib": 24564} for i in range(8)]
        )
    )
    arguments = ["plan", "--matrix", str(machines.path("07")), "--gpus", str(inventory), "--json"]
    arguments += ["--objective", "throughput", "--model-memory-mib", "40000"]
    arguments += ["--first-port", "9000", "--cache-root", "/srv/c", "--p2p", "on"]
    assert main(arguments) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["groups"][0]["uuids"] == ["GPU-0", "GPU-1"]
    assert made["groups"][3]["port"] == 9003
    assert made["groups"][3]["cache_dir"] == "/srv/c/3"
    assert made["p2p"]["on"] is True
    assert main([*arguments, "--tensor-parallel", "1"]) == 2
    assert "does not fit at tensor_parallel=1" in capsys.readouterr().err


def test_picture_prints_a_table_and_writes_an_svg(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--matrix", str(machines.path("17")), "--picture"]) == 0
    out = capsys.readouterr().out
    assert " 0 GPU0    ·    [NV1]  [NV1]  [NV2]   SYS" in out
    assert "\x1b" not in out
    assert out.endswith("wrote topology.svg\n")
    assert (tmp_path / "topology.svg").read_text().startswith("<svg ")
    elsewhere = ["--picture", "other.svg", "--color", "always"]
    assert main(["plan", "--matrix", str(machines.path("17")), *elsewhere]) == 0
    assert "\x1b[36m" in capsys.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.svg", "topology.svg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--matrix", "/no/such/file"], "/no/such/file cannot be read: No such file"),
        (["--gpus", "/no/such/file"], "give --matrix as well"),
        (["--matrix", "{06}", "--gpus", "{06}"], "is not JSON"),
        (["--matrix", "{06}", "--verdict", "[]"], "is not a JSON object"),
        (["--matrix", "{06}", "--picture", "/no/such/folder/a.svg"], "cannot be written"),
        (["--matrix", "{06}", "--picture", "a.png"], "name a file that ends in .svg, not a.png"),
        (["--matrix", "{06}", "--gpus", "[null]"], "gpus[0]: int() argument must be"),
        (["--matrix", "{06}", "--p2p-matrix", "{4}"], "2 GPUs and the one of peer access 4"),
        (["--cpu-only", "--first-port", "70000"], "first_port is 1 to"),
    ],
)
def test_unusable_files_are_refused(arguments, words, capsys, tmp_path):
    (tmp_path / "list").write_text("[]")
    (tmp_path / "null").write_text('[{"index": null}, {"numa": [null]}]')
    names = [f"GPU{i}" for i in range(4)]
    rows = ["\t".join(["", *names])]
    rows += [
        "\t".join([name, *("X" if name == other else "OK" for other in names)]) for name in names
    ]
    (tmp_path / "four").write_text("\n".join(rows) + "\n")
    known = {
        "{06}": str(machines.path("06")),
        "[]": str(tmp_path / "list"),
        "[null]": str(tmp_path / "null"),
        "{4}": str(tmp_path / "four"),
    }
    assert main(["plan", *(known.get(word, word) for word in arguments)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "plan", [{"groups": 5}, {"groups": [5]}, {"groups": [{"gpus": 5}]}, {"groups": [{"uuids": ""}]}]
)
def test_what_is_no_plan_is_not_probed(plan, capsys, tmp_path):
    (tmp_path / "plan").write_text(json.dumps(plan))
    assert main(["probe", "--plan", str(tmp_path / "plan")]) == 2
    assert "what is to be probed is no plan" in capsys.readouterr().err


def test_a_host_without_nvidia_smi_is_refused_unless_cpu_only(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["plan"]) == 2
    assert "install the NVIDIA driver, or ask for cpu_only" in capsys.readouterr().err
    assert main(["plan", "--cpu-only", "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["gpus"] == []
    assert group["cpuset"]


def test_asks_nvidia_smi(capsys, monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"""#!/bin/sh
case "$*" in
  "topo -m") while IFS= read -r line; do echo "$line"; done <{machines.path("06")};;
  "topo -p2p r") printf '\\tGPU0\\tGPU1\\nGPU0\\tX\\tOK\\nGPU1\\tOK\\tX\\n';;
  --query-gpu=*)
    echo "0, RTX PRO 6000, GPU-a, 97887, [N/A], 00000000:01:00.0"
    echo "1, RTX PRO 6000, GPU-b, 97887, [N/A], 00000000:02:00.0";;
  --query-compute-apps=*) ;;
  *) exit 9;;
esac
"""
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["plan", "--json", "--model-memory-mib", "62000"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["groups"][0]["uuids"] == ["GPU-a", "GPU-b"]
    assert made["gpus"]["0"]["memory_mib"] == 97887


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (PASSED, 0, "P2P is on"),
        (f'[ "$NCCL_P2P_DISABLE" ] || exit 3\n{PASSED}', 1, "P2P is off: the all-reduce"),
        ("echo broken; exit 1", 2, "broken"),
    ],
)
def test_exit_status_of_the_probe(script, status, words, capsys, tmp_path):
    fake_python = tmp_path / "python"
    fake_python.write_text(f"#!/bin/sh\n{script}\n")
    fake_python.chmod(0o755)
    output = tmp_path / "verdict.json"
    arguments = ["--matrix", str(machines.path("10")), "--python", str(fake_python)]
    assert main(["probe", *arguments, "--output", str(output)]) == status
    assert words in capsys.readouterr().out
    verdict = json.loads(output.read_text())
    assert verdict["p2p"] is (status == 0)
    # What the probe wrote is what the planner reads.
    planned = main(
        ["plan", "--matrix", str(machines.path("10")), "--verdict", str(output), "--json"]
    )
    answer = json.loads(capsys.readouterr().out)
    if status == 2:
        assert planned == 2
    else:
        assert answer["p2p"]["on"] is (status == 0)
        assert answer["p2p"]["probed"] is True


def test_a_plan_goes_through_standard_input_and_its_verdict_through_output(tmp_path):
    fake_python = tmp_path / "python"
    fake_python.write_text(f"#!/bin/sh\n{PASSED}\n")
    fake_python.chmod(0o755)
    program = [sys.executable, "-m", "ddtree_topology"]
    made = subprocess.run(
        [*program, "plan", "--matrix", str(machines.path("12")), "--json"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    done = subprocess.run(
        [*program, "probe", "--plan", "-", "--json", "--python", str(fake_python)],
        cwd=ROOT,
        input=made,
        capture_output=True,
        check=True,
        timeout=60,
    )
    verdict = json.loads(done.stdout)
    assert verdict["fingerprint"] == json.loads(made)["fingerprint"]
    assert [group["gpus"] for group in verdict["groups"]] == [[0, 1], [2, 3]]


def test_a_reader_that_leaves_is_no_error(tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m ddtree_topology plan --matrix {machines.path('01')} | head -n 1",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "8 x GPU: 1 instance of TP 8, for latency\n"
    assert done.stderr == ""
