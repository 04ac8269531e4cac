# SPDX-License-Identifier: Apache-2.0
"""The room that preflight asks for what site.yml will make. Real Ansible on this machine, no host."""

import hashlib
import io
import json
import tarfile

import pytest
from lab_hosts import ROOT
from role_plays import program, run_playbook

pytestmark = [pytest.mark.ansible, pytest.mark.timeout(120)]


@pytest.fixture
def refusals(tmp_path):
    """refusals(variable=...) -> what preflight refuses; always the memory, so that nothing else is done."""

    def run(**variables):
        given = {
            "ansible_connection": "local",
            "ansible_become": False,
            "gpu_topology_cpu_only": True,
            "gpu_topology_cache_root": str(tmp_path / "caches"),
            "preflight_report": str(tmp_path / "report.json"),
            "preflight_memory_mib": 1 << 40,
            "preflight_roles": [],
            **variables,
        }
        (tmp_path / "hosts.yml").write_text(json.dumps({"ddtree": {"hosts": {"here": given}}}))
        hosts = tmp_path / "hosts.yml"
        done = run_playbook(tmp_path, "-i", hosts, "--tags", "preflight", ROOT / "site.yml")
        assert done.returncode == 2, done.stdout + done.stderr
        sentences = json.loads((tmp_path / "report.json").read_text())["refused"]
        assert sentences == ["here"], done.stdout
        return json.loads((tmp_path / "report.json").read_text())["hosts"]["here"]["refused"]

    return run


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("0.0.0.0", "", True),
        ("10.0.0.7", "", True),
        ("0.0.0.0", "s3cret", False),
        ("127.0.0.1", "", False),
        ("::1", "", False),
    ],
)
def test_an_address_that_others_reach_without_a_key_is_warned_of(
    tmp_path, refusals, host, key, warned
):
    refusals(vllm_service_host=host, vllm_service_api_key=key)
    findings = json.loads((tmp_path / "report.json").read_text())["hosts"]["here"]["findings"]
    told = [item for item in findings if item["check"] == "address"]
    assert [item["level"] for item in told] == ["warn"] * warned
    assert all(f"listens on {host} and asks for no key" in item["sentence"] for item in told)


def test_a_venv_is_given_room_until_it_is_the_one_wanted(tmp_path, refusals):
    pins, wheel, venv = tmp_path / "pins.txt", tmp_path / "one.whl", tmp_path / "venv"
    pins.write_text("# none\n")
    wheel.write_text("wheel")
    given = {
        "vllm_service_venv": str(venv),
        "vllm_service_requirements": [str(pins)],
        "vllm_service_wheels": [str(wheel)],
        "preflight_venv_mib": 1 << 40,
    }
    words = f"{1 << 40} for a venv in {venv}"
    assert any(words in sentence for sentence in refusals(**given))

    # As the role names it: by what it is made from.
    sums = [hashlib.sha1(path.read_bytes()).hexdigest() for path in (pins, wheel)]
    key = hashlib.sha256(" ".join(["python3", *sums]).encode()).hexdigest()[:12]
    made = tmp_path / f"venv.{key}"
    made.mkdir()
    (made / "made-from").write_text("")
    assert not any("for a venv" in sentence for sentence in refusals(**given))


def test_an_image_is_given_room_for_itself_and_for_its_archive(tmp_path, refusals):
    """Its size is the archive's: 1 MiB and what tar adds, on a disk that cannot hold the rest."""
    archive, digest = tmp_path / "image.tar", "5a" * 32
    manifest = json.dumps([{"Config": f"{digest}.json", "RepoTags": ["i:1"]}]).encode()
    with tarfile.open(archive, "w") as tar:
        for name, content in (("manifest.json", manifest), ("layer", bytes(1 << 20))):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    data = tmp_path / "data"
    program(tmp_path, "docker", f"case $1 in info) echo '{data} []';; *) exit 1;; esac")
    given = {
        "vllm_service_mode": "container",
        "vllm_service_image": "i:1",
        "vllm_service_image_archive": str(archive),
        "vllm_service_docker": str(tmp_path / "docker"),
        "vllm_service_config_dir": str(tmp_path),
        "preflight_disk": [
            {"path": folder, "mib": 1 << 40, "what": "more"}
            for folder in (str(tmp_path), "/var/tmp")
        ],
    }
    said = " ".join(refusals(**given))
    assert f"4 for the image in {data}" in said
    assert "2 for its archive in /var/tmp" in said

    program(tmp_path, "docker", f"[ $1 = image ] && echo sha256:{digest}")
    said = " ".join(refusals(**given))
    assert f"{1 << 40} for more" in said
    assert "for the image" not in said
    assert "for its archive" not in said
