"""Weights of fewer bits: which parts of a model have how many, as vLLM 0.32 reads checkpoints.

Read from a config.json (with the content of hf_quant_config.json in place) for
cleave.perf.model.model_shape. What is hard: every tool names the facts of quantisation
differently, and lists of layers that keep 16 bits may be most of a model; what is not known is
refused by name, since a wrong guess is off by a factor of four in memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from cleave.perf.model.hf_config import REMEDY, ConfigFields, ModelConfigError
from cleave.perf.model.name_patterns import Matching, NamePatterns, WeightModule


class WeightPart(Enum):
    """A part of a model whose weights may have their own number of bits."""

    ATTENTION = "attention"
    STATES = "state layers"
    MLP = "dense MLPs"
    EXPERTS = "routed experts"
    SHARED = "shared experts"
    LM_HEAD = "LM head"


@dataclass(frozen=True, slots=True)
class Quantization:
    """Storage of linear layers in fewer bits; embeddings are not quantised."""

    method: str
    """The config's `quant_method`."""
    weight_bits: float
    """Bits of one weight of most of them, including its share of scales and zero points."""
    is_8_bit_compute: bool
    """Whether activations are quantised, too, so that matrix products run at the 8-bit rate."""
    is_integer: bool = False
    """Whether 8-bit products are of integers, which Blackwell computes slowly, not of FP8."""
    is_4_bit_compute: bool = False
    """Whether activations are quantised to 4 bits, too: NVFP4, where the GPU computes in it."""
    is_blockwise: bool = False
    """Whether blocks of weights have scales, as in DeepSeek's checkpoints."""
    bits: tuple[tuple[WeightPart, float | None], ...] = ()
    """Bits of parts, a mean over their weights; None: all keep `dtype_bytes`. Empty: all parts but
    the LM head have `weight_bits`. Parts that the model does not have are left out."""

    def get_bits(self, part: WeightPart) -> float | None:
        """Bits of one weight of a part; None: it is not quantised."""
        for each, bits in self.bits:
            if each is part:
                return bits
        return None if self.bits or part is WeightPart.LM_HEAD else self.weight_bits

    @property
    def is_experts_only(self) -> bool:
        """Whether attention and shared parts keep `dtype_bytes`, as in gpt-oss."""
        return self.get_bits(WeightPart.ATTENTION) is None


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a linear layer's weights are stored and computed with."""

    bits: float
    """Of a weight, with its share of scales and zero points."""
    activation_bits: int = 16
    is_integer: bool = False
    is_blockwise: bool = False


