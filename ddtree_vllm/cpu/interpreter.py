# SPDX-License-Identifier: Apache-2.0
"""Takes two costs out of Triton's interpreter that an engine of small kernels pays on every launch.

Both are about Triton 3.8's `triton/runtime/interpreter.py`, and neither changes a result:

* At every launch, and at every call of a device function inside one, it walks the members of
  `triton.language` to put interpreted versions in their place, and takes them out again. In a process
  that interprets all its kernels they can stay.
* It checks every integer addition, subtraction and multiplication for overflow, in 64 bits. Compiled
  kernels do not; `TRITON_DEBUG=1` keeps the check.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any


def quicken() -> None:
    """Speed up the interpreter of this process. A second call changes nothing."""
    from triton.runtime import interpreter

    if getattr(interpreter, "_ddtree_quickened", False):
        return
    interpreter._ddtree_quickened = True
    if os.environ.get("TRITON_DEBUG") != "1":
        interpreter.interpreter_builder.options = _without_overflow_checks(
            interpreter.interpreter_builder.options
        )
    patch_language = interpreter._patch_lang
    patched: set[tuple[int, ...]] = set()

    def patch_once(fn: Any) -> _Kept:
        languages = tuple(
            id(value)
            for value in fn.__globals__.values()
            if isinstance(value, ModuleType) and value.__name__.startswith("triton.language")
        )
        if languages not in patched:
            patch_language(fn)
            patched.add(languages)
        return _Kept()

    interpreter._patch_lang = patch_once


class _Kept:
    """Stands for a set of patches that stays."""

    def restore(self) -> None:
        return None


def _without_overflow_checks(options: Any) -> Any:
    import dataclasses

    return dataclasses.replace(options, sanitize_overflow=False)
