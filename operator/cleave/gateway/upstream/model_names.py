"""Gives responses the model's name that the client sent, where engines know it by another. Pure.

Used by proxied requests for adapters that were loaded at run time (`cleave.policy.adapters`), and
for further names of a model. All names are ASCII without characters that JSON escapes, and engines
write JSON without blanks.
"""

from cleave.gateway.upstream.collected_answer import MAX_DECODED_BYTES, Pieces


class ModelNames:
    """The names of one model."""

    __slots__ = ("_client_member", "_client_name", "_engine_member", "_engine_name")

    def __init__(self, client_name: str, engine_name: str) -> None:
        self._client_name = client_name.encode()
        self._engine_name = engine_name.encode()
        self._client_member = b'"model":"%b"' % self._client_name
        self._engine_member = b'"model":"%b"' % self._engine_name

    def restore(self, data: bytes) -> bytes:
        """A response, or complete events of one, with the client's name as its model."""
        return data.replace(self._engine_member, self._client_member)

    def restore_first(self, pieces: Pieces) -> Pieces:
        """The pieces of a response; in a large one engines name the model at the beginning."""
        begin = bytes(pieces[0][:MAX_DECODED_BYTES])
        return [self.restore(begin), pieces[0][MAX_DECODED_BYTES:], *pieces[1:]]

    def restore_in_text(self, body: bytes) -> bytes:
        """An engine's error, whose sentence may contain its name."""
        return body.replace(self._engine_name, self._client_name)


def find_names(client_name: str, engine_name: str) -> ModelNames | None:
    """The names of a model that engines have by another name; None: they use the client's."""
    return ModelNames(client_name, engine_name) if engine_name else None
