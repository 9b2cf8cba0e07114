"""gRPC channels to agents, and options of servers. Used by gateways, agents and the operator."""

import grpc

Options = tuple[tuple[str, int], ...]

SERVER_OPTIONS: Options = (
    ("grpc.so_reuseport", 0),
    # A client that is gone without a word is noticed, also where it has no call.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC 1.85 waits a minute where only the first of both is set.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A call whose client reads nothing ends with its connection only. Proxies open another one.
    ("grpc.max_connection_age_ms", 30 * 60_000),
    ("grpc.max_connection_age_grace_ms", 4 * 3_600_000),
)
"""For clients that may fall silent."""


def dial(address: str, options: Options = ()) -> grpc.aio.Channel:
    """A channel to `address` that ignores HTTP proxies, which cannot reach pods."""
    return grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0), *options))
