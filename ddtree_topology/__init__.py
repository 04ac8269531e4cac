# SPDX-License-Identifier: Apache-2.0
"""Which GPUs of a host serve together: reads the topology, plans groups, proves that they talk.

Runs on any Python from 3.9 and imports nothing but the standard library, because hosts have nothing
else. The program `ddtree-topology`, the Ansible module `gpu_topology` and the image share this
source. `planner.plan` is the entry point; `matrix`, `inventory` and `host` feed it, `probe` checks
what it assumed, `picture` draws it.
"""
