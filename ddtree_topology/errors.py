# SPDX-License-Identifier: Apache-2.0
"""The one exception of this package."""


class TopologyError(Exception):
    """A plan is refused. The message is one sentence: what is wrong, and what to do about it."""
