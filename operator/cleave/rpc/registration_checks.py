"""Checks of what an agent reports about itself, before the registry believes it. Pure.

Called by gateways for each registration, and by agents for those of peers. Agents run beside
engines, which parse files and requests of others. So a registration may only concern the pod that
was dialled: otherwise one compromised worker could take another instance's name, or have prompts
sent to any address.
"""

import ipaddress
import re
from urllib.parse import urlsplit

from cleave.rpc.v1 import agent_pb2

MAX_ADAPTERS = 1_024
"""LoRA adapters in one registration."""
MAX_NAME_CHARACTERS = 512
"""Length of each name in it."""
MAX_REGISTRATION_BYTES = 512 << 10
_FURTHER_POD = re.compile("-[1-9][0-9]?")
"""What follows the name of an instance in those of its further pods. The generated end of an
instance's own name is longer."""


class RegistrationError(ValueError):
    """A registration concerns something else than its agent; the message is one line."""


def check_registration(
    registration: agent_pb2.Registration, agent: str, deployment: str = "", pod: str = ""
) -> None:
    """Raises RegistrationError for a registration that the agent at `agent` (host:port) may not
    make. `deployment`, `pod`: names that the agent must have; empty: any."""
    if registration.ByteSize() > MAX_REGISTRATION_BYTES:
        raise RegistrationError(f"a registration of {registration.ByteSize()} bytes is too large")
    loaded = registration.runtime_adapters
    if (count := len(registration.adapters) + len(loaded)) > MAX_ADAPTERS:
        raise RegistrationError(f"{count} adapters, more than {MAX_ADAPTERS}")
    names = (
        registration.instance, registration.model, registration.revision, registration.boot_id,
        registration.cell, registration.adapters_digest, registration.weights,
        *registration.adapters,
        *(name for each in loaded for name in (each.name, each.engine_name)),
    )  # fmt: skip
    if (longest := max(map(len, names))) > MAX_NAME_CHARACTERS:
        raise RegistrationError(f"a name has {longest} characters: {MAX_NAME_CHARACTERS} at most")
    if deployment and registration.deployment != deployment:
        raise RegistrationError(f"deployment {registration.deployment!r}, not {deployment!r}")
    if pod and not _is_of_pod(registration, pod):
        raise RegistrationError(f"instance {registration.instance!r} is not of pod {pod!r}")
    _check_engine_host(registration.engine_url, agent)


def _is_of_pod(registration: agent_pb2.Registration, pod: str) -> bool:
    """Whether the pod is the instance, has it as an engine, or is a further pod of its
    data-parallel ranks, which have the name of the first one."""
    first = registration.instance.partition(".")[0]
    if first == pod or registration.data_parallel_size <= 1:
        return first == pod
    return _FURTHER_POD.fullmatch(pod.removeprefix(first)) is not None


def _check_engine_host(engine_url: str, agent: str) -> None:
    """Raises RegistrationError when the engine has another address than its agent."""
    host = urlsplit(f"//{agent}").hostname or ""
    engine_host = urlsplit(engine_url).hostname
    # A name comes from a list on the command line; discovery yields addresses.
    if engine_host is None or not _is_address(host):
        return
    if not _is_address(engine_host) or _parse(engine_host) != _parse(host):
        raise RegistrationError(f"its engine is at {engine_host}, the agent at {host}")


def _is_address(host: str) -> bool:
    try:
        _parse(host)
    except ValueError:
        return False
    return True


def _parse(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host)