_SCALE_BITS = 16
"""Bits of the scale of a group of weights."""
_FP4_BITS, _FP8_BITS = 4, 8
_FP8 = WeightFormat(8, 8)
_FP8_BLOCKS = WeightFormat(8, 8, is_blockwise=True)
# A scale of 8 bits for 16 values; OCP Microscaling 1.0: one for 32 values.
_NVFP4, _NVFP4_WEIGHTS = WeightFormat(4.5, 4), WeightFormat(4.5)
_MXFP4 = WeightFormat(4.25)
_MODELOPT_FORMATS: Mapping[str, WeightFormat] = {
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "FP8_PB_WO": _FP8_BLOCKS,
    "FP8_BLOCK_SCALES": _FP8_BLOCKS,
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4_WEIGHTS,
    "MXFP8": WeightFormat(8.25, 8),
}
"""By ModelOpt's `quant_algo`, of a model or of single layers."""
_FORMATS_WITHOUT_METHOD = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")
_MIXED = "MIXED_PRECISION"
_METHODS = "fp8, awq, gptq, bitsandbytes, compressed-tensors, mxfp4, modelopt"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Which linear layer has which format."""

    method: str
    default: WeightFormat | None
    """Of layers that no name says anything else about; None: they keep their type."""
    named: tuple[tuple[NamePatterns, WeightFormat], ...] = ()
    """Of layers with these names, the first that fits."""
    ignored: NamePatterns | None = None
    """Layers that keep their type."""
    parts: frozenset[WeightPart] = frozenset(WeightPart) - {WeightPart.LM_HEAD}
    """Parts whose layers it applies to."""

    @property
    def lists(self) -> list[NamePatterns]:
        """The lists of names."""
        own = [] if self.ignored is None else [self.ignored]
        return own + [names for names, _ in self.named]

    def find(self, part: WeightPart, module: WeightModule) -> WeightFormat | None:
        """The format of a layer; None: it keeps its type."""
        if self.ignored is not None and self.ignored.matches(module):
            return None
        for names, each in self.named:
            if names.matches(module):
                return each
        return self.default if part in self.parts and not module.is_plain else None


def compute_quantization(
    scheme: Scheme, modules: Iterable[tuple[WeightPart, WeightModule]], layers: int
) -> Quantization | None:
    """The bits of each part, as a mean over its weights; None: nothing is quantised. Raises
    ModelConfigError for names in lists that no layer has."""
    sums: dict[WeightPart, list[float]] = {}
    weights: dict[WeightFormat, float] = {}
    for part, module in modules:
        found = scheme.find(part, module)
        if scheme.lists:
            _check_joined(scheme, part, module)
        own = sums.setdefault(part, [0.0, 0.0, 0.0])
        own[0] += module.parameters
        if found is not None:
            own[1] += module.parameters
            own[2] += module.parameters * found.bits
            weights[found] = weights.get(found, 0.0) + module.parameters
    for names in scheme.lists:
        if (unknown := names.find_unused(layers)) is not None:
            fault = f"{names.path} names {unknown[:60]!r}, a layer that Cleave does not know"
            raise ModelConfigError(f"{fault}; {REMEDY}")
    if not weights:
        return None
    main = max(weights, key=lambda each: weights[each])
    bits = [(part, _compute_mean_bits(*own)) for part, own in sums.items()]
    return Quantization(
        scheme.method,
        main.bits,
        is_8_bit_compute=main.activation_bits == _FP8_BITS,
        is_integer=main.is_integer,
        is_4_bit_compute=main.activation_bits == _FP4_BITS,
        is_blockwise=main.is_blockwise,
        bits=tuple(sorted(bits, key=lambda each: each[0].value)),
    )


def _check_joined(scheme: Scheme, part: WeightPart, module: WeightModule) -> None:
    """Raises ModelConfigError where lists name some only of the layers that are loaded as one."""
    each = [replace(module, names=(name,)) for name in module.joined]
    if len({scheme.find(part, one) for one in each}) > 1:
        names = ", ".join(name.rpartition(".")[2] for name in module.joined)
        raise ModelConfigError(
            f"{scheme.lists[-1].path} names some of {names} in layer {module.layer}, which engines "
            f"load as one; {REMEDY}"
        )


def _compute_mean_bits(total: float, quantized: float, bits: float) -> float | None:
    """Mean bits of a part of which `quantized` weights have `bits` together, and the others 16."""
    if not quantized:
        return None
    return (bits + (total - quantized) * 16) / total


def read_scheme(config: ConfigFields) -> Scheme | None:
    """The quantisation of a model; None: weights are not quantised. Raises ModelConfigError."""
    part = config.get_object("quantization_config") or config.get_object("compression_config")
    if part is None or not part.values:
        return None
    inner = part.get_object("quantization") if _is_modelopt(part) else None
    _mark_all(part)
    method = (part.get_text("quant_method") or "").lower().replace("_tensors", "-tensors")
    if inner is not None:
        _mark_all(inner)
        return _read_modelopt(method or "modelopt", inner, "exclude_modules", bool(method))
    match method:
        case "modelopt" | "modelopt_fp4" | "modelopt_mxfp8" | "modelopt_mixed":
            return _read_modelopt(method, part, "ignore")
        case "fp8":
            return _read_fp8(part)
        case "awq" | "gptq":
            return _read_groups(method, part)
        case "bitsandbytes":
            bits = 4 if part.get_flag("load_in_4bit") else 8
            # NF4: one 32-bit scale for 64 weights (Dettmers et al., QLoRA, section 3).
            names = _read_names(part, "llm_int8_skip_modules", Matching.SUBSTRING)
            return Scheme(method, WeightFormat(4.5 if bits == 4 else 8), ignored=names)
        case "mxfp4":
            return Scheme(method, _MXFP4, parts=frozenset({WeightPart.EXPERTS}))
        case "compressed-tensors":
            return _read_compressed_tensors(part)
        case _:
            raise part.build_error("quant_method", f"known are {_METHODS}; {REMEDY}")


def _is_modelopt(part: ConfigFields) -> bool:
    """Whether it is ModelOpt's own form, which names its producer; vLLM takes no other without a
    `quant_method`."""
    inner, method = part.values.get("quantization"), part.values.get("quant_method")
    if not isinstance(inner, Mapping) or (method and not str(method).startswith("modelopt")):
        return False
    producer = part.values.get("producer")
    named = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return bool(method) or named or "modelopt_quant_config" in inner


def _mark_all(part: ConfigFields) -> None:
    """Every field of quantisation is looked at by the method that reads it."""
    for name in part.values:
        part.seen.setdefault(name)


def _read_modelopt(
    method: str, part: ConfigFields, ignored: str, has_method: bool = True
) -> Scheme:
    """`has_method`: whether the file has a `quant_method`, without which vLLM takes some formats
    only."""
    algo = (part.get_text("quant_algo") or "").upper()
    if not has_method and algo not in _FORMATS_WITHOUT_METHOD:
        known = ", ".join(_FORMATS_WITHOUT_METHOD)
        fault = f"without a quant_method vLLM knows {known}"
        raise part.build_error("quant_algo", f"{fault}; {REMEDY}")
    patterns = _read_names(part, ignored, Matching.GLOB)
    if algo == _MIXED:
        return Scheme(method, None, _read_quantized_layers(part), patterns)
    if algo not in _MODELOPT_FORMATS:
        known = ", ".join((*_MODELOPT_FORMATS, _MIXED))
        raise part.build_error("quant_algo", f"known are {known}; {REMEDY}")
    return Scheme(method, _MODELOPT_FORMATS[algo], ignored=patterns, parts=frozenset(WeightPart))


def _read_quantized_layers(part: ConfigFields) -> tuple[tuple[NamePatterns, WeightFormat], ...]:
    listed = part.get_object("quantized_layers")
    if listed is None or not listed.values:
        raise ModelConfigError(f"{part.path}quantized_layers is missing; {_MIXED} needs it")
    names: dict[WeightFormat, list[str]] = {}
    for name, each in listed.values.items():
        algo = str(each.get("quant_algo")).upper() if isinstance(each, Mapping) else "?"
        if algo not in _MODELOPT_FORMATS:
            known = ", ".join(_MODELOPT_FORMATS)
            where = f"{listed.path}{name[:60]}.quant_algo"
            raise ModelConfigError(f"{where} is {algo[:40]}; known are {known}; {REMEDY}")
        names.setdefault(_MODELOPT_FORMATS[algo], []).append(name)
    path = listed.path.removesuffix(".")
    return tuple((NamePatterns(path, each, Matching.PARENT), own) for own, each in names.items())


def _read_names(part: ConfigFields, name: str, matching: Matching) -> NamePatterns:
    listed: Sequence[object] = part.get_list(name) or ()
    if not all(isinstance(each, str) for each in listed):
        raise part.build_error(name, "list names of layers")
    return NamePatterns(f"{part.path}{name}", [str(each) for each in listed], matching)


def _read_fp8(part: ConfigFields) -> Scheme:
    if part.values.get("quantized_layers") or part.values.get("store_dtype"):
        name = "quantized_layers" if part.values.get("quantized_layers") else "store_dtype"
        raise part.build_error(name, f"plans know fp8 without it; {REMEDY}")
    has_own = bool(part.get_list("ignored_layers"))
    listed = "ignored_layers" if has_own else "modules_to_not_convert"
    own = _FP8 if part.get("weight_block_size") is None else _FP8_BLOCKS
    return Scheme("fp8", own, ignored=_read_names(part, listed, Matching.EXACT))


def _read_groups(method: str, part: ConfigFields) -> Scheme:
    """AWQ and GPTQ: each group has a scale and a zero point of the weights' own width."""
    for name in ("dynamic", "modules_in_block_to_quantize"):
        if part.values.get(name):
            raise part.build_error(name, f"plans know one format for all layers; {REMEDY}")
    bits = part.get_number("bits", "w_bit")
    group = part.get_optional_number("group_size", "q_group_size", least=-1) or -1
    scales = (_SCALE_BITS + bits) / group if group > 0 else 0.0
    names = _read_names(part, "modules_to_not_convert", Matching.SUBSTRING)
    parts = frozenset(WeightPart) - (set() if part.get("lm_head") is True else {WeightPart.LM_HEAD})
    return Scheme(method, WeightFormat(bits + scales), ignored=names, parts=parts)


