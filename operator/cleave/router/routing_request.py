"""A request as the router's policies see it. Built by `router.selection` for each pick."""

from typing import NamedTuple


class CachedPrompt(NamedTuple):
    """Where a prompt was computed before that must be computed again."""

    boot_id: str
    tokens: int


class PrefixUse:
    """What an engine has probably cached of a prompt."""

    # No NamedTuple: compiled, these take ten times as long to make.
    __slots__ = ("blocks", "holder", "stamp")

    def __init__(self, holder: int, blocks: int, stamp: int) -> None:
        self.holder = holder
        """The engine's number in the index of cached prompts."""
        self.blocks = blocks
        """Leading blocks; 0: none."""
        self.stamp = stamp
        """When it used the last of them, by its clock."""


_NO_BLOCKS: list[int] = []
_UNKNOWN = PrefixUse(-1, 0, 0)


class RoutingRequest:
    """The properties of a request that policies use."""

    __slots__ = (
        "adapter", "blocks", "cached", "known", "known_uses", "output_tokens", "prompt_tokens",
        "seed", "session", "text_bytes", "use",
    )  # fmt: skip

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: float,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        """Predicted."""
        self.blocks = _NO_BLOCKS
        """Its prompt's blocks in the index of cached prompts; empty: the index is not used."""
        self.seed = 0
        """By which these differ from the hashes of the text, see `PrefixIndex`."""
        self.text_bytes = 0
        self.known = 0
        """How many leading blocks any engine has used."""
        self.known_uses = _NO_BLOCKS
        """`PrefixIndex.list_uses` of the last of these."""
        self.use = _UNKNOWN
        """What one engine has cached, the one that was looked up last."""
        self.session: int | None = None
        """Key of its session, for session affinity; None: none."""
        self.adapter: int | None = None
        """Key of its adapter, if requests of an adapter stay together; else None."""
        self.cached: CachedPrompt | None = None
