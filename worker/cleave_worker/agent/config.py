"""The command line of the agent, checked and frozen.

Read once by main. All arguments after `--` belong to the engine and are passed on unread, except
--kv-transfer-config, --block-size and others that `launch` has to read.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cleave import logs
from cleave.options import (
    add_options,
    declare,
    declare_file,
    declare_seconds,
    parse_as,
    parse_limit,
    parse_names,
    parse_port,
    read_options,
)
from cleave.policy.adapters import ENV as ADAPTERS_ENV
from cleave.policy.adapters import AdapterSource, parse_adapters
from cleave.rpc.agent_discovery import ENV as AGENTS_ENV
from cleave.rpc.credentials import CALLERS_ENV, PEERS_ENV, TOKEN_ENV
from cleave.rpc.v1 import agent_pb2
from cleave_worker.scheduling.config import ROLES, Role, RoleSchedulingConfig
from cleave_worker.scheduling.config import parse as parse_scheduling

GANG_KEY_ENV = "CLEAVE_GANG_KEY"
"""Environment variable with what a launcher asks its own agents for."""
CONNECTORS = ("nixl", "cleave")
"""Names of KV connectors in command lines."""
OVERLAPPED_TRANSFERS = {"push": "prompt", "perchunk": "chunk", "perlayer": "layer", "auto": "layer"}
"""Transfers that begin before the prefill has ended, and how much KV they announce at a time."""
TRANSFER_MODES = ("pull", *OVERLAPPED_TRANSFERS)


def _parse_role(text: str) -> "agent_pb2.Role.ValueType":
    if text not in ROLES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(sorted(ROLES))}")
    return ROLES[text]


@dataclass(frozen=True, slots=True)
class AgentTiming:
    """All periods and time limits of the agent, in seconds."""

    start_timeout: float = declare_seconds(
        "--start-timeout",
        900.0,
        "from the engine's start to its first good /health; models load for minutes",
    )
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
    peer_wait: float = declare_seconds(
        "--peer-wait", 20.0, "how long a worker without any peer waits before it is ready"
    )
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

    deployment: str = declare("--deployment", help_text="the LLMDeployment it belongs to")
    role: "agent_pb2.Role.ValueType" = declare(
        "--role",
        help_text="decode, mixed or prefill",
        parse=_parse_role,
    )
    model: str = declare("--model", metavar="FOLDER_OR_ID")
    name: str = declare(
        "--name", "", "unique instance name (default: $CLEAVE_POD_NAME)", env="CLEAVE_POD_NAME"
    )
    revision: str = declare("--revision", "", "instances of different revisions never pair")
    served_model_name: str = declare("--served-model-name", "", "default: --model", metavar="NAME")
    engine: str = declare("--engine", "vllm", choices=("vllm", "emulated"))
    host: str = declare("--host", "", "default: $POD_IP", env="POD_IP")
    """The pod's own address, at which agent, engine and KV side channel listen."""
    port: int = declare("--port", 9000, parse=parse_port)
    engine_port: int = declare(
        "--engine-port", 0, "0: a free one for each start of the engine", parse=parse_port
    )
    peers: str = declare(
        "--peers", "", "where to find other agents", metavar="SOURCE", env=AGENTS_ENV
    )
    """Source for `cleave.rpc.agent_discovery`; empty: no peers."""
    cell: str = declare("--cell", "", "co-location group with fast KV transfers")
    cores: str = declare("--cores", "auto", "auto, none or a list: 0,2-3")
    allow_shared_cores: bool = declare(
        "--allow-shared-cores", False, env="CLEAVE_ALLOW_SHARED_CORES"
    )
    tensor_parallel_size: int = declare("--tensor-parallel-size", 1, parse=parse_limit)
    pipeline_parallel_size: int = declare("--pipeline-parallel-size", 1, parse=parse_limit)
    expert_parallel: bool = declare(
        "--expert-parallel", False, "experts as wholes on different GPUs"
    )
    data_parallel_size: int = declare("--data-parallel-size", 1, parse=parse_limit)
    """Ranks of the instance, each with an agent and an engine of its own."""
    data_parallel_rank: int = declare("--data-parallel-rank", 0, "started by cleave-cell")
    """Which of them this is."""
    gang: str = declare("--gang", "", "set by cleave-cell", metavar="HOST:PORT")
    """host:port of the launcher of all ranks; empty: this is the only one."""
    gang_key: str = field(default="", repr=False)
    """What the launcher asks its own agents for; empty: it is another pod's."""
    max_model_len: int = declare("--max-model-len", 0, parse=parse_limit, metavar="TOKENS")
    """0: the model's own."""
    scheduling: Mapping[Role, RoleSchedulingConfig] = declare(
        "--scheduling",
        None,
        "scheduling of the engine, by role",
        parse=partial(parse_as, parse_scheduling),
        metavar="JSON",
    )
    """Applied while the engine has the role; empty: its defaults."""
    connector: str = declare("--connector", "nixl", "of KV, with vLLM", choices=CONNECTORS)
    """Unless the engine's arguments name one."""
    transfer: str = declare(
        "--transfer",
        "pull",
        "when connector cleave transfers KV: after the prefill, or during it; auto: as the gateway "
        "decides",
        choices=TRANSFER_MODES,
    )
    """`pull` after the prefill, or a key of OVERLAPPED_TRANSFERS (agent.launch)."""
    media_domains: tuple[str, ...] = declare(
        "--media-domains",
        (),
        "hosts from which vLLM may fetch media that requests name (default: none)",
        parse=parse_names,
        metavar="HOST,...",
    )
    drain_timeout: float = declare_seconds("--drain-timeout", 30.0)
    token_file: Path | None = declare_file(
        "--token-file",
        f"token by which callers of this agent must have signed (default: ${TOKEN_ENV})",
        env=TOKEN_ENV,
    )
    trusted_accounts: tuple[str, ...] = declare(
        "--trusted-accounts",
        (),
        "service accounts that callers must have instead, as system:serviceaccount:NAMESPACE:NAME "
        f"(default: ${CALLERS_ENV})",
        parse=parse_names,
        metavar="NAME,...",
        env=CALLERS_ENV,
    )
    """With neither, all callers are accepted."""
    peer_accounts: tuple[str, ...] = declare(
        "--peer-accounts",
        (),
        "further accounts, of other agents, which may neither watch nor change this one "
        f"(default: ${PEERS_ENV})",
        parse=parse_names,
        metavar="NAME,...",
        env=PEERS_ENV,
    )
    adapters: tuple[AdapterSource, ...] = declare(
        "--adapters",
        (),
        "LoRA adapters that the engine loads until others are ordered, a list of {name, source} "
        f"(default: ${ADAPTERS_ENV})",
        parse=partial(parse_as, parse_adapters),
        metavar="JSON",
        env=ADAPTERS_ENV,
    )
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
    for flag, variable in (("name", "CLEAVE_POD_NAME"), ("host", "POD_IP")):
        if not getattr(options, flag):
            parser.error(f"--{flag} is required (or {variable})")
    if options.data_parallel_rank >= options.data_parallel_size:
        parser.error(
            f"--data-parallel-rank {options.data_parallel_rank} is not below"
            f" --data-parallel-size {options.data_parallel_size}"
        )
    return read_options(
        AgentConfig,
        options,
        served_model_name=options.served_model_name or options.model,
        scheduling=options.scheduling or {},
        gang_key=env.get(GANG_KEY_ENV, ""),
        log_format=options.log_format,
        engine_args=engine_args,
        timing=read_options(AgentTiming, options),
    )


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
    add_options(parser, AgentConfig, AgentTiming, env=env)
    logs.add_option(parser, env=env)
    return parser
