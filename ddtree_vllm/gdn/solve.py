# SPDX-License-Identifier: Apache-2.0
"""Device functions that verification and the sequential form share: the gates, and the inverse.

The system is (I + A) U = B with A strictly lower triangular: A_ij is nonzero only where row j is a
strict ancestor of row i, and parents come first. A is nilpotent, but the product
(I - A)(I + A^2)(I + A^4)... that follows from it is unstable: along a path of similar keys the
powers of A grow like binomial coefficients while the inverse stays bounded by 1, and float32 loses
three digits at depth 15. Inverting by blocks of rows does not: the inverse of a block is that of
the same recurrence with the block's keys alone, so it is bounded too.
"""

import triton
import triton.language as tl

# `tl.reduce(x, axis, sum_combine)` is what `tl.sum(x, axis)` compiles to. The kernels write the
# former because `tl.sum` is a nested jit function, each call of which costs the interpreter 0.3 ms.
from triton.language.standard import _sum_combine as sum_combine

__all__ = [
    "exact_dot",
    "invert_blocks",
    "invert_unit_lower",
    "log_decay",
    "sum_combine",
    "update_rate",
]


@triton.jit
def log_decay(a, a_log, dt_bias):
    """g = -exp(a_log) softplus(a + dt_bias), float32.

    softplus is linear above 20, like torch's. log(1 + y) is corrected for the rounding of 1 + y
    (Goldberg 1991, theorem 4): without it slow decays lose all their digits.
    """
    x = a + dt_bias
    y = tl.exp(tl.minimum(x, 20.0))
    one_plus = 1.0 + y
    rounded = one_plus - 1.0
    log1p = tl.where(rounded == 0.0, y, tl.log(one_plus) * (y / rounded))
    return -tl.exp(a_log) * tl.where(x > 20.0, x, log1p)


@triton.jit
def update_rate(b):
    """beta = sigmoid(b)."""
    return 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def exact_dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b of float32 matrices, or a b where `acc` is None, see `launch.default_precision`.

    Triton's own "tf32x3" splits a factor anew in every warp that reads it and looks for NaNs in between:
    half of all instructions of what is built on it. The split is the same: the low term takes what
    the high one, rounded to the 11 bits that the tensor cores read, leaves of 24.
    """
    if PRECISION == "tf32x3":
        a_high = ((a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        b_high = ((b.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        acc = tl.dot(a - a_high, b_high, acc, input_precision="tf32")
        acc = tl.dot(a_high, b - b_high, acc, input_precision="tf32")
        return tl.dot(a_high, b_high, acc, input_precision="tf32")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def invert_unit_lower(a, level, BITS: tl.constexpr, PRECISION: tl.constexpr):
    """N with (I + A)^-1 = I - N.

    Blocks of rows double: within pairs of rows N is A; with L the part of A that leads from the
    upper half of a block to its lower half, the inverse T of the whole is T - T L T.

    N, not the inverse, whose small entries would be rounded against the 1.

    Args:
        a: [..., n, n] float32, 0 above the diagonal; the diagonal is ignored.
        level: i ^ j of the local rows i and j, below 2^BITS; 2^BITS or more where a pair of rows
            belongs to different systems.
    """
    # The highest bit in which two rows differ tells in which doubling they meet.
    inner = tl.where(level == 1, a, 0.0)
    for s in tl.static_range(1, BITS):
        lower = tl.where((level >> s) == 1, a, 0.0)
        lower = exact_dot(-inner, lower, lower, PRECISION)
        inner += exact_dot(-lower, inner, lower, PRECISION)
    return inner


@triton.jit
def invert_blocks(at, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Overwrites A with N in memory, where A is block-diagonal with blocks of BLOCK rows.

    Products of all rows at once cost a program about 2 us each on an H200. So up to 16 rows all
    blocks are one batch of small products; from there on only L is read and written.

    Args:
        at: pointer to [SIZE, SIZE] float32, rows contiguous, which no other program touches.
    """
    first = (tl.arange(0, SIZE // 16) * (16 * SIZE + 16))[:, None, None]
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    own = at + (first + i * SIZE + j)
    tl.store(own, invert_unit_lower(tl.load(own), i ^ j, 4, PRECISION))
    if BLOCK > 16:
        _double_blocks(at, SIZE, 16, PRECISION)
    if BLOCK > 32:
        _double_blocks(at, SIZE, 32, PRECISION)


@triton.jit
def _double_blocks(at, SIZE: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Makes N of blocks of 2 HALF rows from that of blocks of HALF rows."""
    # What other threads wrote is read next.
    tl.debug_barrier()
    i = tl.arange(0, HALF)
    if SIZE == 2 * HALF:
        # One block: as a batch of one all warps would make all of each product.
        upper = at + (i[:, None] * SIZE + i[None, :])
    else:
        block = tl.arange(0, SIZE // (2 * HALF))[:, None, None] * (2 * HALF * (SIZE + 1))
        upper = at + (block + i[None, :, None] * SIZE + i[None, None, :])
    lower = tl.load(upper + HALF * SIZE)
    t = tl.load(upper + HALF * (SIZE + 1))
    lower = exact_dot(-t, lower, lower, PRECISION)
    lower = exact_dot(-lower, tl.load(upper), lower, PRECISION)
    tl.store(upper + HALF * SIZE, lower)
