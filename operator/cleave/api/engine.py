"""The inference engine. Part of both resources."""

import json
import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.base import (
    ApiModel,
    ValidationRule,
    build_unique_rule,
    declare_list_map_key,
    format_cel_list,
)
from cleave.api.pods.names import (
    CONFIG_KEY,
    DNS_NAME,
)
from cleave.api.role import Parallelism, Role
from cleave.api.scheduling import Scheduling

ArgumentText = Annotated[str, Field(max_length=4096)]
ImageName = Annotated[str, Field(min_length=1, max_length=1024, pattern="^[!-~]+$")]
"""The reference of a container image."""

RESERVED_FLAGS = (
    "--host", "--port", "--model", "--served-model-name", "--dtype", "--tensor-parallel-size",
    "--pipeline-parallel-size", "--max-model-len", "--latency", "--time-scale", "--nnodes",
    "--node-rank", "--master-addr", "--headless", "--kv-offloading-size",
)  # fmt: skip
"""Engine flags that Cleave sets itself, from other fields or at run time."""

RESERVED_ENV = (
    "POD_IP", "CLEAVE_AGENTS", "CLEAVE_POD_NAME", "CLEAVE_LEADER", "CLEAVE_ROLE",
    "CLEAVE_ADAPTERS", "CLEAVE_LOAD_PAGE", "CLEAVE_SCHEDULING_PAGE", "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT", "CLEAVE_TOKEN_FILE", "CLEAVE_CALLER_ACCOUNTS",
    "CLEAVE_PEER_ACCOUNTS",
)  # fmt: skip
"""Environment variables that Cleave sets itself."""

NO_PREFIX_CACHING = "--no-enable-prefix-caching"
"""vLLM's flag, and the emulated engine's."""

_FLAG_WITH_BLANK = re.compile("^--[^=]* ")
_SHORT_OR_DOTTED_FLAG = re.compile("^(-[A-Za-z]|--[^=]*[.])")
"""vLLM takes `-sc` and `--speculative-config.method=eagle3` for parts of `--speculative-config`."""
_PREFILL_CONTEXT = re.compile("^--prefill[-_]c")
_SCHEDULER_FLAGS = ("--scheduler-cls", "--scheduling-policy")


def _normalize_flag(arg: str) -> str:
    """Normalize `--flag_name=value` as vLLM does: the flag alone, with hyphens."""
    return arg.split("=")[0].replace("_", "-")


def _is_flag(arg: str, flag: str) -> bool:
    """Whether vLLM takes `arg` for `flag`: with underscores, with a value, or shortened."""
    name = _normalize_flag(arg)
    return len(name) > len("--") and name.startswith("--") and flag.startswith(name)


def _is_reserved(arg: str) -> bool:
    return any(_is_flag(arg, flag) for flag in RESERVED_FLAGS)


class EngineType(StrEnum):
    """The program that computes tokens."""

    VLLM = "vLLM"
    EMULATED = "Emulated"


class Connector(StrEnum):
    """The vLLM connector that transfers KV from prefill to decode engines."""

    NIXL = "Nixl"
    CLEAVE = "Cleave"

    def explain_incompatibility(
        self, prefill: Parallelism, decode: Parallelism, kv_heads: int | None
    ) -> str | None:
        """Why instances like `decode` cannot read KV from those like `prefill`; None: they can.

        `kv_heads`: the KV heads that tensor parallelism splits; None: not known, or none are split
        (MLA). vLLM's NixlConnector maps shards to whole shards. It fails with an assertion at the
        first transfer where neither tensor size divides the other, or where fewer GPUs read heads
        that the prefill side replicates (0.32: `nixl/base_worker.py`, `tp_ratio < 0 and
        is_kv_replicated`). Cleave's maps heads and layers, and supports any two sizes that the
        model supports.
        """
        few, many = sorted((prefill.tensor, decode.tensor))
        if self is Connector.CLEAVE:
            return None
        if many % few:
            return (
                f"{decode.tensor} cannot take KV from prefill instances with {prefill.tensor}: one "
                "must be a multiple of the other"
            )
        if kv_heads is not None and decode.tensor < prefill.tensor and prefill.tensor > kv_heads:
            return (
                f"{decode.tensor} cannot take KV from prefill instances with {prefill.tensor}, "
                f"which keep copies of the model's {kv_heads} KV heads: state at least "
                f"{prefill.tensor}, or at most {kv_heads} for prefill"
            )
        return None


