# SPDX-License-Identifier: Apache-2.0
"""Takes costs out of Triton's interpreter that an engine of small kernels pays on every launch.

All are about Triton 3.8's `triton/runtime/interpreter.py` and the types it works with, and none
changes a result:

* At every launch, and at every call of a device function inside one, it walks the members of
  `triton.language` to put interpreted versions in their place, and takes them out again. In a
  process that interprets all its kernels they can stay.
* It checks every integer addition, subtraction and multiplication for overflow, in 64 bits.
  Compiled kernels do not; `TRITON_DEBUG=1` keeps the check.
* Every operation makes a type and a tensor anew, names and shapes included, and builds a table of
  NumPy's types to look one up. These are remembered by what they are made from.
* Every operation goes through all rules of promotion and broadcasting. Operands of one type and one
  shape need none, and a plain number beside a tensor takes the tensor's type.
* Every intermediate value's width is checked against its type. `TRITON_DEBUG=1` keeps that check too.
"""

from __future__ import annotations

import builtins
import dataclasses
import math
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
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
        interpreter.TensorHandle.__post_init__ = lambda self: None
    _shorten_calls(interpreter)
    _patch_language_once(interpreter)
    _remember_numpy_types(interpreter)
    _remember_block_types()
    _remember_shapes()
    _shorten_promotion()


class _Kept:
    """Stands for a set of patches that stays."""

    def restore(self) -> None:
        return None


def _patch_language_once(interpreter: Any) -> None:
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


def _remember_numpy_types(interpreter: Any) -> None:
    import triton.language as tl

    look_up = interpreter._get_np_dtype
    pointer = look_up(tl.pointer_type(tl.int8))
    known: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(element, tl.pointer_type):
            return pointer
        found = known.get(element.name)
        if found is None:
            found = known[element.name] = look_up(element)
        return found

    interpreter._get_np_dtype = numpy_type


def _remember_block_types() -> None:
    import triton.language as tl

    block_type, constexpr = tl.block_type, tl.constexpr
    make = block_type.__init__
    known: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if isinstance(shape, constexpr):
            make(self, element_ty, shape)
            return
        sizes = builtins.tuple(s.value if isinstance(s, constexpr) else s for s in shape)
        found = known.get((element_ty.name, sizes))
        if found is None:
            make(self, element_ty, shape)
            known[(element_ty.name, sizes)] = (self.shape, self.numel, self.name)
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = found

    block_type.__init__ = init


def _remember_shapes() -> None:
    import triton.language as tl

    def shape_and_size(sizes: Any) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(s) for s in sizes]), tl.constexpr(math.prod(sizes))

    scalar = shape_and_size(())
    # By the identity of a block type's shape, which `_remember_block_types` shares among equal
    # types: comparing Triton's tuples costs more than making them. Shapes are held, so that an
    # identity is never used twice.
    known: dict[int, tuple[Any, Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        if type.is_block():
            found = known.get(id(type.shape))
            if found is None:
                found = known[id(type.shape)] = (*shape_and_size(type.shape), type.shape)
            self.shape, self.numel, _ = found
            self.dtype = type.element_ty
        else:
            self.shape, self.numel = scalar
            self.dtype = type.scalar

    tl.tensor.__init__ = init


def _shorten_calls(interpreter: Any) -> None:
    """One frame instead of two around a function of the language, and no dictionary built anew."""
    import triton.language as tl

    semantic = interpreter.interpreter_semantic
    is_builtin = tl.core.is_builtin

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # What `tl.core.builtin` wraps: it only asks for `_semantic`, which is given here.
        function = getattr(member, "__wrapped__", member) if is_builtin(member) else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def _shorten_promotion() -> None:
    import triton.language as tl
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    constexpr, tensor = tl.constexpr, tl.tensor
    unwrap, equal = core._unwrap_if_constexpr, tl.dtype.__eq__
    nested = (list, builtins.tuple, tl.tuple)

    def unwrap_if_constexpr(o: Any) -> Any:
        if isinstance(o, constexpr):
            return o.value
        return unwrap(o) if isinstance(o, nested) else o

    core._unwrap_if_constexpr = unwrap_if_constexpr
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)

    promote, broadcast = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
    )
    integers = (tl.int32, tl.int64)

    def binary_op_type_checking_impl(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if type(lhs) is tensor and arithmetic_check and not div_or_mod:
            element = lhs.type.scalar
            if type(rhs) is tensor:
                other = rhs.type.scalar
                if element.is_ptr():
                    if allow_lhs_ptr and other in integers:
                        return self.broadcast_impl_value(lhs, rhs)
                elif other is element:
                    return self.broadcast_impl_value(lhs, rhs)
            elif (type(rhs) is int and element in integers and -(2**31) <= rhs < 2**31) or (
                type(rhs) is float and element is tl.float32
            ):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, element))
        return promote(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left.is_block():
            # Equal block types share their shape: `_remember_block_types`.
            if right.is_block() and left.shape is right.shape:
                return lhs, rhs
        elif not right.is_block():
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = binary_op_type_checking_impl
    TritonSemantic.broadcast_impl_value = broadcast_impl_value
