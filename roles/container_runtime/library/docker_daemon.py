#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module docker_daemon: keys of ours in Docker's daemon.json, those of others kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: docker_daemon
short_description: Merge settings into Docker's daemon.json
description:
  - Adds keys, and keeps every key that somebody else has set, also one of those wanted here.
  - What it has added is noted in O(record), so that a later run can change or remove it again.
  - The new file is checked by C(dockerd --validate) before it replaces the old one, where dockerd
    knows that option.
options:
  settings:
    description: Keys to add; values that are mappings are merged key by key.
    type: dict
    default: {}
  required:
    description: Keys that are needed, so that another value is refused.
    type: dict
    default: {}
  log_options:
    description: Log options to add if the log driver is json-file or local.
    type: dict
    default: {}
  path:
    description: Docker's file.
    type: path
    default: /etc/docker/daemon.json
  record:
    description: File that notes what was added.
    type: path
    required: true
  state:
    description: V(absent) removes what was added and the record.
    type: str
    default: present
    choices: [absent, present]
attributes:
  check_mode:
    support: full
    description: Tells what would change, and refuses what would be refused.
  diff_mode:
    support: full
    description: Shows both files.
author:
  - The ddtree-vllm authors
"""

EXAMPLES = r"""
- name: Cap the logs, and let containers have devices by CDI
  docker_daemon:
    log_options:
      max-size: 50m
    required:
      features:
        cdi: true
    record: /etc/ddtree/docker-daemon.json
"""

RETURN = r"""
kept:
  description: Keys that are wanted otherwise and were left as somebody else has set them.
  returned: success
  type: list
  elements: str
restart:
  description: Whether Docker has to be restarted because the content has changed.
  returned: success
  type: bool
"""

ARGUMENTS = {
    "settings": {"type": "dict", "default": {}},
    "required": {"type": "dict", "default": {}},
    "log_options": {"type": "dict", "default": {}},
    "path": {"type": "path", "default": "/etc/docker/daemon.json"},
    "record": {"type": "path", "required": True},
    "state": {"type": "str", "default": "present", "choices": ["absent", "present"]},
}
# Drivers that know max-size and max-file; others refuse them, and Docker would not start.
CAPPED_DRIVERS = ("json-file", "local")
SEPARATOR = "\0"


class Refused(Exception):
    """The file cannot be merged; says why."""


def flatten(settings, prefix=()):
    """{"a": {"b": 1}} -> {("a", "b"): 1}; lists and empty mappings are values."""
    found = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found.update(flatten(value, (*prefix, key)))
        else:
            found[(*prefix, key)] = value
    return found


def lookup(settings, path):
    """Value at a path, None if there is none."""
    for key in path:
        if not isinstance(settings, dict) or key not in settings:
            return None
        settings = settings[key]
    return settings


def put(settings, path, value):
    """Sets a value; returns whether something that is no mapping was in the way."""
    for key in path[:-1]:
        settings = settings.setdefault(key, {})
        if not isinstance(settings, dict):
            return False
    settings[path[-1]] = value
    return True


def drop(settings, path):
    """Removes a value, and mappings that are empty without it."""
    if len(path) > 1:
        inner = settings.get(path[0])
        if isinstance(inner, dict):
            drop(inner, path[1:])
            if not inner:
                del settings[path[0]]
    else:
        settings.pop(path[0], None)


def merge(there, ours_before, wanted, required):
    """New content, what of it is ours, and paths that somebody else has set otherwise.

    Args:
        there: content of the file.
        ours_before: path -> value that an earlier run added.
        wanted: path -> value.
        required: those of `wanted` that must not be otherwise.

    Raises:
        Refused: a required path is set otherwise.
    """
    merged = json.loads(json.dumps(there))
    for path, value in ours_before.items():
        # Changed since by somebody else: theirs by now.
        if lookup(merged, path) == value:
            drop(merged, path)
    ours, kept = {}, []
    for path, value in wanted.items():
        found = lookup(merged, path)
        name = ".".join(path)
        if found is None:
            if not put(merged, path, value):
                raise Refused(f"{name} cannot be set: what stands above it is no mapping")
            ours[path] = value
        elif found != value:
            if path in required:
                raise Refused(f"{name} is {json.dumps(found)}, and {json.dumps(value)} is needed")
            kept.append(name)
    return merged, ours, kept


def read(path):
    """Content of a JSON file, {} if there is none or it is empty."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        content = json.loads(text) if text.strip() else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise Refused(f"{path} does not hold a mapping")
    return content


def text_of(content):
    return json.dumps(content, indent=2, sort_keys=True) + "\n" if content else ""


def validate(path):
    """Lets Docker look at a file, if it can."""
    dockerd = shutil.which("dockerd")
    if dockerd is None:
        return
    done = subprocess.run(
        [dockerd, "--validate", "--config-file", path],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    if done.returncode != 0 and "unknown flag" not in done.stdout:
        raise Refused(f"Docker does not accept the merged file: {done.stdout.strip()}")


def try_out(text):
    """Lets Docker look at what would be written."""
    if text:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file:
            file.write(text)
            file.flush()
            validate(file.name)


def write(path, text):
    """Replaces a file in one step, or removes it if there is nothing to say."""
    if not text:
        if os.path.exists(path):
            os.remove(path)
        return
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        os.makedirs(folder, mode=0o755)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".ansible-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        if os.path.basename(path) == "daemon.json":
            validate(temporary)
        os.replace(temporary, path)
    except BaseException:
        os.remove(temporary)
        raise


def wanted_paths(params, there, ours_before):
    """Path -> value of everything wanted, and the paths that are required."""
    if params["state"] == "absent":
        return {}, set()
    wanted = flatten(params["settings"])
    required = flatten(params["required"])
    wanted.update(required)
    driver = (
        wanted.get(("log-driver",))
        if ("log-driver",) in ours_before
        else there.get("log-driver", wanted.get(("log-driver",)))
    ) or "json-file"
    if driver in CAPPED_DRIVERS:
        for key, value in params["log_options"].items():
            wanted.setdefault(("log-opts", key), str(value))
    return wanted, set(required)


def main():
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    params = module.params
    try:
        there = read(params["path"])
        ours_before = {
            tuple(path.split(SEPARATOR)): value for path, value in read(params["record"]).items()
        }
        wanted, required = wanted_paths(params, there, ours_before)
        merged, ours, kept = merge(there, ours_before, wanted, required)
        record = {SEPARATOR.join(path): value for path, value in ours.items()}
        content_changed = merged != there
        changed = content_changed or ours != ours_before
        if content_changed and module.check_mode:
            try_out(text_of(merged))
        if changed and not module.check_mode:
            if content_changed:
                write(params["path"], text_of(merged))
            write(params["record"], text_of(record))
    except Refused as error:
        module.fail_json(msg=f"{params['path']}: {error}.")
    except (OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(msg=f"{params['path']} cannot be merged: {error}.")
    module.exit_json(
        changed=changed,
        restart=content_changed,
        kept=kept,
        diff={
            "before_header": params["path"],
            "after_header": params["path"],
            "before": text_of(there),
            "after": text_of(merged),
        },
    )


if __name__ == "__main__":
    main()
