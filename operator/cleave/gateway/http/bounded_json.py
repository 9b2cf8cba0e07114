"""JSON objects and lists of clients, decoded at their first level, up to a number of members.

Used by `completion_request`. A body of 16 MiB can hold millions of members, and a Python object for
each takes seconds during which nothing else is served. These decoders stop at the first member
beyond the bound, so that a hostile body costs no more than one scan of its bytes. Not compiled: the
type of keys has to be a plain Python class.
"""

from itertools import takewhile

import msgspec

_ABSENT = msgspec.Raw()


class TooManyMembersError(ValueError):
    """More members than the bound."""


class _CountedKey(str):
    """Every key of this type is decoded by a hook, which counts."""

    __slots__ = ()


class BoundedListDecoder:
    """Decodes lists of up to `limit` elements."""

    def __init__(self, limit: int) -> None:
        # An array with so many optional places, and nothing after them.
        places = [(f"at_{place}", msgspec.Raw, _ABSENT) for place in range(limit)]
        shape = msgspec.defstruct("_List", places, array_like=True, forbid_unknown_fields=True)
        self._decode = msgspec.json.Decoder(shape).decode

    def decode(self, raw: msgspec.Raw) -> list[msgspec.Raw]:
        """The elements of a list that is valid JSON. Raises TooManyMembersError."""
        try:
            found = self._decode(raw)
        except msgspec.ValidationError:
            raise TooManyMembersError from None
        return list(takewhile(lambda one: one is not _ABSENT, msgspec.structs.astuple(found)))


def decode_bounded_object(data: bytes | msgspec.Raw, limit: int) -> dict[str, msgspec.Raw]:
    """The members of an object, of equal keys the last one; 0.2 us for each more than msgspec's.

    Raises TooManyMembersError above `limit` keys, equal ones counted as well, and what msgspec
    raises when it is no JSON object.
    """
    count = 0

    def note(_: type, key: str) -> _CountedKey:
        nonlocal count
        count += 1
        if count > limit:
            raise TooManyMembersError
        return _CountedKey(key)

    try:
        found = msgspec.json.decode(data, type=dict[_CountedKey, msgspec.Raw], dec_hook=note)
    except msgspec.ValidationError:
        if count > limit:
            raise TooManyMembersError from None
        raise
    return {str(key): value for key, value in found.items()}
