"""gRPC channels to agents. Used by gateways, agents and the operator."""

import grpc

Options = tuple[tuple[str, int], ...]


def dial(address: str, options: Options = ()) -> grpc.aio.Channel:
    """A channel to `address` that ignores HTTP proxies, which cannot reach pods."""
    return grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0), *options))
