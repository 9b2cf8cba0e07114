# ruff: noqa: ANN401, ARG001, ARG005 - values of numba's code generator are untyped
"""Access to the rows of a simulation's state. Only compiled code calls these functions.

What is hard: numba passes an array as seven values and counts its references atomically at each
call, which costs more than the rest of a simulation, in run time and in compile time. So compiled
functions pass one pointer, the STATE record, which holds the addresses of all arrays. The functions
below are placeholders that `compiler` replaces by a few machine instructions.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cleave.policy.dispatch import find_least
from cleave.simulator import records
from cleave.simulator.records import Record, State

_ROWS: dict[Callable[..., Any], tuple[str, np.dtype[np.void]]] = {}
"""Placeholder of a row -> the field of STATE with the address of its array, type of the rows."""
_SLICES: dict[Callable[..., Any], tuple[str, np.dtype[Any]]] = {}
"""Placeholder of a view -> the same for the items of its array."""


def _declare_row(array: str, dtype: np.dtype[np.void]) -> Callable[[State, int], Record]:
    def get_row(state: State, row: int) -> Record:
        raise NotImplementedError

    _ROWS[get_row] = array, dtype
    return get_row


def _declare_slice(array: str, dtype: Any) -> Callable[[State, int, int], Any]:
    def get_slice(state: State, start: int, count: int) -> Any:
        raise NotImplementedError

    _SLICES[get_slice] = array, np.dtype(dtype)
    return get_slice


get_request = _declare_row("requests", records.REQUEST)
get_instance = _declare_row("instances", records.INSTANCE)
get_slot = _declare_row("slots", records.SLOT)
get_queue = _declare_row("queues", records.QUEUE)
get_pull = _declare_row("pulls", records.PULL)
"""The PULL in that row of the heap of transfers in progress."""
get_heap_key = _declare_row("heaps", records.NUMBER)
"""The key in that row of the members' heaps."""
get_phase = _declare_row("phases", records.NUMBER)
"""The number of members in that row of `phases`, see `kv_blocks`."""
get_stage = _declare_row("stages", records.TIME)
"""When the pipeline stage in that row is free, in ms."""
get_node = _declare_row("tree", records.NUMBER)
"""The instance at that node of the tournament tree."""
get_itl_count = _declare_row("itl_counts", records.NUMBER)
get_score = _declare_row("scores", records.TIME)
get_prompt = _declare_row("prompts", records.PROMPT)
get_cache = _declare_row("caches", records.CACHE)
get_copy = _declare_row("copies", records.COPY)
get_known = _declare_row("known", records.KNOWN)
get_block = _declare_row("blocks", records.NUMBER)
"""The number of the block in that row of the blocks of all prompts."""
get_answer = _declare_row("answers", records.NUMBER)
"""The same of the blocks of all answers."""
get_first_copy = _declare_row("first_copies", records.NUMBER)
"""The head of the list of copies of a block."""
get_first_known = _declare_row("first_known", records.NUMBER)
"""The head of the list of the KNOWN of a block."""
get_held_copy = _declare_row("held", records.NUMBER)
"""The copy in that row of the copies that requests hold."""

get_clocks = _declare_slice("clocks", np.float64)
"""`count` numbers of the histories of `policy.cache_horizon`."""
get_points = _declare_slice("tables", np.float64)
"""`count` points of the latency models, from `start` on."""
get_scores = _declare_slice("scores", np.float64)
"""`count` of the scores that dispatch compares; those of one column are contiguous."""
read_amounts = _declare_slice("scratch", np.float64)
get_scratch = _declare_slice("scratch", np.int64)
get_members = _declare_slice("members", records.MEMBER)
"""`count` MEMBER records, the input of the role-flipping policy."""
get_pressure_history = _declare_slice("pressure_history", records.PRESSURE_HISTORY)
"""`count` PRESSURE_HISTORY records: since when each side is under pressure or relieved."""


def build_intrinsics() -> dict[Any, Any]:
    """Placeholder -> the numba intrinsic that replaces it; also gives arrays their methods."""
    _add_methods()
    rows = {get: _build_row_intrinsic(*array) for get, array in _ROWS.items()}
    return rows | {get: _build_slice_intrinsic(*array) for get, array in _SLICES.items()}


@functools.cache
def _add_methods() -> None:
    """Give compiled arrays the methods of `policy.dispatch.ScoreColumn`."""
    from numba import types
    from numba.extending import overload_method

    get_score = overload_method(types.Array, "get_score")
    get_score(lambda scores, slot: lambda scores, slot: scores[slot])
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


def _build_slice_intrinsic(name: str, dtype: Any) -> Any:
    """(state, start, count) -> a view of those items of the array whose address is in `name`."""
    import numba
    from numba import types
    from numba.extending import intrinsic
    from numba.np.arrayobj import make_array, populate_array

    item = numba.from_dtype(dtype)
    array_type = types.Array(item, 1, "C")

    @intrinsic
    def slice_at(typing: Any, state: Any, start: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer, start, count = values
            size = context.get_constant(types.intp, dtype.itemsize)
            target = context.get_data_type(item).as_pointer()
            array = make_array(array_type)(context, builder)
            data = _emit_pointer(context, builder, pointer, start, name, dtype.itemsize, target)
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