_ALL_LINEAR = ("Linear",)


def _read_compressed_tensors(part: ConfigFields) -> Scheme:
    groups = part.get_object("config_groups")
    if groups is None or not groups.values:
        raise ModelConfigError(f"{part.path}config_groups is missing; it gives the weights' bits")
    default: WeightFormat | None = None
    named: list[tuple[NamePatterns, WeightFormat]] = []
    ignored = _read_names(part, "ignore", Matching.REGEX)
    for name in groups.values:
        group = groups.get_object(name)
        if group is None:
            continue
        targets = [str(each) for each in group.get_list("targets") or _ALL_LINEAR]
        if len(targets) == 1 and targets[0].endswith("Attention"):
            # The scales of KV, which `kv_cache_scheme` describes.
            continue
        own = _read_group(groups, group, name)
        others = [each for each in targets if each not in _ALL_LINEAR]
        if len(others) < len(targets):
            default = default or own
        if others:
            patterns = NamePatterns(f"{group.path}targets", others, Matching.REGEX)
            named.append((patterns, own))
    return Scheme("compressed-tensors", default, tuple(named), ignored)


def _read_group(groups: ConfigFields, group: ConfigFields, name: str) -> WeightFormat:
    weights = group.get_object("weights")
    if weights is None:
        where = f"{groups.path}{name}.weights"
        raise ModelConfigError(f"{where} is missing; it gives the weights' bits")
    bits = weights.get_number("num_bits")
    size = weights.get_optional_number("group_size", least=-1) or -1
    is_float = weights.get_text("type") == "float"
    activations = group.get_object("input_activations")
    own_bits = activations.get_number("num_bits") if activations is not None else 16
    if is_float and bits == _FP4_BITS:
        base = _MXFP4 if size == 32 else _NVFP4_WEIGHTS
        return WeightFormat(base.bits, own_bits if own_bits in (4, 8) else 16)
    scale_bits = 8 if is_float and size == 32 else _SCALE_BITS
    if not is_float and weights.values.get("symmetric") is False:
        scale_bits += bits
    scales = scale_bits / size if size > 0 else 0.0
    return WeightFormat(
        bits + scales,
        own_bits if own_bits == bits == _FP8_BITS else 16,
        is_integer=not is_float,
        is_blockwise=weights.get_text("strategy") == "block",
    )