class TransferMode(StrEnum):
    """When KV is transferred to the decode engine."""

    PULL = "Pull"
    PUSH = "Push"
    PER_CHUNK = "PerChunk"
    PER_LAYER = "PerLayer"
    AUTO = "Auto"


class SecretKey(ApiModel):
    """One entry of a Secret in the deployment's namespace."""

    name: Annotated[str, Field(max_length=253, pattern=DNS_NAME)]
    """Name of the Secret."""
    key: Annotated[str, Field(max_length=253, pattern=CONFIG_KEY)]
    """Name of the entry."""
    optional: bool | None = None
    """Whether pods start without the variable where the Secret or entry is missing."""


class EnvSource(ApiModel):
    """The source of a variable's value."""

    secret_key_ref: SecretKey
    """The entry of a Secret that holds the value."""


class EnvVar(ApiModel):
    """One environment variable."""

    name: Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name of the variable."""
    value: ArgumentText = ""
    """Value of the variable."""
    value_from: EnvSource | None = None
    """A Secret that holds the value, for credentials such as HF_TOKEN."""

    rules = (
        ValidationRule(
            cel="!has(self.valueFrom) || self.value == ''",
            is_valid=lambda v: v.value_from is None or not v.value,
            message="has a value beside it; remove one of them",
            field="valueFrom",
        ),
    )


class Emulation(ApiModel):
    """Settings of the emulated engine."""

    latency: Annotated[str, Field(min_length=1, max_length=1024)] = "distserve/opt-13b/tp1"
    """Latency profile: source/model/parallelism, or a file written by `cleave profile`, relative to
    the manifest; in a cluster an absolute path inside the workers' image. The profile sets the
    timing of every instance, whatever its parallelism."""
    time_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor on all durations; 0.1 runs ten times faster than the profile."""


MediaDomain = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]


ARGUMENT_RULES = (
    ValidationRule(
        cel="!has(self.args) || self.args.all(a, !a.matches('^--[^=]') || "
        f"!{format_cel_list(RESERVED_FLAGS)}.exists(f, "
        "f.startsWith(a.split('=')[0].replace('_', '-'))))",
        is_valid=lambda e: not any(map(_is_reserved, e.args)),
        message="must not hold a flag that Cleave sets itself: " + ", ".join(RESERVED_FLAGS),
        field="args",
        list_offenders=lambda e: [arg.split("=")[0] for arg in e.args if _is_reserved(arg)],
    ),
    ValidationRule(
        cel="!has(self.args) || self.args.all(a, !a.matches('^--[^=]* '))",
        is_valid=lambda e: not any(map(_FLAG_WITH_BLANK.match, e.args)),
        message="must hold a flag and its value as two entries, or as one with =",
        field="args",
        list_offenders=lambda e: [arg.split()[0] for arg in e.args if _FLAG_WITH_BLANK.match(arg)],
    ),
    ValidationRule(
        cel="!has(self.args) || !self.args.exists(a, a.startsWith('--data-parallel') || "
        "a.startsWith('--data_parallel'))",
        is_valid=lambda e: (
            not any(arg.startswith(("--data-parallel", "--data_parallel")) for arg in e.args)
        ),
        message="must not hold --data-parallel-*: set parallelism.data in "
        "spec.placement.manual, so that each rank has an agent of its own; models without "
        "experts take replicas instead",
        field="args",
    ),
    ValidationRule(
        cel="!has(self.args) || self.args.all(a, !a.matches('^--prefill[-_]c'))",
        is_valid=lambda e: not any(map(_PREFILL_CONTEXT.match, e.args)),
        message="must not hold --prefill-context-parallel-size: pods request no GPUs for it; "
        "set parallelism.tensor or pipeline in spec.placement.manual instead",
        field="args",
    ),
    ValidationRule(
        cel="!has(self.args) || self.args.all(a, !a.matches('^(-[A-Za-z]|--[^=]*[.])'))",
        is_valid=lambda e: not any(map(_SHORT_OR_DOTTED_FLAG.match, e.args)),
        message="must hold flags in full, such as --tensor-parallel-size instead of -tp, and "
        '--name={"part": 1} instead of --name.part=1, so that they can be checked',
        field="args",
        list_offenders=lambda e: [
            arg.split("=")[0] for arg in e.args if _SHORT_OR_DOTTED_FLAG.match(arg)
        ],
    ),
    ValidationRule(
        cel=f"!has(self.env) || self.env.all(v, !(v.name in {format_cel_list(RESERVED_ENV)}))",
        is_valid=lambda e: not any(v.name in RESERVED_ENV for v in e.env),
        message="must not hold a variable that Cleave sets itself: " + ", ".join(RESERVED_ENV),
        field="env",
        list_offenders=lambda e: [v.name for v in e.env if v.name in RESERVED_ENV],
    ),
    build_unique_rule("env", "name", "variable"),
)
"""Rules of `args` and `env`, of all engines and of those of one role."""


