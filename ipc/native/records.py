"""Records: memory with named fields, declared once for Python, numpy, compiled functions and C.

    @record
    class EntryList(Record):
        count: int
        numbers: Array[int]

    entry_list_at = record_at(EntryList)   # in a compiled function: entry_list_at(address).count += 1

In a compiled function a field is one load or store at a fixed offset; nothing is counted or copied, and a record or an
array is the address of memory that somebody else owns. In Python a record is a ctypes structure, which owns the arrays
that were assigned to its fields, and `Entry.dtype` is numpy's. A field is

    int, float, bool         int64, float64, a byte
    U64, U32, U8             such integers, which are int64 where they are read
    F32                      float32
    Shared, SharedU32        an integer that another process or a device reads or writes: loaded with acquire, stored
                             with release
    another record           inside this one
    Annotated[Array[x], n]   an array of n elements inside the record
    Array[x]                 the address of an array elsewhere, 0 for none
"""

import ctypes
from collections.abc import Callable
from operator import getitem, setitem
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeVar,
    cast,
    get_origin,
    get_type_hints,
)
from typing import get_args as arguments_of

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core.datamodel.models import OpaqueModel
from numba.core.datamodel.registry import register_default
from numba.core.imputils import lower_builtin, lower_getattr_generic, lower_setattr_generic
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import intrinsic

from ipc.native.emitted import emits

T = TypeVar("T")
_BYTES = ir.IntType(8).as_pointer()


class Array(Protocol[T]):
    """An array of unknown length. An index is not checked."""

    def __getitem__(self, index: int, /) -> T: ...

    def __setitem__(self, index: int, value: T, /) -> None: ...


class _Word(NamedTuple):
    stored: Any  # numba's type in memory
    c: Any
    shared: bool = False


U64 = Annotated[int, _Word(types.uint64, ctypes.c_uint64)]
U32 = Annotated[int, _Word(types.uint32, ctypes.c_uint32)]
U8 = Annotated[int, _Word(types.uint8, ctypes.c_uint8)]
Shared = Annotated[int, _Word(types.int64, ctypes.c_int64, shared=True)]
F32 = Annotated[float, _Word(types.float32, ctypes.c_float)]
SharedU32 = Annotated[int, _Word(types.uint32, ctypes.c_uint32, shared=True)]
_WORDS = {
    int: _Word(types.int64, ctypes.c_int64),
    float: _Word(types.float64, ctypes.c_double),
    bool: _Word(types.boolean, ctypes.c_bool),
}

if TYPE_CHECKING:

    class Record:
        """Base of all records, whose fields are 0 where no value is given."""

        dtype: ClassVar[np.dtype[np.void]]

        def __init__(self, **fields: Any) -> None: ...

else:

    class Record(ctypes.Structure):
        """Base of all records, whose fields are 0 where no value is given."""


R = TypeVar("R", bound=Record)


class _Field(NamedTuple):
    offset: int
    kind: Any  # numba's type of the field, or of what it holds or points to
    inline: bool  # a record or an array inside the record
    shared: bool


# ---- declaration


def record(declared: type[R]) -> type[R]:
    """Lay out a record's fields in the order of their declaration."""
    kinds = {name: _kind_of(hint) for name, hint in get_type_hints(declared, include_extras=True).items()}
    kinds.pop("dtype", None)
    made: Any = declared
    made._fields_ = [(name, c) for name, (c, *_) in kinds.items()]
    made.fields = {
        name: _Field(getattr(made, name).offset, kind, inline, shared)
        for name, (_, kind, inline, shared) in kinds.items()
    }
    made.dtype = np.dtype(
        {
            "names": list(kinds),
            "formats": [_dtype_of(c) for c, *_ in kinds.values()],
            "offsets": [field.offset for field in made.fields.values()],
            "itemsize": ctypes.sizeof(made),
        }
    )
    return declared


