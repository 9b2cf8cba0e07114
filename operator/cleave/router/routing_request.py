"""A request as the router's policies see it. Built by `router.selection` for each pick."""

from typing import NamedTuple


class CachedPrompt(NamedTuple):
    """Where a prompt was computed before that must be computed again."""

    boot_id: str
    tokens: int


_NO_BLOCKS: list[int] = []


class RoutingRequest:
    """The properties of a request that policies use."""

    __slots__ = (
        "adapter", "blocks", "cached", "known", "known_uses", "output_tokens", "prompt_tokens",
        "session", "text", "text_bytes", "use_blocks", "use_holder", "use_host_blocks", "use_stamp",
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
        self.text: bytes | memoryview = b""
        """The prompt, if these are looked up."""
        self.text_bytes = 0
        self.known = 0
        """How many leading blocks any engine has used."""
        self.known_uses = _NO_BLOCKS
        """`PrefixIndex.list_uses` of the last of these."""
        # No class of its own: it would be made for each engine that is looked at.
        self.use_holder = -1
        """The engine that was looked up last, by its number in the index; -1: none."""
        self.use_blocks = 0
        """How many leading blocks it has probably cached."""
        self.use_host_blocks = 0
        """How many of them, at the end, are in its host memory only."""
        self.use_stamp = 0
        """When it used the last of them, by its clock."""
        self.session: int | None = None
        """Key of its session, for session affinity; None: none."""
        self.adapter: int | None = None
        """Key of its adapter, if requests of an adapter stay together; else None."""
        self.cached: CachedPrompt | None = None
