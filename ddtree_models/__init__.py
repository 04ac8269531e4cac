# SPDX-License-Identifier: Apache-2.0
"""Brings checkpoints onto a host and proves that they are what was asked for.

Needs nothing but Python 3.9: `ddtree-models` runs before anything else is installed.
"""
