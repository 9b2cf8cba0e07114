"""The command line of the agent, checked and frozen.

Read once by main. All arguments after `--` belong to the engine and are passed on unread, except
--kv-transfer-config, --block-size and others that `launch` has to read.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cleave import logs
from cleave.policy.adapters import ENV as ADAPTERS_ENV
from cleave.policy.adapters import AdapterSource, parse_adapters
from cleave.rpc.agent_discovery import ENV as AGENTS_ENV
from cleave.rpc.credentials import CALLERS_ENV, PEERS_ENV, TOKEN_ENV
from cleave.rpc.listen_addresses import parse_port
from cleave.rpc.v1 import agent_pb2
from cleave_worker.scheduling.config import ROLES, Role, RoleSchedulingConfig, SchedulingConfigError
from cleave_worker.scheduling.config import parse as parse_scheduling

GANG_KEY_ENV = "CLEAVE_GANG_KEY"
"""Environment variable with what a launcher asks its own agents for."""
CONNECTORS = ("nixl", "cleave")
"""Names of KV connectors in command lines."""
OVERLAPPED_TRANSFERS = {"push": "prompt", "perchunk": "chunk", "perlayer": "layer", "auto": "layer"}
"""Transfers that begin before the prefill has ended, and how much KV they announce at a time."""
TRANSFER_MODES = ("pull", *OVERLAPPED_TRANSFERS)


@dataclass(frozen=True, slots=True)
class AgentTiming:
    """All periods and time limits of the agent, in seconds."""

    start_timeout: float = 900.0
    """From the start of the engine to its first good /health; models load for minutes."""
    start_poll: float = 0.25
    health_interval: float = 5.0
    health_retry: float = 1.0
    """From a failed health check to the next one."""
    health_timeout: float = 5.0
    health_failures: int = 3
    """Consecutive failed health checks after which the engine is killed."""
    stall_timeout: float = 300.0
    """An engine with requests that runs no step for this long is killed, even if /health answers.

    Far above any step: a chunk of a large model's prompt takes a minute on a slow CPU.
    """
    restart_delay: float = 1.0
    """Before the first restart; doubles up to restart_delay_max."""
    restart_delay_max: float = 30.0
    stable_after: float = 60.0
    """An engine that ran this long does not count as crash-looping."""
    stop_grace: float = 10.0
    """Between SIGTERM and SIGKILL of the engine."""
    peer_wait: float = 20.0
    """How long a worker without any peer waits before it becomes ready unverified."""
    peer_poll: float = 0.5
    peer_search: float = 5.0
    """Interval between searches for a peer while ready unverified."""
    verify_timeout: float = 30.0
    """Limit of each request of the KV test."""
    verify_delay_max: float = 30.0
    quiet_period: float = 0.3
    """How long the load page must show no work before a drain counts the engine as empty."""
    drain_poll: float = 0.05
    adapter_load: float = 300.0
    """Limit of loading a LoRA adapter, which may have to be downloaded."""
    adapter_overlap: float = 10.0
    """How long the old source of an adapter takes requests beside a new one, which the other
    engines load in the meantime."""
    adapter_check: float = 5.0
    """Between two looks at the folder of an adapter; less than `adapter_overlap`, so that all
    engines load a changed one before the first withdraws what it had."""
    adapter_hub_check: float = 600.0
    """Between two looks at the branch of an adapter's repository."""
    adapter_linger: float = 30.0
    """From an adapter's last new request to its unloading; those under way arrive meanwhile."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The configuration of one worker: its identity, its engine and its addresses."""

    name: str
    deployment: str
    revision: str
    role: "agent_pb2.Role.ValueType"
    model: str
    served_model_name: str
    engine: str
    """`vllm` or `emulated`."""
    host: str
    """The pod's own address, at which agent, engine and KV side channel listen."""
    port: int = 9000
    engine_port: int = 0
    """0: a free port for every start of the engine."""
    peers: str = ""
    """Source for `cleave.rpc.agent_discovery`; empty: no peers."""
    cell: str = ""
    """Co-location group within which KV transfers are preferred; empty: none."""
    cores: str = "auto"
    allow_shared_cores: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    data_parallel_size: int = 1
    """Ranks of the instance, each with an agent and an engine of its own."""
    data_parallel_rank: int = 0
    """Which of them this is."""
    gang: str = ""
    """host:port of the launcher of all ranks; empty: this is the only one."""
    gang_key: str = field(default="", repr=False)
    """What the launcher asks its own agents for; empty: it is another pod's."""
    max_model_len: int = 0
    """In tokens; 0: the model's own."""
    scheduling: Mapping[Role, RoleSchedulingConfig] = field(default_factory=dict)
    """Configurations by role, applied while the engine has the role; empty: its defaults."""
    connector: str = "nixl"
    """`nixl` or `cleave`: the KV connector, unless the engine's arguments name one."""
    transfer: str = "pull"
    """`pull` after the prefill, or a key of OVERLAPPED_TRANSFERS (agent.launch)."""
    media_domains: tuple[str, ...] = ()
    """Hosts from which the engine may fetch media that requests name; empty: none."""
    drain_timeout: float = 30.0
    token_file: Path | None = None
    """The token by which callers must have signed, unless `trusted_accounts` says otherwise."""
    trusted_accounts: tuple[str, ...] = ()
    """Service accounts that callers may have; with neither, all callers are accepted."""
    peer_accounts: tuple[str, ...] = ()
    """Further ones, which may only ask for the health."""
    adapters: tuple[AdapterSource, ...] = ()
    """LoRA adapters that the engine loads at run time until others are ordered."""
    log_format: str = "text"
    engine_args: tuple[str, ...] = ()
    timing: AgentTiming = field(default_factory=AgentTiming)

    @property
    def address(self) -> str:
        """host:port of this agent in discovery."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def authenticates_callers(self) -> bool:
        """Whether calls must be signed. Only then the engine asks for a key, as all callers get
        it."""
        return bool(self.trusted_accounts or self.token_file)

    @property
    def is_overlapped(self) -> bool:
        """Whether KV may be pulled while it is computed."""
        return self.connector == "cleave" and self.transfer in OVERLAPPED_TRANSFERS

    @property
    def num_ranks(self) -> int:
        """Number of processes of the engine that hold a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def parse(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> AgentConfig:
    """Parse the command line. Bad usage ends the process with exit code 2, as argparse does."""
    own, engine_args = separate_engine_args(argv)
    parser = _build_parser(env)
    options = parser.parse_args(own)
    name = options.name or env.get("CLEAVE_POD_NAME", "")
    if not name:
        parser.error("--name is required (or CLEAVE_POD_NAME)")
    if not options.host:
        parser.error("--host is required (or POD_IP)")
    if options.data_parallel_rank >= options.data_parallel_size:
        parser.error(
            f"--data-parallel-rank {options.data_parallel_rank} is not below"
            f" --data-parallel-size {options.data_parallel_size}"
        )
    # Every other option has the name of its field.
    fields = vars(options)
    times = {name: fields.pop(name) for name in ("start_timeout", "peer_wait")}
    fields["name"], fields["role"] = name, ROLES[options.role]
    fields["gang_key"] = env.get(GANG_KEY_ENV, "")
    fields["scheduling"] = options.scheduling or {}
    fields["served_model_name"] = options.served_model_name or options.model
    return AgentConfig(**fields, engine_args=engine_args, timing=AgentTiming(**times))


def separate_engine_args(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split a command line at `--`: the own arguments, and those of the engine."""
    separator = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:separator]), tuple(argv[separator + 1 :])


def _build_parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cleave-worker",
        description="Runs one engine and reports its state to the control plane.",
        epilog="Arguments after -- go to the engine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--name", help="unique instance name (default: $CLEAVE_POD_NAME)")
    add("--deployment", required=True, help="the LLMDeployment it belongs to")
    add("--revision", default="", help="instances of different revisions never pair")
    add("--role", choices=sorted(ROLES), required=True)
    add("--model", required=True, metavar="FOLDER_OR_ID")
    add("--served-model-name", metavar="NAME", help="default: --model")
    add("--engine", choices=("vllm", "emulated"), default="vllm")
    add("--host", default=env.get("POD_IP", ""), help="default: $POD_IP")
    add("--port", type=parse_port, default=9000)
    add("--engine-port", type=parse_port, default=0, help="0: a free one")
    add("--peers", metavar="SOURCE", default=env.get(AGENTS_ENV, ""))
    add("--cell", default="", help="co-location group with fast KV transfers")
    add("--cores", default="auto", help="auto, none or a list: 0,2-3")
    shared = env.get("CLEAVE_ALLOW_SHARED_CORES", "") in ("1", "true")
    add("--allow-shared-cores", action="store_true", default=shared)
    add("--tensor-parallel-size", type=_parse_count, default=1)
    add("--pipeline-parallel-size", type=_parse_count, default=1)
    add("--expert-parallel", action="store_true", help="experts as wholes on different GPUs")
    add("--data-parallel-size", type=_parse_count, default=1)
    add("--data-parallel-rank", type=_parse_rank, default=0, help="started by cleave-cell")
    add("--gang", metavar="HOST:PORT", default="", help="set by cleave-cell")
    add("--max-model-len", type=_parse_count, default=0, metavar="TOKENS")
    add(
        "--scheduling",
        type=_parse_scheduling,
        metavar="JSON",
        help="scheduling of the engine, by role",
    )
    add("--connector", choices=CONNECTORS, default="nixl", help="of KV, with vLLM")
    add(
        "--transfer",
        choices=TRANSFER_MODES,
        default=TRANSFER_MODES[0],
        help="when connector cleave transfers KV: after the prefill, or during it; auto: as the "
        "gateway decides",
    )
    add(
        "--media-domains",
        type=_parse_names,
        default=(),
        metavar="HOST,...",
        help="hosts from which vLLM may fetch media that requests name (default: none)",
    )
    add("--drain-timeout", type=_parse_seconds, default=30.0, metavar="SECONDS")
    add("--start-timeout", type=_parse_seconds, default=900.0, metavar="SECONDS")
    add("--peer-wait", type=_parse_seconds, default=20.0, metavar="SECONDS")
    token_file = env.get(TOKEN_ENV)
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        default=Path(token_file) if token_file else None,
        help=f"token by which callers of this agent must have signed (default: ${TOKEN_ENV})",
    )
    add(
        "--trusted-accounts",
        type=_parse_names,
        metavar="NAME,...",
        default=_parse_names(env.get(CALLERS_ENV, "")),
        help="service accounts that callers must have instead, as "
        f"system:serviceaccount:NAMESPACE:NAME (default: ${CALLERS_ENV})",
    )
    add(
        "--peer-accounts",
        type=_parse_names,
        metavar="NAME,...",
        default=_parse_names(env.get(PEERS_ENV, "")),
        help="further accounts, of other agents, which may neither watch nor change this one "
        f"(default: ${PEERS_ENV})",
    )
    add(
        "--adapters",
        type=_parse_adapters,
        metavar="JSON",
        default=env.get(ADAPTERS_ENV, "[]"),
        help="LoRA adapters that the engine loads once it runs, a list of {name, source} "
        f"(default: ${ADAPTERS_ENV})",
    )
    logs.add_option(parser, env=env)
    return parser


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _parse_adapters(text: str) -> tuple[AdapterSource, ...]:
    try:
        return parse_adapters(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parse_count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return count


def _parse_rank(text: str) -> int:
    rank = int(text)
    if rank < 0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return rank


def _parse_scheduling(text: str) -> dict[Role, RoleSchedulingConfig]:
    try:
        return parse_scheduling(text)
    except SchedulingConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return seconds