class EngineSpec(ApiModel):
    """The inference engine of every instance."""

    type: Annotated[EngineType, Field(strict=False)] = EngineType.VLLM
    """vLLM, or Emulated: vLLM's API with timings from a latency profile, without a model."""
    image: ImageName | None = None
    """Container image of the workers; absent: Cleave's own for this engine."""
    args: list[ArgumentText] = Field(default_factory=list, max_length=128)
    """Additional command-line arguments of the engine."""
    env: list[EnvVar] = declare_list_map_key("name", default_factory=list, max_length=128)
    """Environment variables of the workers."""
    connector: Annotated[Connector, Field(strict=False)] | None = None
    """The KV connector with type vLLM. Cleave verifies every transfer, has the prompt computed
    again where anything differs, and survives the loss of any peer. Nixl is vLLM's own; models with
    several kinds of KV need it. Absent: Cleave, but Nixl where transfer is Pull and the model is
    known to have sliding windows."""
    transfer: Annotated[TransferMode, Field(strict=False)] = TransferMode.PULL
    """When connector Cleave transfers KV. Pull: after the prefill, when the decode engine has room.
    With the other modes the decode engine receives the request together with the prefill engine, if
    both can start at once. Push: the KV is sent in one piece; PerChunk and PerLayer: while the rest
    is still being computed. Auto: PerLayer for prompts that are long enough for a gain according to
    the plan, Pull for others."""
    kv_offloading_gib: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Host memory of each instance, or data-parallel rank, in GiB, in which vLLM keeps copies of KV
    that it may evict from its GPUs (OffloadingConnector, beside the connector that transfers KV).
    Pods request it in addition. Emulated engines act as if they had it, and request nothing.
    Absent: none."""
    emulated: Emulation | None = None
    """Settings of the emulated engine, with type Emulated."""
    media_domains: list[MediaDomain] = Field(default_factory=list, max_length=64)
    """Hosts from which vLLM may fetch pictures, sound and video that a request names by URL,
    without redirects; absent: none, such requests carry the data themselves (`data:`)."""
    start_timeout_s: Annotated[int, Field(ge=60, le=86_400)] | None = None
    """Seconds from an engine's start to its first answer, after which it is killed and started
    again. Absent: 900, and on GPUs 10 more for each GB of the model's weights, which is their
    download at 0.1 GB/s; 3600 if the model's size is not known."""
    scheduling: Scheduling | None = None
    """Prompt order, admission and batch limits by the instance's role; absent: the engine's own
    scheduler. With vLLM this replaces `--scheduler-cls`."""

    rules = (
        ValidationRule(
            cel="!has(self.connector) || self.connector != 'Cleave' || "
            "!has(self.type) || self.type == 'vLLM'",
            is_valid=lambda e: e.connector is not Connector.CLEAVE or e.type is EngineType.VLLM,
            message="Cleave needs type vLLM; remove one of them",
            field="connector",
        ),
        ValidationRule(
            cel="!has(self.transfer) || self.transfer == 'Pull' || "
            "(has(self.connector) ? self.connector == 'Cleave' : "
            "!has(self.type) || self.type == 'vLLM')",
            is_valid=lambda e: (
                e.transfer is TransferMode.PULL or e.kv_connector is Connector.CLEAVE
            ),
            message="needs connector Cleave and type vLLM unless it is Pull; remove one of them",
            field="transfer",
        ),
        ValidationRule(
            cel="!has(self.emulated) || self.type == 'Emulated'",
            is_valid=lambda e: e.emulated is None or e.type is EngineType.EMULATED,
            message="has no effect with type vLLM; set type: Emulated or remove it",
            field="emulated",
        ),
        ValidationRule(
            cel="!has(self.scheduling) || !has(self.args) || "
            "!self.args.exists(a, a.split('=')[0].replace('_', '-') in "
            f"{format_cel_list(_SCHEDULER_FLAGS)})",
            is_valid=lambda e: not (e.scheduling and any(map(e.has_flag, _SCHEDULER_FLAGS))),
            message="must not hold --scheduler-cls or --scheduling-policy with scheduling, which "
            "sets both; remove one of them",
            field="args",
            list_offenders=lambda e: [flag for flag in _SCHEDULER_FLAGS if e.has_flag(flag)],
        ),
        *ARGUMENT_RULES,
    )

    @property
    def kv_connector(self) -> Connector:
        """The connector in use: Nixl with emulated engines, which speak its protocol. For one that
        depends on model and placement see `cleave.planner.connector_choice`."""
        default = Connector.CLEAVE if self.type is EngineType.VLLM else Connector.NIXL
        return self.connector or default

    @property
    def uses_nccl(self) -> bool:
        """Whether Cleave's connector may transfer KV over NCCL, which `transports` has to name."""
        try:
            config = json.loads(self.get_flag_value("--kv-transfer-config") or "{}")
            transports = config["kv_connector_extra_config"]["transports"]
            return self.kv_connector is Connector.CLEAVE and "nccl" in transports
        except (ValueError, LookupError, TypeError):
            return False

    @property
    def enables_lora(self) -> bool:
        """Whether engines can have LoRA adapters, by a flag that agents look for in full."""
        return any(_normalize_flag(arg) == "--enable-lora" for arg in self.args)

    @property
    def emulation(self) -> Emulation:
        """Settings of the emulated engine, defaults included."""
        return self.emulated or Emulation()

    def has_flag(self, flag: str) -> bool:
        """Whether `args` contain this flag, in any spelling that the engine accepts."""
        return any(_is_flag(arg, _normalize_flag(flag)) for arg in self.args)

    def get_flag_value(self, flag: str) -> str | None:
        """Return the value of the flag's last occurrence in `args`; None: it has none."""
        value = None
        for arg, next_arg in zip(self.args, [*self.args[1:], None], strict=False):
            if _is_flag(arg, flag):
                value = arg.partition("=")[2] if "=" in arg else next_arg
        return value


