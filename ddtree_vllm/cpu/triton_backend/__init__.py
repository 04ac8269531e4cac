# SPDX-License-Identifier: Apache-2.0
"""An idle Triton backend named "cpu": active when nothing else is, compiles nothing."""
