# SPDX-License-Identifier: Apache-2.0
"""Docker Compose 2 for the test hosts, whose Debian 12 has the first one alone.

Debian 13's package has one static enough to run there: a program of Go that asks for an older libc.
"""

import hashlib
import subprocess
import urllib.request

import lab_hosts

FILE = "pool/main/d/docker-compose/docker-compose_2.26.1-4_amd64.deb"
SHA256 = "47681197cb2b1ab88206b42a1a92fc75f50d9530a6322d03494a473eed0408ea"


def package():
    """The package, from the archive that this machine's apt is told of; fetched once."""
    path = lab_hosts.work_folder() / FILE.rpartition("/")[2]
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        told = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        archives = [uri for uri in dict.fromkeys(told.stdout.split()) if "security" not in uri]
        assert archives, "apt knows no archive: apt-get update"
        with urllib.request.urlopen(f"{archives[0].rstrip('/')}/{FILE}", timeout=300) as answer:
            data = answer.read()
        assert hashlib.sha256(data).hexdigest() == SHA256, f"{FILE} is another than it was"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return path


def install(lab, number):
    """Makes `docker compose` a command of a host; what its package depends on is Docker alone."""
    lab.put(number, package())
    lab.run(number, f"dpkg-deb --extract /root/{package().name} / && docker compose version")