class RoleEngine(ApiModel):
    """What the engines of one role get in addition."""

    args: list[ArgumentText] = Field(default_factory=list, max_length=128)
    """Arguments after those of engine.args; of a flag that is in both, this one counts."""
    env: list[EnvVar] = declare_list_map_key("name", default_factory=list, max_length=128)
    """Variables beside those of engine.env; of a name that is in both, this one counts."""

    rules = ARGUMENT_RULES


class EngineRoles(ApiModel):
    """What the engines of each role get in addition."""

    prefill: RoleEngine | None = None
    """Arguments and variables of prefill engines."""
    decode: RoleEngine | None = None
    """Arguments and variables of decode engines."""
    mixed: RoleEngine | None = None
    """Arguments and variables of mixed engines."""

    def get(self, role: Role) -> RoleEngine:
        """Return what a role has; empty: nothing of its own."""
        return {
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
            Role.MIXED: self.mixed,
        }[role] or RoleEngine()


class DeploymentEngine(EngineSpec):
    """The inference engine of every instance."""

    roles: EngineRoles | None = None
    """Arguments and variables of the engines of one role, in addition to `args` and `env`; a change
    replaces the instances of that role only. What decides KV, weights or answers belongs into
    `args`, which all roles share. Where prefill and decode engines differ, no instance changes its
    role while it runs."""

    def get_role(self, role: Role) -> RoleEngine:
        """Return what engines of a role have in addition."""
        return (self.roles or EngineRoles()).get(role)

    def for_role(self, role: Role) -> EngineSpec:
        """Return the engine of one role: with its arguments and variables among those of all."""
        own = self.get_role(role)
        shared = {name: getattr(self, name) for name in EngineSpec.model_fields}
        env = {each.name: each for each in (*self.env, *own.env)}
        merged = {"args": [*self.args, *own.args], "env": [*env.values()]}
        return EngineSpec.model_construct(**{**shared, **merged})

    @property
    def can_change_roles(self) -> bool:
        """Whether a running prefill engine is what a decode engine would be, and the reverse."""
        return self.get_role(Role.PREFILL) == self.get_role(Role.DECODE)

    @property
    def has_role_env(self) -> bool:
        """Whether engines of one role have variables of their own."""
        return any(self.get_role(role).env for role in Role)
