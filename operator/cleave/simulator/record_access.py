# ruff: noqa: ANN401, ARG001, ARG005 - values of numba's code generator are untyped
"""Access to the rows of a simulation's state. Only compiled code calls these functions.

What is hard: numba passes an array as seven values and counts its references atomically at each
call, which costs more than the rest of a simulation, in run time and in compile time. So compiled
functions pass one pointer, the STATE record, which holds the addresses of all arrays. The functions
below are placeholders that `compiler` replaces by a few machine instructions.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cleave.policy.dispatch import find_least
from cleave.simulator import records
from cleave.simulator.records import Record, State


def get_request(state: State, row: int) -> Record:
    """The REQUEST in that row."""
    raise NotImplementedError


def get_instance(state: State, row: int) -> Record:
    """The INSTANCE in that row."""
    raise NotImplementedError


def get_slot(state: State, row: int) -> Record:
    """The SLOT in that row."""
    raise NotImplementedError


def get_queue(state: State, row: int) -> Record:
    """The QUEUE in that row."""
    raise NotImplementedError


def get_pull(state: State, row: int) -> Record:
    """The PULL in that row of the heap of transfers in progress."""
    raise NotImplementedError


def get_heap_key(state: State, row: int) -> Record:
    """The key in that row of the members' heaps."""
    raise NotImplementedError


def get_phase(state: State, row: int) -> Record:
    """The number of members in that row of `phases`, see `kv_blocks`."""
    raise NotImplementedError


def get_stage(state: State, row: int) -> Record:
    """When the pipeline stage in that row is free, in ms."""
    raise NotImplementedError


def get_node(state: State, row: int) -> Record:
    """The instance at that node of the tournament tree."""
    raise NotImplementedError


def get_score(state: State, row: int) -> Record:
    """The score in that row."""
    raise NotImplementedError


def get_points(state: State, start: int, count: int) -> Any:
    """`count` points of the latency models, from `start` on."""
    raise NotImplementedError


def get_scores(state: State, start: int, count: int) -> Any:
    """`count` of the scores that dispatch compares; those of one column are contiguous."""
    raise NotImplementedError


def read_amounts(state: State, start: int, count: int) -> NDArray[np.float64]:
    """`count` floats of the scratch memory."""
    raise NotImplementedError


def get_scratch(state: State, start: int, count: int) -> NDArray[np.int64]:
    """`count` integers of the scratch memory."""
    raise NotImplementedError


def get_members(state: State, start: int, count: int) -> NDArray[np.void]:
    """`count` MEMBER records, the input of the role-flipping policy."""
    raise NotImplementedError


def get_pressure_history(state: State, start: int, count: int) -> NDArray[np.void]:
    """`count` PRESSURE_HISTORY records: since when each side is under pressure or relieved."""
    raise NotImplementedError


def build_intrinsics() -> dict[Any, Any]:
    """Placeholder -> the numba intrinsic that replaces it; also gives arrays their methods."""
    import numba
    from numba import types

    _add_methods()
    return {
        get_request: _build_row_intrinsic("requests", records.REQUEST),
        get_instance: _build_row_intrinsic("instances", records.INSTANCE),
        get_slot: _build_row_intrinsic("slots", records.SLOT),
        get_queue: _build_row_intrinsic("queues", records.QUEUE),
        get_pull: _build_row_intrinsic("pulls", records.PULL),
        get_heap_key: _build_row_intrinsic("heaps", records.NUMBER),
        get_phase: _build_row_intrinsic("phases", records.NUMBER),
        get_stage: _build_row_intrinsic("stages", records.TIME),
        get_node: _build_row_intrinsic("tree", records.NUMBER),
        get_score: _build_row_intrinsic("scores", records.TIME),
        get_points: _build_slice_intrinsic("tables", types.float64),
        get_scores: _build_slice_intrinsic("scores", types.float64),
        read_amounts: _build_slice_intrinsic("scratch", types.float64),
        get_scratch: _build_slice_intrinsic("scratch", types.int64),
        get_members: _build_slice_intrinsic(
            "members", numba.from_dtype(records.MEMBER), records.MEMBER.itemsize
        ),
        get_pressure_history: _build_slice_intrinsic(
            "pressure_history",
            numba.from_dtype(records.PRESSURE_HISTORY),
            records.PRESSURE_HISTORY.itemsize,
        ),
    }


@functools.cache
def _add_methods() -> None:
    """Give compiled arrays the methods of `policy.dispatch.ScoreColumn`."""
    from numba import types
    from numba.extending import overload_method

    overload_method(types.Array, "get_score")(
        lambda scores, slot: lambda scores, slot: scores[slot]
    )
    overload_method(types.Array, "find_least", strict=False)(lambda scores: find_least)


def _build_row_intrinsic(name: str, dtype: Any) -> Any:
    """(state, row) -> the record in that row of the array whose address is in field `name`."""
    import numba
    from numba import types
    from numba.extending import intrinsic

    record = numba.from_dtype(dtype)

    @intrinsic
    def row_at(typing: Any, state: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            target = context.get_value_type(signature.return_type)
            pointer, index = values
            return _emit_pointer(context, builder, pointer, index, name, dtype.itemsize, target)

        return record(state, types.int64), generate

    return row_at


def _build_slice_intrinsic(name: str, item: Any, itemsize: int = 8) -> Any:
    """(state, start, count) -> a view of those items of the array whose address is in `name`."""
    from numba import types
    from numba.extending import intrinsic
    from numba.np.arrayobj import make_array, populate_array

    array_type = types.Array(item, 1, "C")

    @intrinsic
    def slice_at(typing: Any, state: Any, start: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer, start, count = values
            size = context.get_constant(types.intp, itemsize)
            target = context.get_data_type(item).as_pointer()
            array = make_array(array_type)(context, builder)
            data = _emit_pointer(context, builder, pointer, start, name, itemsize, target)
            populate_array(array, data, [count], [size], size, None)
            return array._getvalue()

        return array_type(state, types.int64, types.int64), generate

    return slice_at


def _emit_pointer(
    context: Any, builder: Any, state: Any, row: Any, name: str, itemsize: int, target: Any
) -> Any:
    """Emit code for a pointer: the address in field `name` of `state`, plus `row` items."""
    from numba import types

    word = context.get_value_type(types.int64)
    fields = records.STATE.fields
    assert fields
    field = builder.add(builder.ptrtoint(state, word), word(fields[name][1]))
    base = builder.load(builder.inttoptr(field, word.as_pointer()))
    return builder.inttoptr(builder.add(base, builder.mul(row, word(itemsize))), target)