def _kind_of(hint: Any) -> tuple[Any, Any, bool, bool]:
    """Return a field's C type, numba's type of its value, and whether it is inside the record, and shared."""
    if get_origin(hint) is Annotated:
        held, extra = arguments_of(hint)
        if isinstance(extra, _Word):
            return extra.c, extra.stored, False, extra.shared
        element, kind, _, shared = _kind_of(arguments_of(held)[0])
        return element * extra, ArrayType(kind, shared), True, False
    if get_origin(hint) is Array:
        element, kind, _, shared = _kind_of(arguments_of(hint)[0])
        return ctypes.POINTER(element), ArrayType(kind, shared), False, False
    if issubclass(hint, Record):
        return hint, RecordType(hint), True, False
    return _WORDS[hint].c, _WORDS[hint].stored, False, False


def _dtype_of(c: Any) -> Any:
    if hasattr(c, "_length_"):
        return np.dtype((_dtype_of(c._type_), c._length_))
    return c.dtype if hasattr(c, "dtype") else np.dtype(np.int64 if hasattr(c, "contents") else c)


# ---- in Python


def new_array(kind: type[T], count: int) -> Array[T]:
    """Allocate `count` elements, which are zeroed."""
    return cast(Array[T], (_kind_of(kind)[0] * count)())


