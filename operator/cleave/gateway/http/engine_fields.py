"""What vLLM reads from a request, and what of it clients may set: an allow-list. Pure.

`vllm_fields.json` has every name that vLLM reads, by path, generated from its request classes
(`scripts/vllm_fields.py`); the rules here say of each what the gateway does with it, and why
(docs/reference/request-fields.md). A test fails when vLLM has a name without a rule. A field that
vLLM's class does not have is removed: clients of OpenAI's API send fields of other services, and
vLLM keeps unknown ones as attributes, some of which its code reads, unchecked.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec


class Treatment(enum.Enum):
    """What the gateway does with a client's value."""

    PASSES = "passes"
    CHECKED = "checked"
    """Passes if it is within limits; otherwise the request is refused."""
    REMOVED = "removed"
    """Only the gateway sets it."""
    REFUSED = "refused"
    """A request that has it gets 400."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """How some names are treated."""

    treatment: Treatment
    reason: str
    names: frozenset[str]


def _make_rule(treatment: Treatment, reason: str, names: str) -> FieldRule:
    return FieldRule(treatment, reason, frozenset(names.split()))


_PASSES, _CHECKED, _REMOVED = Treatment.PASSES, Treatment.CHECKED, Treatment.REMOVED

PROMPT_RULES = (
    _make_rule(
        _PASSES,
        "the prompt, but for members that are refused; embeddings need a configured engine",
        """data data_1 data_2 documents input items messages prompt prompt_embeds queries query
        suffix text_1 text_2 tokens tools""",
    ),
    _make_rule(
        _PASSES,
        "values that templates may write into the prompt, of which they are counted as a part",
        "chat_template_kwargs instruction",
    ),
)
"""What becomes part of the prompt."""

FIELD_RULES = (
    _make_rule(_PASSES, "chooses the model; the gateway resolves it first", "model"),
    *PROMPT_RULES,
    _make_rule(
        _PASSES,
        "how the prompt is written and cut; concerns this request only",
        """add_generation_prompt add_special_tokens continue_final_message max_tokens_per_doc
        max_tokens_per_query padding truncate_prompt_tokens truncation_side""",
    ),
    _make_rule(
        _PASSES,
        "vLLM refuses it unless the deployment trusts its clients (`--trust-request-...`)",
        "chat_template media_io_kwargs mm_processor_kwargs",
    ),
    _make_rule(
        _PASSES,
        "how this request's tokens are sampled; vLLM checks its range",
        """allowed_token_ids bad_words frequency_penalty ignore_eos length_penalty logit_bias
        max_completion_tokens max_tokens min_p min_tokens presence_penalty repetition_detection
        repetition_penalty response_format seed stop stop_token_ids structured_outputs temperature
        thinking_token_budget tool_choice top_k top_p use_beam_search watermarking""",
    ),
    _make_rule(
        _PASSES,
        "what this request's answer contains, and its form",
        """dimensions echo embed_dtype encoding_format endianness include_reasoning
        include_stop_str_in_output logprob_token_ids logprobs parallel_tool_calls prompt_logprobs
        reasoning_effort return_prompt_text return_token_ids return_token_strs
        return_tokens_as_token_ids routed_experts_prompt_start skip_special_tokens
        spaces_between_special_tokens stream task top_logprobs top_n use_activation""",
    ),
    _make_rule(
        _PASSES,
        "read on paths that the gateway does not offer",
        "mm_payload return_mm_kwargs return_token_offsets",
    ),
    _make_rule(_PASSES, "a label: vLLM does nothing else with it", "session_id user"),
    _make_rule(_PASSES, "read by the gateway (`flex`); vLLM does not read it", "service_tier"),
    _make_rule(_PASSES, "with tenants at least the tenant's `minRequestPriority`", "priority"),
    _make_rule(
        _CHECKED,
        "at most 1 KiB; separates cached prompts. With tenants hashed with the tenant's own",
        "cache_salt",
    ),
    _make_rule(_CHECKED, "an integer; tokens of all choices are counted", "n"),
    _make_rule(
        _CHECKED, "an integer; more than 128 tokens an event are lowered", "stream_interval"
    ),
    _make_rule(
        _CHECKED,
        "an object of at most 1 KiB; the gateway adds what counts tokens, and removes it again",
        "stream_options",
    ),
    _make_rule(
        _CHECKED,
        "scalars and lists of them, at most 16 KiB, written again without reserved names",
        "vllm_xargs",
    ),
    _make_rule(
        _REMOVED,
        "names KV or encoder outputs to read and keep, and where",
        "ec_transfer_params kv_transfer_params",
    ),
    _make_rule(
        _REMOVED,
        "engines must get a new one for each attempt: a handoff belongs to it",
        "request_id",
    ),
)
"""Fields of the first level, of any path."""

MEMBER_RULES = (
    _make_rule(
        Treatment.REFUSED,
        "vLLM caches a medium's encoding and KV under it, not under a hash of its content: a "
        "client could read or replace what others get",
        "uuid",
    ),
    _make_rule(
        _PASSES,
        "part of a message, a tool, a format or a medium",
        """arguments audio audio_embeds audio_url author begin channel choice closed content
        content_type continuous_usage_stats custom data defer_loading description detail
        disable_additional_properties disable_any_whitespace end file file_data file_id filename
        format function function_call grammar id image_embeds image_pil image_url include_usage
        input input_audio json json_object json_schema max_pattern_size min_count min_pattern_size
        mode name parameters prompt_cache_breakpoint reasoning recipient refusal regex role schema
        strict structural_tag structural_tag_schema structures task text thinking tool_call_id
        tool_calls tools triggers ttl type url video_embeds video_url whitespace_pattern""",
    ),
)
"""Members of the objects inside fields."""

ARGUMENT_RULES = (
    _make_rule(
        _REMOVED,
        "names KV or encoder outputs, or makes the engine report blocks again",
        "ec_transfer_params kv_cache_report_mode kv_transfer_params",
    ),
    _make_rule(_REMOVED, "latency targets of the gateway", "cleave_tpot_ms cleave_ttft_left_ms"),
    _make_rule(_PASSES, "a label: vLLM does nothing else with it", "session_id"),
    _make_rule(
        _PASSES,
        "parameters of a model's own sampling, checked by it",
        """diffusion_canvas_length diffusion_constrained diffusion_max_steps diffusion_pinned
        diffusion_read_only diffusion_seed_canvas ngram_size whitelist_token_ids window_size""",
    ),
)
"""Arguments in `vllm_xargs`. Others pass: a deployment's own plug-ins may read them."""

