"""Decodes the first level of clients' JSON objects and lists, up to a limit of members.

Used by `completion_request`. A body of 16 MiB can hold millions of members, and creating a Python
object for each takes seconds during which nothing else is served. These decoders stop at the first
member beyond the limit, so that a hostile body costs at most one scan of its bytes. Not compiled:
the type of keys must be a plain Python class.
"""

from itertools import takewhile

import msgspec

_ABSENT = msgspec.Raw()


class TooManyMembersError(ValueError):
    """The object or list has more members than the limit."""


class _CountedKey(str):
    """A key whose decoding calls a hook, which counts the keys."""

    __slots__ = ()


class BoundedListDecoder:
    """Decodes lists of up to `limit` elements."""

    def __init__(self, limit: int) -> None:
        # An array-like struct with `limit` optional fields; further elements are an error.
        fields = [(f"at_{index}", msgspec.Raw, _ABSENT) for index in range(limit)]
        shape = msgspec.defstruct("_List", fields, array_like=True, forbid_unknown_fields=True)
        self._decode = msgspec.json.Decoder(shape).decode

    def decode(self, raw: msgspec.Raw) -> list[msgspec.Raw]:
        """The elements of a list, given as valid JSON. Raises TooManyMembersError."""
        try:
            decoded = self._decode(raw)
        except msgspec.ValidationError:
            raise TooManyMembersError from None
        return list(takewhile(lambda each: each is not _ABSENT, msgspec.structs.astuple(decoded)))


def decode_bounded_object(
    data: bytes | bytearray | memoryview | msgspec.Raw, limit: int
) -> dict[str, msgspec.Raw]:
    """The members of an object; of duplicate keys, the last. Each costs 0.2 us more than msgspec's.
    Raises TooManyMembersError above `limit` keys, duplicates included, and msgspec's errors when it
    is not a JSON object."""
    count = 0

    def count_key(_: type, key: str) -> _CountedKey:
        nonlocal count
        count += 1
        if count > limit:
            raise TooManyMembersError
        return _CountedKey(key)

    try:
        decoded = msgspec.json.decode(data, type=dict[_CountedKey, msgspec.Raw], dec_hook=count_key)
    except msgspec.ValidationError:
        if count > limit:
            raise TooManyMembersError from None
        raise
    return {str(key): value for key, value in decoded.items()}
