"""Tell the processor which memory will be needed soon: an instruction that Python has no word for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

READ, SECOND_LEVEL_CACHE, DATA = 0, 2, 1  # the operands of llvm.prefetch


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for array[index] (of a one-dimensional array) in the second-level cache. Beyond its end nothing happens."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        instruction = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        )
        address = builder.bitcast(builder.gep(data, [args[1]]), pointer)
        builder.call(instruction, [address, number(READ), number(SECOND_LEVEL_CACHE), number(DATA)])
        return context.get_dummy_value()

    return types.void(array, index), generate
