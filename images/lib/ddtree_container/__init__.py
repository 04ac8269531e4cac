# SPDX-License-Identifier: Apache-2.0
"""The image's entry point: settings from variables, checks before the start, PID 1 while it runs.

Standard library alone: it also has to speak when the installed packages are broken.
"""


class ContainerError(Exception):
    """What was asked for cannot be run; the message is a sentence that says what to do."""
