# SPDX-License-Identifier: Apache-2.0
"""What ends a command with a sentence."""


class ModelsError(Exception):
    """A model cannot be fetched, or is not what it should be; says what to do."""


class InterruptedTransfer(ModelsError):
    """The connection ended early; what came is kept, and asking again continues there."""
