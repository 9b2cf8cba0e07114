"""Health and metrics of the gateway of a local deployment. Used by `status` and `demo`."""

import asyncio
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

_REQUEST_TIMEOUT_S = 2.0
_HANDOFFS_METRIC = 'cleave_gateway_handoffs_total{result="used"}'


@dataclass(frozen=True, slots=True)
class GatewayHealth:
    """The gateway's response to GET /health."""

    serving: bool
    reason: str = ""


async def get_gateway_health(url: str) -> GatewayHealth:
    """The health of the gateway at `url`; without a response it is not serving."""
    return await asyncio.to_thread(_get_gateway_health, url)


async def count_handoffs(url: str) -> int:
    """KV handoffs that the gateway at `url` has used since its start; 0 without a response."""
    return await asyncio.to_thread(_read_handoffs, url)


def _read_handoffs(url: str) -> int:
    try:
        with _build_opener().open(f"{url}/metrics", timeout=_REQUEST_TIMEOUT_S) as response:
            text = response.read().decode(errors="replace")
    except (OSError, HTTPException):
        return 0
    for line in text.splitlines():
        if line.startswith(_HANDOFFS_METRIC):
            return round(float(line.rpartition(" ")[2]))
    return 0


def _build_opener() -> urllib.request.OpenerDirector:
    # No proxy: the gateway is on this machine.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _get_gateway_health(url: str) -> GatewayHealth:
    try:
        with _build_opener().open(f"{url}/health", timeout=_REQUEST_TIMEOUT_S):
            return GatewayHealth(serving=True)
    except urllib.error.HTTPError as error:
        with error:
            return GatewayHealth(serving=False, reason=_parse_reason(error.read()))
    except (OSError, HTTPException) as error:
        return GatewayHealth(serving=False, reason=f"no response: {error}")


def _parse_reason(body: bytes) -> str:
    """The reasons in the body of /health; its first bytes if it is not that of a gateway."""
    try:
        health = json.loads(body)
        return "; ".join(map(str, health["reasons"])) or str(health["status"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip()