HEADER_RULES = (
    _make_rule(
        _REMOVED,
        "the gateway writes the whole head; Envoy is told to remove them where it calls an engine",
        """authorization endpoint-load-metrics-format x-anthropic-billing-header
        x-data-parallel-rank x-session-id x-vllm-priority""",
    ),
    _make_rule(_REMOVED, "the gateway's own value", "content-length content-type x-request-id"),
)
"""Header fields that vLLM reads."""


class VllmFields(msgspec.Struct, frozen=True):
    """`vllm_fields.json`: names that vLLM reads."""

    version: str
    """Of vLLM."""
    paths: dict[str, tuple[str, ...]]
    """Fields of the first level, by path."""
    media: dict[str, tuple[str, ...]]
    """Those that may contain media, by path."""
    members: tuple[str, ...]
    extra_arguments: tuple[str, ...]
    headers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields of one path."""

    plain: frozenset[str]
    """What reaches engines as it is."""
    checked: frozenset[str]
    """What reaches engines once it is checked."""
    prompts: tuple[str, ...]
    """Those of `plain` that may contain media, whose members are checked."""
    texts: tuple[str, ...]
    """Those of `plain` that become part of the prompt."""


def list_names(rules: Iterable[FieldRule], *treatments: Treatment) -> frozenset[str]:
    """The names that have one of these treatments; of all rules if none is given."""
    chosen = [rule.names for rule in rules if not treatments or rule.treatment in treatments]
    return frozenset[str]().union(*chosen)


def find_make_rule(rules: Iterable[FieldRule], name: str) -> FieldRule | None:
    """The rule of a name."""
    return next((rule for rule in rules if name in rule.names), None)


VLLM_FIELDS = msgspec.json.decode(
    Path(__file__).with_name("vllm_fields.json").read_bytes(), type=VllmFields
)
READ_BY_GATEWAY = frozenset(("service_tier", "stream"))
"""These pass on every path."""


PROMPT_NAMES = list_names(PROMPT_RULES)


def _build_tables() -> Mapping[bytes, FieldTable]:
    passed = list_names(FIELD_RULES, Treatment.PASSES)
    checked = list_names(FIELD_RULES, Treatment.CHECKED)
    tables = {}
    for path, names in VLLM_FIELDS.paths.items():
        media = VLLM_FIELDS.media[path]
        plain = passed & {*names, *READ_BY_GATEWAY}
        texts = tuple(sorted(plain & PROMPT_NAMES))
        tables[path.encode()] = FieldTable(plain, checked & {*names}, media, texts)
    return tables


TABLES = _build_tables()
"""By path of the engine."""
RESERVED_ARGUMENTS = list_names(ARGUMENT_RULES, Treatment.REMOVED)

_Scalar = str | int | float | bool
decode_arguments = msgspec.json.Decoder(dict[str, _Scalar | list[_Scalar]] | None).decode
"""Decodes `vllm_xargs`, as vLLM's request classes declare it. Raises msgspec.MsgspecError."""

_PARTS = re.compile(rb":[ \t\n\r]*\[")
_MEDIA_KEY = re.compile(
    rb'"(?:u|\\u0075)(?:u|\\u0075)(?:i|\\u0069)(?:d|\\u0064)"'
    rb"(?:[ \t\n\r]{0,1024}:|[ \t\n\r]{1025})"
)
"""The refused member, however it is escaped. What has more white space before a colon is refused
as well, so that a match has a limit."""
MEDIA_KEY_BYTES = 2_048
"""Limit of a match."""
_SHORT_BYTES = 32 << 10
_MANY_COLONS = 4_096


def find_media_key(text: bytes | memoryview) -> bool:
    """Whether a prompt's JSON, or a piece of it, has the member that names a medium in engines'
    caches."""
    return _MEDIA_KEY.search(text) is not None


def may_have_parts(prompt: bytes) -> bool:
    """Whether a message of a prompt may have parts, which are lists in objects; without them it
    has no media."""
    # Each colon takes time; most texts have few.
    is_slow = len(prompt) > _SHORT_BYTES and prompt.count(b":") > _MANY_COLONS
    return prompt.find(b"[", 1) > 0 and (is_slow or bool(_PARTS.search(prompt)))
