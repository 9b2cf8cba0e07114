"""A model's shape from what an engine has measured, where its config.json is not understood.

Called by cleave.perf.model.model_shape for a config with the field `engineReport`, which the
operator writes (`build_config`): then the engine's weights, caches and heads count, and not a guess
from fields. What is hard: a plan needs to know how weights are shared among layers, and a report
has sums; so linear layers without routed experts are taken to be attention of the reported heads
and MLPs, which makes up the sums.
"""

from collections.abc import Mapping
from dataclasses import replace

from cleave.perf.model.attention import MeasuredCaches
from cleave.perf.model.experts import Experts
from cleave.perf.model.hf_config import ConfigFields, ModelConfigError
from cleave.perf.model.quantization import Quantization, WeightPart
from cleave.perf.model.shape import ModelShape

FIELD = "engineReport"
_MOST = 10**15
"""Bytes or weights."""
_WIDTH_STEP = 256
"""Of an MLP, so that GPUs can share it."""
_BYTES_OF_DTYPE = {"float32": 4, "float16": 2, "bfloat16": 2}
_METHOD = "reported"
_PARTS = ("sizes", "cacheGroups", "parallelism", "maxModelLen", "dtype", "kvDtype")


def build_config(report: Mapping[str, object]) -> dict[str, object]:
    """A config from which `build_shape` reads the measured parts of a report."""
    return {FIELD: {name: report[name] for name in _PARTS if name in report}}


def find(config: object) -> ConfigFields | None:
    """The report in a decoded config; None: it has none. Raises ModelConfigError."""
    if not isinstance(config, Mapping):
        return None
    return ConfigFields(config).get_object(FIELD)


def build_shape(name: str, report: ConfigFields) -> ModelShape:
    """The shape of a report as JSON (`cleave.perf.model.model_report`). Raises
    ModelConfigError."""
    sizes = report.get_object("sizes")
    if sizes is None:
        raise ModelConfigError(f"{report.path}sizes is missing; workers of this version report it")
    dtype_bytes = _BYTES_OF_DTYPE.get(report.get_text("dtype") or "bfloat16", 2)
    shape = ModelShape(
        name=name,
        num_layers=sizes.get_number("layers"),
        hidden_size=sizes.get_number("hiddenSize"),
        num_attention_heads=sizes.get_number("attentionHeads"),
        num_kv_heads=sizes.get_number("kvHeads"),
        head_size=sizes.get_number("headSize"),
        vocab_size=sizes.get_number("vocabSize"),
        max_model_len=report.get_number("maxModelLen"),
        intermediate_size=_WIDTH_STEP,
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=dtype_bytes if report.get_text("kvDtype") in (None, "", "auto") else 1,
    )
    shape = _with_caches(shape, report)
    return _with_tables(_with_layers(_with_experts(shape, sizes), sizes), sizes)


def _with_caches(shape: ModelShape, report: ConfigFields) -> ModelShape:
    parallelism = report.get_object("parallelism") or ConfigFields({})
    if (parallelism.get_optional_number("pipeline") or 1) > 1:
        remedy = "engines report a whole model's caches with one stage"
        raise parallelism.build_error("pipeline", remedy)
    token_bytes, state_bytes, layers, groups = 0, 0, 0, 0
    windows: dict[int, int] = {}
    for values in report.get_list("cacheGroups") or ():
        if not isinstance(values, Mapping):
            raise report.build_error("cacheGroups", "list the groups of caches")
        group = ConfigFields(values, f"{report.path}cacheGroups.")
        groups += 1
        own = group.get_optional_number("bytesPerToken", least=0, most=_MOST) or 0
        window = group.get_optional_number("window", least=0) or 0
        state_bytes += group.get_optional_number("stateBytes", least=0, most=_MOST) or 0
        layers += group.get_number("layers") if own else 0
        if window:
            windows[window] = windows.get(window, 0) + own
        else:
            token_bytes += own
    if not token_bytes + state_bytes + sum(windows.values()):
        raise report.build_error("cacheGroups", "the engine reports no caches")
    measured = MeasuredCaches(
        token_bytes=token_bytes,
        windows=tuple(sorted(windows.items())),
        state_bytes=state_bytes,
        groups=groups,
        tensor=parallelism.get_optional_number("tensor") or 1,
    )
    without = max(0, shape.num_layers - layers)
    return replace(shape, measured=measured, layers_without_attention=without)


