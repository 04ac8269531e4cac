# SPDX-License-Identifier: Apache-2.0


class HealthError(Exception):
    """The program was asked for something it cannot do; the message is one sentence."""
