"""What a proxied request reports while it runs. Implemented by `tracing.recording_observer`.

A request that nobody records has no observer. A base class and not a protocol, because compiled
protocols take three times as long.
"""

from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.http.errors import GatewayError
from cleave.router.instance import Target
from cleave.router.router import Pick


class RequestObserver:
    """Follows one request. No method may raise."""

    __slots__ = ()

    def on_attempt(self, pick: Pick, recovery_mode: str) -> None:
        """An attempt begins; `recovery_mode` of all but the first: again, continued or replayed."""

    def on_call_sent(self, phase: str, target: Target) -> bytes:
        """A call begins: prefill, decode, or whole for both. Returns header lines to add to it."""
        raise NotImplementedError

    def on_prefill_done(self, body: bytes) -> None:
        """The prefill engine has sent its response."""

    def on_stream_started(self, status: int) -> None:
        """An engine's stream has begun."""

    def on_attempt_failed(self, instance: str, failure: Failure, reason: str) -> None:
        """The attempt failed; the reason continues `instance NAME ...`."""

    def on_error(self, error: GatewayError) -> None:
        """The client gets an error."""

    def on_response(self, status: int) -> None:
        """The client gets a response that is not streamed."""

    def on_finished(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing follows."""
