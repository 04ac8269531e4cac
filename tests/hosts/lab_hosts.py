# SPDX-License-Identifier: Apache-2.0
"""Real systemd hosts for tests: lab/lab.sh, driven from Python."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
LAB_SH = Path(__file__).parent / "lab/lab.sh"
# Programs of this machine, and the Debian packages that have them.
TOOLS = {
    "cc": "tcc",
    "curl": "curl",
    "dpkg-deb": "dpkg",
    "ip": "iproute2",
    "mmdebstrap": "mmdebstrap",
    "ssh-keygen": "openssh-client",
    "systemd-nspawn": "systemd-container",
}
# Python of the hosts' Debian; packages of the project's .venv are lent to them.
HOST_PYTHON = "3.11"
VENV = "/opt/ddtree/venv"


def work_folder() -> Path:
    """Keeps the root file system between runs; DDTREE_LAB names another folder."""
    return Path(os.environ.get("DDTREE_LAB", "/var/tmp/ddtree-hosts"))


def find_playbook() -> str | None:
    """ansible-playbook of .venv-ansible, or the one DDTREE_ANSIBLE_PLAYBOOK names."""
    wanted = os.environ.get("DDTREE_ANSIBLE_PLAYBOOK")
    return shutil.which(wanted or str(ROOT / ".venv-ansible/bin/ansible-playbook"))


def missing() -> str:
    """Why this machine can have no test hosts; empty if it can."""
    if os.geteuid() != 0:
        return "they need root"
    absent = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if shutil.which("tcc"):
        absent = [package for package in absent if package != "tcc"]
    if absent:
        return f"apt-get install --no-install-recommends {' '.join(absent)}"
    if find_playbook() is None:
        return "`make ansible` makes the controller, or DDTREE_ANSIBLE_PLAYBOOK names one"
    return ""


class Lab:
    """Hosts node1 ... nodeN.

    Args:
        count: how many.
        folder: of this lab alone.
        lend_venv: the project's .venv appears in every host as /opt/ddtree/venv.
        packages: of Debian, beside those of lab/rootfs.sh; a folder's root file system keeps them.
        shown: folders of this machine that every host reads at the same path.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        lend_venv: bool = True,
        packages: Sequence[str] = (),
        shown: Sequence[Path] = (),
    ) -> None:
        self.count, self.folder = count, folder
        self._packages, self._shown = packages, shown
        self.key = folder / "key"
        self.rootfs = folder / "rootfs"
        # Labs of other folders may be up at the same time.
        self.name = "ddtree-lab-" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]
        self._lend, self._extra = lend_venv, list[str]()
        self._lock: IO[str] | None = None

    # ---- the hosts

    def up(self) -> None:
        """Boots the hosts; builds their root file system first if it is not there."""
        self._take_folder()
        self._clear()
        self._build()
        self._extra = [f"--bind-ro={LAB_SH.parents[1]}/stub:/opt/stub"]
        self._extra += [f"--bind-ro={folder}" for folder in self._shown]
        if self._lend:
            self._extra += self._lend_venv()
        self._lab("up", str(self.count))
        state = self._lab("wait", str(self.count), timeout=120)
        print(state, end="")

    def down(self) -> None:
        if self._lock is None:
            return  # these hosts are another run's
        self._lab("down", timeout=120)
        self.release()

    def release(self) -> None:
        """Lets another run have the folder, as the end of this program does."""
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def root(self, number: int) -> Path:
        """The root of a host's file system, from this machine."""
        return self.folder / f"lab/hosts/node{number}/root"

    def run(self, number: int, command: str, timeout: float = 60) -> str:
        """Output of a shell command in a host; raises AssertionError with it if that fails."""
        done = self.try_run(number, command, timeout)
        assert done.returncode == 0, f"node{number}: {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def try_run(
        self, number: int, command: str, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        return self._bash("ssh", str(number), command, timeout=timeout)

    def wait_until_booted(self, within: float = 120) -> None:
        self._lab("wait", str(self.count), timeout=within)

    def reboot(self, *numbers: int, within: float = 120) -> None:
        """Reboots hosts at the same time, and waits until all that starts with them has."""
        before = {number: self._boot(number) for number in numbers}
        for number in numbers:
            self.try_run(number, "systemctl reboot")
        end = time.monotonic() + within
        while any(self._boot(number) in (boot, "") for number, boot in before.items()):
            assert time.monotonic() < end, f"not rebooted within {within} s: {numbers}"
            time.sleep(0.1)
        self.wait_until_booted(within)

    def _boot(self, number: int) -> str:
        """Identifies a host's boot; empty while it does not answer."""
        return self.try_run(number, "cat /proc/sys/kernel/random/boot_id").stdout.strip()

    def outside(self, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """A command of this machine in the lab's network, which is none of the hosts."""
        return self._bash("run", *command, timeout=timeout)

    def outside_in_background(self, *command: str) -> subprocess.Popen[str]:
        """The same, without waiting for it."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def journal(self, number: int, unit: str, lines: int = 80) -> str:
        return self.try_run(
            number, f"journalctl --no-pager --output=short-precise -n {lines} -u '{unit}'"
        ).stdout

    # ---- Ansible

    def play(
        self,
        playbook: str,
        *arguments: str,
        inventory: Path,
        timeout: float = 1200,
        **variables: object,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a playbook from inside the lab's network."""
        command = find_playbook()
        assert command is not None
        return self._bash(
            "run",
            *(command, "-i", str(inventory), "-e", json.dumps(variables), *arguments),
            str(ROOT / playbook),
            timeout=timeout,
        )

    def inventory(
        self,
        base: str,
        group_hosts: dict[str, Sequence[int]],
        host_vars: dict[int, dict[str, object]] | None = None,
    ) -> Path:
        """A copy of inventories/<base> whose hosts are those of the lab, by group.

        Groups other than ddtree are children of it, as in inventories/example.
        """
        folder = self.folder / f"inventory-{base}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(ROOT / "inventories" / base, folder)
        options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        groups = {
            group: {
                "hosts": {
                    f"node{number}": {
                        "ansible_host": f"10.78.0.{10 + number}",
                        "ansible_user": "root",
                        "ansible_ssh_private_key_file": str(self.key),
                        "ansible_ssh_common_args": options,
                        **(host_vars or {}).get(number, {}),
                    }
                    for number in numbers
                }
            }
            for group, numbers in group_hosts.items()
        }
        hosts = groups if "ddtree" in groups else {"ddtree": {"children": groups}}
        (folder / "hosts.yml").write_text(json.dumps(hosts, indent=1))
        return folder

    # ---- parts

    def _take_folder(self, within: float = 900) -> None:
        """Waits until no other run of the tests has hosts in this folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = (self.folder / "lock").open("w")
        end = time.monotonic() + within
        while True:
            try:
                # Inherited by no host: Python closes its files in what it starts.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                assert time.monotonic() < end, f"{self.folder} is in use; DDTREE_LAB names another"
                time.sleep(1)
            else:
                self._lock = lock
                return

    def _clear(self) -> None:
        """Ends what a run that was killed left of a lab: the lock says that nobody holds it."""
        names = Path("/run/netns").glob(f"{self.name}*")
        if any(names) or any(self.folder.glob("lab/hosts/node*")):
            self._bash("down", timeout=120)

    def _build(self) -> None:
        if not self.key.exists():
            subprocess.run(
                ["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", self.key], check=True
            )
        # Another list of packages, or another way of building, is another root file system.
        programs = (LAB_SH.with_name(name).read_text() for name in ("rootfs.sh", "lab-init"))
        recipe = "\n".join((*programs, *self._packages))
        stamp = self.folder / "rootfs.recipe"
        if stamp.exists() and stamp.read_text() == recipe:
            return
        stamp.unlink(missing_ok=True)
        shutil.rmtree(self.rootfs, ignore_errors=True)
        log = self.folder / "rootfs.log"
        with log.open("w") as output:
            done = subprocess.run(
                [LAB_SH.with_name("rootfs.sh"), self.rootfs, f"{self.key}.pub", *self._packages],
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=900,
            )
        assert done.returncode == 0, log.read_text()[-3000:]
        stamp.write_text(recipe)

    def _lend_venv(self) -> list[str]:
        """Binds that make the project's packages a venv of the host's own Python."""
        packages = ROOT / f".venv/lib/python{HOST_PYTHON}/site-packages"
        assert packages.is_dir(), f"the hosts' Python is {HOST_PYTHON}, and .venv has another"
        folder = self.folder / "venv"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").symlink_to(f"/usr/bin/python{HOST_PYTHON}")
        program = folder / "bin/ddtree-vllm"
        # Guarded as pip's scripts are: the engine's processes import it.
        program.write_text(
            f"#!{VENV}/bin/python\nimport sys\nfrom ddtree_vllm.cli import main\n"
            'if __name__ == "__main__":\n    sys.exit(main())\n'
        )
        program.chmod(0o755)
        (folder / "pyvenv.cfg").write_text(
            f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {HOST_PYTHON}\n"
        )
        (folder / f"lib/python{HOST_PYTHON}").mkdir(parents=True)
        (folder / f"lib/python{HOST_PYTHON}/site-packages").symlink_to("/opt/lent/packages")
        # The checkout is installed by its path on this machine; in the host it is elsewhere.
        over = self.folder / "packages"
        over.mkdir(exist_ok=True)
        (over / "_ddtree_vllm.pth").write_text("/opt/lent/checkout\n")
        lent = self.rootfs / "opt/lent"
        (lent / "packages").mkdir(parents=True, exist_ok=True)
        (lent / "checkout/ddtree_vllm").mkdir(parents=True, exist_ok=True)
        return [
            f"--bind-ro={folder}:{VENV}",
            f"--overlay-ro={packages}:{over}:/opt/lent/packages",
            f"--bind-ro={ROOT}/ddtree_vllm:/opt/lent/checkout/ddtree_vllm",
        ]

    def _lab(self, *arguments: str, timeout: float = 60) -> str:
        done = self._bash(*arguments, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _bash(self, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
        # Files, not pipes: the hosts outlive `up` and would keep a pipe open.
        output, errors = self.folder / "lab.out", self.folder / "lab.err"
        with output.open("w") as out, errors.open("w") as err:
            done = subprocess.run(
                ["bash", LAB_SH, *arguments],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                check=False,
                timeout=timeout,
                cwd=ROOT,
                env={
                    **os.environ,
                    "LAB_NAME": self.name,
                    "LAB": str(self.folder / "lab"),
                    "ROOTFS": str(self.rootfs),
                    "KEY": str(self.key),
                    "NSPAWN_EXTRA": " ".join(self._extra),
                    "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                    "ANSIBLE_HOME": str(self.folder / "ansible"),
                    # Kept ssh connections are known by address alone, which labs share.
                    "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.folder / "cp"),
                    "ANSIBLE_NOCOLOR": "1",
                },
            )
        return subprocess.CompletedProcess(
            done.args, done.returncode, output.read_text(), errors.read_text()
        )


def changed(done: subprocess.CompletedProcess[str]) -> int:
    """Changes of a play that went well; its end is shown otherwise."""
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return sum(map(int, re.findall(r"changed=(\d+)", done.stdout)))
