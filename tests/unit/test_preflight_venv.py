# SPDX-License-Identifier: Apache-2.0
"""A venv that root sees and the service's unit, with ProtectHome=yes, does not."""

import pytest

from ddtree_preflight import service
from ddtree_preflight.host import Done, Host
from ddtree_preflight.request import Request


def sentences(python, **request):
    """What is refused on a host whose vllm_service_python is this file."""
    host = Host("/", lambda command, timeout_s: Done(0, f"{python}\n"))
    found = list(service.check_venv(host, Request(**request)))
    assert all((finding.check, finding.level) == ("python", "refuse") for finding in found)
    return [finding.sentence for finding in found]


@pytest.mark.parametrize(
    "python", ["/usr/bin/python3.11", "/opt/python/bin/python3.12", "/rooted/py"]
)
def test_a_python_of_the_system_is_seen(python):
    assert sentences(python) == []


@pytest.mark.parametrize(
    "python", ["/root/.local/share/uv/python/bin/python3.12", "/home/me/.pyenv/bin/python3.11"]
)
def test_a_python_in_a_home_is_refused(python):
    (refusal,) = sentences(python)
    assert refusal.startswith(f"vllm_service_python is {python}, which the service does not see")


def test_a_venv_in_a_home_is_refused():
    (refusal,) = sentences("/usr/bin/python3", venv="/home/me/venv")
    assert refusal.startswith("vllm_service_venv is /home/me/venv, which the service does not see")


def test_a_venv_that_is_taken_as_it_is_is_asked_for_its_own_python(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    (home / "bin/python3.12").touch()
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(home / "bin/python3.12")
    monkeypatch.setattr(service, "_HIDDEN", (str(home),))
    (refusal,) = sentences("/usr/bin/python3", venv=str(tmp_path / "venv"), installs_venv=False)
    assert f"the Python of vllm_service_venv is {home}/bin/python3.12" in refusal


def test_a_container_has_a_python_of_its_own():
    assert sentences("/root/python", mode="container", venv="/home/me/venv") == []
