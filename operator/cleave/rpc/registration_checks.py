"""Checks of what an agent reports about itself, before the registry believes it. Pure.

Called by gateways for each registration, and by agents for those of peers. Agents run beside
engines, which parse files and requests of others. So a registration may only concern the pod that
was dialled: otherwise one compromised worker could take another instance's name, or have prompts
sent to any address.
"""

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from cleave.rpc.v1 import agent_pb2

MAX_ADAPTERS = 1_024
"""LoRA adapters in one registration."""
MAX_NAME_CHARACTERS = 512
"""Length of each name in it."""
MAX_REGISTRATION_BYTES = 512 << 10
MAX_PAIRS = 1_024
"""Results of pairs in one event, as many as agents keep."""
_LOOPBACK = ipaddress.ip_address("127.0.0.1")
_ID = re.compile(r"[!-~]*")
"""Names of instances, and boots: without spaces, which separate them elsewhere."""
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
    _check_names(names)
    for each in (registration.instance, registration.boot_id):
        if _ID.fullmatch(each) is None:
            raise RegistrationError(f"{each!r} has other characters than visible ASCII ones")
    if deployment and registration.deployment != deployment:
        raise RegistrationError(f"deployment {registration.deployment!r}, not {deployment!r}")
    if pod and not _is_of_pod(registration, pod):
        raise RegistrationError(f"instance {registration.instance!r} is not of pod {pod!r}")
    _check_engine_host(registration.engine_url, agent)


def check_pairs(pairs: agent_pb2.PairProofs) -> None:
    """Raises RegistrationError for results that no agent of Cleave sends."""
    if (count := len(pairs.proofs)) > MAX_PAIRS:
        raise RegistrationError(f"results of {count} pairs, more than {MAX_PAIRS}")
    texts = ((e.prefill, e.prefill_boot_id, e.reason, e.source) for e in pairs.proofs)
    _check_names(text for each in texts for text in each)


def _check_names(names: Iterable[str]) -> None:
    if (longest := max(map(len, names), default=0)) > MAX_NAME_CHARACTERS:
        raise RegistrationError(f"a name has {longest} characters: {MAX_NAME_CHARACTERS} at most")


def _is_of_pod(registration: agent_pb2.Registration, pod: str) -> bool:
    """Whether the pod is the instance, has it as an engine, or is a further pod of its
    data-parallel ranks, which have the name of the first one."""
    first = registration.instance.partition(".")[0]
    if first == pod or registration.data_parallel_size <= 1:
        return first == pod
    return _FURTHER_POD.fullmatch(pod.removeprefix(first)) is not None


def _check_engine_host(engine_url: str, agent: str) -> None:
    """Raises RegistrationError when the engine has another address than its agent."""
    host, engine_host = urlsplit(f"//{agent}").hostname or "", urlsplit(engine_url).hostname
    if engine_host is not None and _parse(engine_host) != _parse(host):
        raise RegistrationError(f"its engine is at {engine_host}, the agent at {host}")


def _parse(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | str:
    """The address, or the name of a host that was listed by it."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return _LOOPBACK if host == "localhost" else host
