"""Views of memory at an address, for compiled functions: one instruction each, where numba's `carray` is compiled as a
function of its own for every type and shape."""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array


def view_of(dtype: Any) -> Callable[..., Any]:
    """Return a function `(address, shape)` for compiled code: `dtype` at an address as a contiguous array.

    `shape` is a number or a tuple of numbers. The array owns nothing: the memory must outlive it.
    """

    def view(_typing: Any, address: Any, shape: Any) -> Any:
        axes = shape.count if isinstance(shape, types.BaseTuple) else 1
        array = types.Array(dtype, axes, "C")
        lengths = types.UniTuple(types.intp, axes)

        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            made = make_array(array)(context, builder)
            data = builder.inttoptr(args[0], context.get_data_type(dtype).as_pointer())
            size = context.get_abi_sizeof(context.get_data_type(dtype))
            shapes = cgutils.unpack_tuple(builder, args[1], axes)
            strides: list[Any] = []
            stride = ir.Constant(ir.IntType(64), size)
            for length in reversed(shapes):
                strides.insert(0, stride)
                stride = builder.mul(stride, length)
            populate_array(made, data=data, shape=shapes, strides=strides, itemsize=size, meminfo=None)
            return made._getvalue()

        if axes == 1 and not isinstance(shape, types.BaseTuple):

            def generate_line(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return generate(context, builder, signature, (args[0], cgutils.pack_array(builder, [args[1]])))

            return array(types.int64, types.intp), generate_line
        return array(types.int64, lengths), generate

    return cast(Callable[..., Any], intrinsic(view))


int64_at, int32_at, int16_at = (view_of(kind) for kind in (types.int64, types.int32, types.int16))
uint64_at, uint32_at, uint8_at = (view_of(kind) for kind in (types.uint64, types.uint32, types.uint8))
float64_at, float32_at = (view_of(kind) for kind in (types.float64, types.float32))