def array_over(kind: type[T], values: npt.NDArray[Any]) -> Array[T]:
    """Return the memory of a contiguous numpy array as an array, which keeps it."""
    made = _kind_of(kind)[0]
    return cast(Array[T], (made * (values.nbytes // ctypes.sizeof(made))).from_buffer(values))


def array_from(kind: type[T], address: int) -> Array[T]:
    """Return the array at an address, whose owner must be kept while it is used."""
    return cast(Array[T], ctypes.cast(address, ctypes.POINTER(_kind_of(kind)[0])))


def numpy_view(array: Array[Any], count: int) -> npt.NDArray[Any]:
    """Return numpy's view of an array's first elements. Its owner must be kept while the view is used."""
    made: Any = array
    held = (made._type_ * count).from_address(ctypes.cast(made, ctypes.c_void_p).value)
    return np.frombuffer(held, _dtype_of(made._type_))


def address_of(held: Record | Array[Any]) -> int:
    """Return the address of a record or of an array from `new_array`, which must be kept while it is used."""
    return ctypes.addressof(cast(ctypes.Structure, held))


def copy_of(held: R) -> R:
    made: Any = type(held)
    return cast(R, made.from_buffer_copy(held))


def offset_of(kind: type[Record], field: str) -> int:
    made: Any = kind
    return int(made.fields[field].offset)


def sizeof(kind: type[Record]) -> int:
    """Return the bytes of a record."""
    return kind.dtype.itemsize


# ---- in compiled functions


class RecordType(types.Type):  # type: ignore[misc]
    """numba's type of a record."""

    def __init__(self, declared: Any) -> None:
        self.declared = declared
        super().__init__(name=f"record({declared.__module__}.{declared.__qualname__})")


class ArrayType(types.Type):  # type: ignore[misc]
    """numba's type of an `Array`."""

    def __init__(self, element: Any, shared: bool) -> None:
        self.element, self.shared = element, shared
        super().__init__(name=f"array of {'shared ' if shared else ''}{element}")


for _kind in (RecordType, ArrayType):
    register_default(_kind)(OpaqueModel)


def numba_type(kind: Any) -> Any:
    """Return the type with which compiled code passes a record, or an `Array[x]`."""
    return _kind_of(kind)[1]


def record_at(kind: type[R]) -> Callable[[int], R]:
    """Return a function for compiled code: the record at an address."""
    return cast(Callable[[int], R], emits(RecordType(kind), types.int64)(_pointer))


def array_at(kind: type[T]) -> Callable[[int], Array[T]]:
    """Return a function for compiled code: the array at an address."""
    return cast(Callable[[int], Array[T]], emits(numba_type(Array[kind]), types.int64)(_pointer))  # type: ignore[valid-type]


def _address(_typing: Any, held: Any) -> Any:
    if isinstance(held, RecordType | ArrayType):
        word = ir.IntType(64)
        return types.int64(held), lambda _context, builder, _signature, args: builder.ptrtoint(args[0], word)
    return None


address = cast(Callable[[Record | Array[Any]], int], intrinsic(_address))
"""The address of a record or an array, in compiled code."""


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTES)


def _bytes_of(kind: Any) -> int:
    if isinstance(kind, RecordType):
        return ctypes.sizeof(kind.declared)
    if isinstance(kind, ArrayType):
        return 8
    return 1 if kind == types.boolean else int(kind.bitwidth) // 8


def _seen(kind: Any) -> Any:
    return types.int64 if isinstance(kind, types.Integer) else kind


def _load(context: Any, builder: Any, kind: Any, pointer: Any, shared: bool = False) -> Any:
    if isinstance(kind, RecordType):
        return pointer
    pointer = builder.bitcast(pointer, context.get_data_type(kind).as_pointer())
    if shared:
        value = builder.load_atomic(pointer, "acquire", _bytes_of(kind), typ=pointer.type.pointee)
    else:
        value = context.unpack_value(builder, kind, pointer)
    return context.cast(builder, value, kind, _seen(kind))


def _store(context: Any, builder: Any, kind: Any, pointer: Any, value: Any, shared: bool = False) -> None:
    pointer = builder.bitcast(pointer, context.get_data_type(kind).as_pointer())
    value = context.cast(builder, value, _seen(kind), kind)
    if shared:
        builder.store_atomic(value, pointer, "release", _bytes_of(kind))
    else:
        context.pack_value(builder, kind, value, pointer)


@infer_getattr
class _FieldTypes(AttributeTemplate):  # type: ignore[misc]
    key = RecordType

    def generic_resolve(self, typ: Any, name: str) -> Any:
        """numba's hook for the type of a field."""
        field = typ.declared.fields.get(name)
        return None if field is None else _seen(field.kind)


def _field(builder: Any, kind: Any, record: Any, name: str) -> tuple[_Field, Any]:
    field = kind.declared.fields[name]
    return field, builder.gep(record, [ir.Constant(ir.IntType(64), field.offset)], inbounds=True)


@lower_getattr_generic(RecordType)  # type: ignore[untyped-decorator]
def _get(context: Any, builder: Any, kind: Any, record: Any, name: str) -> Any:
    field, pointer = _field(builder, kind, record, name)
    return pointer if field.inline else _load(context, builder, field.kind, pointer, field.shared)


@lower_setattr_generic(RecordType)  # type: ignore[untyped-decorator]
def _set(context: Any, builder: Any, sig: Any, args: Any, name: str) -> None:
    field, pointer = _field(builder, sig.args[0], args[0], name)
    if field.inline:
        raise TypeError(f"{name} is inside the record and cannot be assigned")
    _store(context, builder, field.kind, pointer, args[1], field.shared)


@infer_global(getitem)
class _ElementTypes(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, _keywords: Any) -> Any:
        """numba's hook for the type of an element."""
        if isinstance(args[0], ArrayType):
            return signature(_seen(args[0].element), args[0], types.intp)
        return None


@infer_global(setitem)
class _ElementStores(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, _keywords: Any) -> Any:
        """numba's hook for the type of a value that becomes an element."""
        if isinstance(args[0], ArrayType) and not isinstance(args[0].element, RecordType):
            return signature(types.void, args[0], types.intp, _seen(args[0].element))
        return None


def _element(builder: Any, array: Any, index: Any, kind: Any) -> Any:
    offset = builder.mul(index, ir.Constant(ir.IntType(64), _bytes_of(kind)), flags=["nsw"])
    return builder.gep(array, [offset], inbounds=True)


@lower_builtin(getitem, ArrayType, types.Integer)  # type: ignore[untyped-decorator]
def _get_element(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    kind, shared = sig.args[0].element, sig.args[0].shared
    return _load(context, builder, kind, _element(builder, args[0], args[1], kind), shared)


@infer_global(bool)
class _Truth(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, _keywords: Any) -> Any:
        """numba's hook for the type of an array in a condition."""
        return signature(types.boolean, *args) if isinstance(args[0], ArrayType) else None


@lower_builtin(bool, ArrayType)  # type: ignore[untyped-decorator]
def _is_there(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
    return builder.icmp_unsigned("!=", args[0], ir.Constant(_BYTES, None))


@lower_builtin(setitem, ArrayType, types.Integer, types.Any)  # type: ignore[untyped-decorator]
def _set_element(context: Any, builder: Any, sig: Any, args: Any) -> None:
    kind, shared = sig.args[0].element, sig.args[0].shared
    _store(context, builder, kind, _element(builder, args[0], args[1], kind), args[2], shared)
