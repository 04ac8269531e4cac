# SPDX-License-Identifier: Apache-2.0
"""Device functions that verification and the sequential form share: the gates, and the solve.

The solve is (I + A) U = B with A strictly lower triangular by *depth*: A_ij is nonzero only where
row j is a strict ancestor of row i. A is nilpotent, but the product (I - A)(I + A^2)(I + A^4)...
that follows from it is unstable: along a path of similar keys the powers of A grow like binomial
coefficients while the inverse stays bounded by 1, and float32 loses three digits at depth 15.
Substitution does not, and neither does inverting by blocks, with depth levels as the index.
"""

import triton
import triton.language as tl

# `tl.reduce(x, axis, sum_combine)` is what `tl.sum(x, axis)` compiles to. The kernels write the
# former because `tl.sum` is a nested jit function, each call of which costs the interpreter 0.3 ms.
from triton.language.standard import _elementwise_max as max_combine
from triton.language.standard import _sum_combine as sum_combine

__all__ = ["gates", "max_combine", "solve_unit_lower", "sum_combine"]


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Log-decay g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), float32.

    softplus is linear above 20, like torch's. log(1 + y) is corrected for the rounding of 1 + y
    (Goldberg 1991, theorem 4): without it slow decays lose all their digits.
    """
    x = a + dt_bias
    y = tl.exp(tl.minimum(x, 20.0))
    one_plus = 1.0 + y
    rounded = one_plus - 1.0
    log1p = tl.where(rounded == 0.0, y, tl.log(one_plus) * (y / rounded))
    g = -tl.exp(a_log) * tl.where(x > 20.0, x, log1p)
    return g, 1.0 / (1.0 + tl.exp(-b))


@triton.jit
def solve_unit_lower(a, b, depth, LOG_GROUP: tl.constexpr, PRECISION: tl.constexpr):
    """U with (I + A) U = B.

    By substitution over depth, U <- B - A U: after m rounds the rows of depth <= m are final, made
    from rows that were final before them. With LOG_GROUP > 0 a round advances by a group of
    2^LOG_GROUP levels instead of one: T = I - N, the inverse within the groups, starts from groups
    of two levels, where N is A, and doubles (with L the part of A that leads from the lower half of
    a group to its upper half, the inverse of the whole is T - T L T); then U <- T B - (T A') U,
    where A' leads from group to group.

    Args:
        a: [n, n] float32. Its diagonal is ignored; elsewhere it must be 0 where row j is not an
            ancestor of row i.
        b: [n, m] float32.
        depth: [n] int32.
    """
    # For an ancestor j of i the highest set bit tells in which doubling the pair meets.
    level = depth[:, None] ^ depth[None, :]
    first = b
    between = tl.where(level >= 2**LOG_GROUP, a, 0.0)
    if LOG_GROUP > 0:
        # N, not T, whose small entries would be rounded against the 1.
        inner = tl.where(level == 1, a, 0.0)
        for s in tl.static_range(1, LOG_GROUP):
            lower = tl.where((level >> s) == 1, a, 0.0)
            lower -= tl.dot(inner, lower, input_precision=PRECISION)
            inner += lower - tl.dot(lower, inner, input_precision=PRECISION)
        first = b - tl.dot(inner, b, input_precision=PRECISION)
        between -= tl.dot(inner, between, input_precision=PRECISION)
    u = first
    for _ in range(tl.reduce(depth, 0, max_combine) >> LOG_GROUP):
        u = first - tl.dot(between, u, input_precision=PRECISION)
    return u