def _with_experts(shape: ModelShape, sizes: ConfigFields) -> ModelShape:
    layers = min(shape.num_layers, sizes.get_optional_number("expertLayers", least=0) or 0)
    if not layers:
        return shape
    size = sizes.get_number("expertHiddenSize")
    count = sizes.get_number("experts")
    experts = Experts(
        count=count,
        per_token=min(count, sizes.get_number("expertsPerToken")),
        intermediate_size=sizes.get_number("expertWidth"),
        dense_layers=shape.num_layers - layers,
        latent_size=0 if size == shape.hidden_size else size,
    )
    gated = sizes.get_number("expertMatrices") > 2
    return replace(shape, experts=experts, has_gated_mlp=gated)


def _with_layers(shape: ModelShape, sizes: ConfigFields) -> ModelShape:
    """The shape with MLPs that make up the weights of linear layers, and their bits."""
    weights, own_bytes = (
        sizes.get_number("linearWeights", most=_MOST),
        sizes.get_number("linearBytes", most=_MOST),
    )
    mlp = shape.count_mlp_parameters(1)
    rest = (weights - _count_linear(shape)) // (mlp * shape.num_layers)
    width = max(0, rest // _WIDTH_STEP) * _WIDTH_STEP + _WIDTH_STEP
    experts = replace(shape.experts, shared_intermediate_size=width) if shape.experts else None
    shape = replace(shape, intermediate_size=width, experts=experts)
    left = weights - _count_linear(shape)
    shape = replace(shape, layer_parameters=round(left / shape.num_layers))
    parts: dict[WeightPart, float | None] = dict.fromkeys(WeightPart, 8 * own_bytes / weights)
    parts[WeightPart.LM_HEAD] = None
    if shape.experts is not None:
        routed = shape.expert_layers * shape.experts.count * shape.count_expert_parameters()
        parts[WeightPart.EXPERTS] = 8 * sizes.get_number("expertBytes", most=_MOST) / routed
    main = parts[WeightPart.EXPERTS if shape.experts else WeightPart.MLP]
    assert main is not None
    # Weights of 8 bits are nearly always multiplied with values of 8 bits, and of those of 4 bits
    # many are not.
    is_8_bit = round(main) == 8
    quantization = Quantization(_METHOD, main, is_8_bit_compute=is_8_bit, bits=(*parts.items(),))
    return replace(shape, quantization=quantization)


def _count_linear(shape: ModelShape) -> int:
    """Weights of linear layers without routed experts, embeddings and LM head."""
    tables = shape.embedding_parameters + shape.lm_head_parameters
    experts = shape.experts.count if shape.experts else 0
    routed = shape.expert_layers * experts * shape.count_expert_parameters()
    return shape.parameters - tables - routed


def _with_tables(shape: ModelShape, sizes: ConfigFields) -> ModelShape:
    """The shape with what else the engine has loaded: embeddings, LM head, parts for images."""
    total = sizes.get_number("weightBytes", most=_MOST)
    left = total - sizes.get_number("linearBytes", most=_MOST)
    left -= sizes.get_optional_number("expertBytes", least=0, most=_MOST) or 0
    one = shape.lm_head_parameters * shape.dtype_bytes
    tied = replace(shape, has_tied_embeddings=left < 2 * one)
    more = (left - (one if tied.has_tied_embeddings else 2 * one)) // shape.dtype_bytes
    return replace(tied, layer_table_parameters=max(0, more))
