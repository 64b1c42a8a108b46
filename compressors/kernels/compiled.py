"""How loops are compiled for CPUs.

What is here is compiled into the loops of other files, whose cached code does not notice a change of this one: change
those files too.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

compiled = numba.njit(cache=True, nogil=True)
reordered = numba.njit(cache=True, nogil=True, fastmath={"reassoc"})
dividing = numba.njit(cache=True, nogil=True, error_model="numpy")
"""For quotients: where a divisor is 0 they are infinite, or NaN, as torch's are; the check would not vectorise."""
CHUNK = 4096
"""Elements that a loop takes at a time, so that they are in the cache for the next."""


@intrinsic
def positive(typing_context: Any, values: Any, first: Any) -> Any:
    """A byte of the bits ``values[first + j] >= 0`` for j in 0..7, the highest first. No bounds are checked."""
    return types.uint8(values, first), lambda *call: _compared(*call, magnitudes=False)


@intrinsic
def large(typing_context: Any, values: Any, first: Any, threshold: Any) -> Any:
    """A byte of the bits ``abs(values[first + j]) >= threshold`` for j in 0..7, the highest first.

    `threshold` is not negative. No bounds are checked.
    """
    return types.uint8(values, first, values.dtype), lambda *call: _compared(*call, magnitudes=True)


def _compared(context: Any, builder: Any, signature: Any, arguments: Any, *, magnitudes: bool) -> Any:
    """One vector comparison, whose mask is the byte; a loop over its bits does not vectorise."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    number = context.get_value_type(signature.args[0].dtype)
    eight, order = ir.VectorType(number, 8), ir.VectorType(ir.IntType(32), 8)
    place = builder.bitcast(builder.gep(array.data, [arguments[1]]), eight.as_pointer())
    values = builder.load(place, align=context.get_abi_sizeof(number))
    zero = ir.Constant(eight, [0.0] * 8)
    if magnitudes:
        one = builder.insert_element(zero, arguments[2], ir.Constant(ir.IntType(32), 0))
        bound = builder.shuffle_vector(one, one, ir.Constant(order, [0] * 8))
        above = builder.fcmp_ordered(">=", values, bound)
        mask = builder.or_(above, builder.fcmp_ordered("<=", values, builder.fsub(zero, bound)))
    else:
        mask = builder.fcmp_ordered(">=", values, zero)
    reverse = ir.Constant(order, list(range(7, -1, -1)))
    return builder.bitcast(builder.shuffle_vector(mask, mask, reverse), ir.IntType(8))
