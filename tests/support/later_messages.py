"""Messages of the contracts in proto/ as an earlier or a later version of Cleave would send them.

Later: each message has further fields, each enum further values. Earlier: fields are absent.
"""

from functools import cache
from typing import Any, TypeVar

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

_FIRST_NUMBER = 1_001
_TYPES = descriptor_pb2.FieldDescriptorProto
_LATER_TYPES = (_TYPES.TYPE_STRING, _TYPES.TYPE_DOUBLE, _TYPES.TYPE_UINT64, _TYPES.TYPE_FIXED32)
_MAX_DEPTH = 4
_INTEGERS = {
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_FIXED32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 9) | st.sampled_from([2**31 - 1, -1]),
}
_OTHERS = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=20),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
}


@cache
def _build_later_file(file: FileDescriptor) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for each in (*file.dependencies, file):
        proto = descriptor_pb2.FileDescriptorProto()
        each.CopyToProto(proto)
        for enum in proto.enum_type:
            # Values share one name space.
            enum.value.add(name=f"LATER_{enum.name}".upper(), number=9)
        for message in proto.message_type:
            for number, kind in enumerate(_LATER_TYPES, _FIRST_NUMBER):
                label = _TYPES.LABEL_REPEATED if number % 2 else _TYPES.LABEL_OPTIONAL
                message.field.add(name=f"later_{number}", number=number, type=kind, label=label)
        pool.Add(proto)
    return pool


def messages(present: type[M]) -> st.SearchStrategy[M]:
    """Messages of a type that this version parses from what another one has sent."""
    pool = _build_later_file(present.DESCRIPTOR.file)
    later = message_factory.GetMessageClass(
        pool.FindMessageTypeByName(present.DESCRIPTOR.full_name)
    )
    return _draw_fields(later.DESCRIPTOR).map(
        lambda fields: present.FromString(later(**fields).SerializeToString())
    )


def _draw_fields(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    fields = {
        field.name: _draw_value(field, depth)
        for field in descriptor.fields
        if field.message_type is None or depth < _MAX_DEPTH
    }
    return st.fixed_dictionaries({}, optional=fields)


def _draw_value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        single = _draw_fields(field.message_type, depth + 1)
    else:
        single = (_INTEGERS | _OTHERS)[field.type]
    return st.lists(single, max_size=3) if field.is_repeated else single
