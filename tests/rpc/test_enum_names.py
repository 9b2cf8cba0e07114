"""Words for enums of messages."""

import pytest

from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.v1 import agent_pb2


@pytest.mark.parametrize(
    ("enum", "number", "word"),
    [
        (agent_pb2.Role, agent_pb2.ROLE_PREFILL, "prefill"),
        (agent_pb2.State, agent_pb2.STATE_UNSPECIFIED, "unspecified"),
        (agent_pb2.State, 9, "unknown_9"),
        (agent_pb2.Role, -1, "unknown_-1"),
    ],
)
def test_a_number_has_a_word_whether_it_is_known_or_not(enum, number: int, word: str) -> None:
    assert get_enum_name(enum, number) == word
