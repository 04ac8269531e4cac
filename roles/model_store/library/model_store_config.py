#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module model_store_config: checks the settings of ddtree-models before they are written."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ddtree_models.errors import ModelsError
from ansible.module_utils.ddtree_models.wanted import config_from

DOCUMENTATION = r"""
module: model_store_config
short_description: Check which models a host is to hold
description:
  - Fails with one sentence that names the model and what is wrong with it.
  - Reads no file, asks no server and never reports a change.
requirements:
  - Python 3.9 on the host, and nothing else.
options:
  settings:
    description: What is to become C(models.json).
    type: dict
    required: true
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

ARGUMENTS = {"settings": {"type": "dict", "required": True}}


def main():
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    try:
        config = config_from(module.params["settings"])
    except ModelsError as error:
        module.fail_json(msg=f"model_store_models: {error}.")
    module.exit_json(changed=False, models=[model.name for model in config.models])


if __name__ == "__main__":
    main()
