#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module model_store_config: checks what ddtree-models is to fetch, before anything is written."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ddtree_models.errors import ModelsError
from ansible.module_utils.ddtree_models.fetch import reach
from ansible.module_utils.ddtree_models.sources import source_of
from ansible.module_utils.ddtree_models.store import Store
from ansible.module_utils.ddtree_models.wanted import config_from

DOCUMENTATION = r"""
module: model_store_config
short_description: Check which models a host is to hold
description:
  - Fails with one sentence that names the model and what is wrong with it.
  - With O(ask) it asks the origin of each model that is not here yet whether the model can be had.
  - Never reports a change.
requirements:
  - Python 3.9 on the host, and nothing else.
options:
  settings:
    description: What is to become C(models.json).
    type: dict
    required: true
  ask:
    description: Ask the origins of models that are not here yet.
    type: bool
    default: false
  token:
    description: For the hub.
    type: str
    default: ""
  token_file:
    description:
      - File that holds it. One that systemd-creds encrypted is not read; then no hub is asked.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Changes nothing.
  diff_mode:
    support: none
    description: Changes nothing.
author:
  - The ddtree-vllm authors
"""

EXAMPLES = r"""
- name: Check what each model is
  model_store_config:
    settings:
      folder: /srv/ddtree/models
      models:
        - name: Qwen3.6-27B
          repo: Qwen/Qwen3.6-27B
          revision: 6a9e13bd6fc8f0983b9b99948120bc37f49c13e9
"""

RETURN = r"""
models:
  description: Names of the models.
  returned: success
  type: list
  elements: str
"""

ARGUMENTS = {
    "settings": {"type": "dict", "required": True},
    "ask": {"type": "bool", "default": False},
    "token": {"type": "str", "default": "", "no_log": True},
    "token_file": {"type": "str", "default": "", "no_log": False},
}


def ask(config, token, token_file):
    """Raises ModelsError for the first model that cannot be had."""
    encrypted = token_file.endswith(".cred")
    if token_file and not encrypted:
        try:
            with open(token_file, encoding="utf-8") as file:
                token = file.read().strip()
        except OSError as error:
            raise ModelsError(
                f"model_store_token_file, {token_file}, cannot be read ({error.strerror})"
            ) from None
    store = Store(config)
    for model in config.models:
        if not (encrypted and model.repo):
            reach(store, model, source_of(model, config, token))


def main():
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    try:
        config = config_from(module.params["settings"])
        if module.params["ask"]:
            ask(config, module.params["token"], module.params["token_file"])
    except ModelsError as error:
        module.fail_json(msg=f"model_store_models: {error}.")
    module.exit_json(changed=False, models=[model.name for model in config.models])


if __name__ == "__main__":
    main()