def has_8_bit_kv(config: ConfigFields) -> bool:
    """Whether the checkpoint has scales for KV of 8 bits, with which vLLM stores it so by itself:
    compressed-tensors' `kv_cache_scheme`, which newer ModelOpt writes, too, or ModelOpt's
    `kv_cache_quant_algo`. Raises ModelConfigError for other formats of KV."""
    part = config.get_object("quantization_config")
    if part is None:
        return False
    method = str(part.values.get("quant_method") or "").lower()
    inner = part.get_object("quantization") if _is_modelopt(part) else None
    if method.startswith("compressed"):
        return part.get("kv_cache_scheme") is not None
    if method and not method.startswith("modelopt"):
        return False
    for each in (inner, part):
        for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
            value = each.values.get(name) if each is not None else None
            if each is not None and value:
                return _is_fp8(each, name, value)
    return False


def _is_fp8(part: ConfigFields, name: str, value: object) -> bool:
    if isinstance(value, Mapping):
        is_float = value.get("type") == "float" and value.get("num_bits") == _FP8_BITS
        bits = value.get("num_bits")
        if is_float or value.get("type") != "float" or bits != _FP4_BITS:
            return is_float and value.get("dynamic") is not True
        raise part.build_error(name, f"plans know KV of 8 bits; {REMEDY}")
    if str(value).upper() == "NVFP4":
        raise part.build_error(name, f"plans know KV of 8 bits; {REMEDY}")
    return str(value).upper() == "FP8"
