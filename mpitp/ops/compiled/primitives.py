"""What the kernels' loops are made of: instructions that Numba has no name for, and the rows of a matrix.

Each of them becomes one instruction of the vector unit (or none at all), in the loop over whole vectors as in the loop
over the rest, so both round alike.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; all of one floating-point type."""
    if not (isinstance(a, types.Float) and a == b == c):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_value_type(a)
        function_type = ir.FunctionType(kind, [kind] * 3)
        function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fma.f{a.bitwidth}")
        return builder.call(function, arguments)

    return a(a, b, c), generate


@intrinsic
def row(typing_context: Any, x: Any, i: Any) -> Any:
    """x[i] of a matrix whose rows have no gaps, whatever lies between them; the compiler sees neighbours in memory."""
    if not (isinstance(x, types.Array) and x.ndim == 2 and isinstance(i, types.Integer)):
        return None
    result = types.Array(x.dtype, 1, "C", readonly=not x.mutable)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        matrix = context.make_array(x)(context, builder, arguments[0])
        stride = cgutils.unpack_tuple(builder, matrix.strides, 2)[0]
        columns = cgutils.unpack_tuple(builder, matrix.shape, 2)[1]
        index = context.cast(builder, arguments[1], i, types.intp)
        start = cgutils.pointer_add(builder, matrix.data, builder.mul(index, stride))
        made = context.make_array(result)(context, builder)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(x.dtype)))
        context.populate_array(
            made,
            data=builder.bitcast(start, made.data.type),
            shape=[columns],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return made._getvalue()

    return result(x, i), generate


@intrinsic
def bits(typing_context: Any, x: Any) -> Any:
    """The bits of a float as a signed integer of its width, or a float from such bits."""
    kinds = {types.float32: types.int32, types.float64: types.int64}
    kinds |= {integer: floating for floating, integer in kinds.items()}
    if x not in kinds:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return kinds[x](x), generate
