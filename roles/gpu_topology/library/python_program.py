#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module python_program: installs a pure-Python package and a launcher in one step."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: python_program
short_description: Install a program that needs nothing but the host's Python
description:
  - Writes the modules of one flat package, removes modules it no longer has, and writes a launcher
    that runs it with the Python this module runs under.
  - One task instead of a copy for each file, which would take seconds a file.
options:
  package:
    description: Name of the package.
    type: str
    required: true
  sources:
    description: Text of each module by file name. Needed if O(state=present).
    type: dict
  lib_dir:
    description: Directory of the package's directory. Created, and removed when it is empty.
    type: path
    required: true
  launcher:
    description: Path of the launcher.
    type: path
    required: true
  state:
    description: Whether the program is there.
    type: str
    default: present
    choices: [absent, present]
attributes:
  check_mode:
    support: full
    description: Tells what would change.
  diff_mode:
    support: full
    description: Shows each file.
author:
  - The ddtree-vllm authors
"""

EXAMPLES = r"""
- name: Install ddtree-topology
  python_program:
    package: ddtree_topology
    sources:
      __init__.py: ""
      cli.py: "{{ lookup('ansible.builtin.file', 'cli.py') }}"
    lib_dir: /usr/local/lib/ddtree
    launcher: /usr/local/bin/ddtree-topology
"""

RETURN = r"""
files:
  description: Files that were written or removed.
  returned: success
  type: list
  elements: str
"""

ARGUMENTS = {
    "package": {"type": "str", "required": True},
    "sources": {"type": "dict"},
    "lib_dir": {"type": "path", "required": True},
    "launcher": {"type": "path", "required": True},
    "state": {"type": "str", "default": "present", "choices": ["absent", "present"]},
}
OLDEST = (3, 9)
# -B: no __pycache__, so that removing the files removes everything.
LAUNCHER = """#!{python} -B
# Written by Ansible.
import sys

sys.path.insert(0, {lib_dir!r})

from {package}.cli import main  # noqa: E402

sys.exit(main())
"""


def wanted_files(params):
    """Path -> (text, mode) of everything the program consists of."""
    folder = os.path.join(params["lib_dir"], params["package"])
    if params["state"] == "absent":
        return folder, {}
    files = {
        os.path.join(folder, name): (text if text.endswith("\n") else text + "\n", 0o644)
        for name, text in params["sources"].items()
    }
    files[params["launcher"]] = (
        LAUNCHER.format(
            python=sys.executable, lib_dir=params["lib_dir"], package=params["package"]
        ),
        0o755,
    )
    return folder, files


def present_files(folder, launcher):
    """Path -> (text, mode) of what is there now."""
    paths = [launcher] if os.path.lexists(launcher) else []
    if os.path.isdir(folder):
        paths += [os.path.join(folder, name) for name in os.listdir(folder)]
    found = {}
    for path in paths:
        if os.path.isdir(path):
            found[path] = ("", 0o755)
            continue
        with open(path, encoding="utf-8", errors="replace") as file:
            found[path] = (file.read(), os.fstat(file.fileno()).st_mode & 0o777)
    return found


def write(path, text, mode):
    """Replaces a file in one step."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".ansible-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
    os.replace(temporary, path)


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def apply(folder, launcher, wanted, changed):
    if wanted:
        for directory in (folder, os.path.dirname(launcher)):
            if not os.path.isdir(directory):
                os.makedirs(directory, mode=0o755)
    for path in changed:
        if path in wanted:
            write(path, *wanted[path])
        else:
            remove(path)
    if not wanted:
        for directory in (folder, os.path.dirname(folder)):
            if os.path.isdir(directory) and not os.listdir(directory):
                try:
                    os.rmdir(directory)
                except OSError as error:
                    # Something is mounted there: it is not ours alone.
                    if error.errno != errno.EBUSY:
                        raise


def main():
    module = AnsibleModule(
        argument_spec=ARGUMENTS,
        required_if=[("state", "present", ["sources"])],
        supports_check_mode=True,
    )
    params = module.params
    if sys.version_info < OLDEST:
        module.fail_json(
            msg=f"{params['package']} needs Python 3.9 or newer on the host; "
            f"{sys.executable} is {sys.version.split()[0]}."
        )
    try:
        folder, wanted = wanted_files(params)
        present = present_files(folder, params["launcher"])
        changed = sorted(
            path for path in {*wanted, *present} if wanted.get(path) != present.get(path)
        )
        if changed and not module.check_mode:
            apply(folder, params["launcher"], wanted, changed)
    except OSError as error:
        module.fail_json(msg=f"{params['package']} cannot be installed: {error}.")
    diff = [
        {
            "before_header": path,
            "after_header": path,
            "before": present.get(path, ("",))[0],
            "after": wanted.get(path, ("",))[0],
        }
        for path in changed
    ]
    module.exit_json(changed=bool(changed), files=changed, diff=diff)


if __name__ == "__main__":
    main()
