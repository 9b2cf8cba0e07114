"""Mixture-of-experts layers: how many experts, how wide, and which layers have a dense MLP instead.

Read from a config.json for cleave.perf.model.model_shape. What is hard: each family names these
fields differently, and one that is not found makes a model look dense, a tenth of its size; so
`ExpertFields` has the names that the family's class reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cleave.perf.model.hf_config import REMEDY, ConfigFields


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts layers; every expert is an MLP like the dense ones."""

    count: int
    per_token: int
    intermediate_size: int
    """Width of one expert."""
    shared_intermediate_size: int = 0
    """Width of the experts that every token uses, together; 0: none."""
    dense_layers: int = 0
    """Number of layers that have a dense MLP instead."""
    latent_size: int = 0
    """Size to which the hidden state is projected for routed experts, and back (Nemotron 3, Kimi
    K3); 0: they work on the hidden state itself."""

    def count_activated(self, tokens: float) -> float:
        """Expected number of a layer's experts that `tokens` tokens use, with even routing."""
        untouched: float = (1 - self.per_token / self.count) ** tokens
        return self.count * (1 - untouched)


CountDense = Callable[[ConfigFields, int], int]
"""Number of layers with a dense MLP, of a number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFields:
    """The fields of a family that describe its experts; empty: it has no such field."""

    count: str = "num_experts"
    top_k: str = "num_experts_per_tok"
    """Experts that a token uses."""
    width: str = "moe_intermediate_size"
    shared_count: str = ""
    """Of experts that every token uses, each as wide as `shared_each` says."""
    shared_each: str = ""
    """Width of one of them; empty, or absent in the file: `width`."""
    shared_width: str = ""
    """Width of them together."""
    latent: str = ""
    count_dense: CountDense = lambda _, __: 0
    keeps_dense: bool = False
    """Whether each layer has its dense MLP beside the experts (Gemma 4)."""
    may_lack: bool = False
    """Whether its class also builds models without experts, whose layers are all dense."""


_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


def read_experts(config: ConfigFields, fields: ExpertFields, layers: int) -> Experts | None:
    """The expert layers of a model of `layers` layers with an MLP; None: every layer is dense.
    Raises ModelConfigError."""
    count = config.get_optional_number(fields.count, least=0 if fields.may_lack else 1)
    if not count and fields.may_lack:
        mark_fields(config, fields)
        return None
    count = config.get_number(fields.count)
    for name in _COUNTS:
        # Some files say it twice.
        if config.values.get(name) == count:
            config.get(name)
    per_token = config.get_number(fields.top_k)
    if per_token > count:
        raise config.build_error(fields.top_k, f"write at most the {count} experts there are")
    width = config.get_number(fields.width)
    shared = _read_shared_width(config, fields, width)
    if fields.keeps_dense:
        shared += config.get_number("intermediate_size")
    latent = config.get_optional_number(fields.latent, least=0) if fields.latent else None
    dense = min(layers, fields.count_dense(config, layers))
    return Experts(count, per_token, width, shared, dense, latent or 0) if dense < layers else None


def mark_fields(config: ConfigFields, fields: ExpertFields) -> None:
    """Fields about experts change nothing without any."""
    names = (fields.count, fields.top_k, fields.width, fields.shared_count, fields.shared_each)
    for name in (*names, fields.shared_width, fields.latent):
        config.get(name)
    fields.count_dense(config, 1)


def _read_shared_width(config: ConfigFields, fields: ExpertFields, width: int) -> int:
    """Width of the experts that every token uses; `width`: of one routed expert."""
    if fields.shared_width:
        return config.get_optional_number(fields.shared_width, least=0) or 0
    if not fields.shared_count:
        return 0
    each = config.get_optional_number(fields.shared_each) if fields.shared_each else None
    return (each or width) * (config.get_optional_number(fields.shared_count, least=0) or 0)


def count_first(*names: str) -> CountDense:
    """The first layers, as a field says, and with `moe_layer_freq` others between the sparse ones
    (DeepSeek)."""

    def count(config: ConfigFields, layers: int) -> int:
        first = config.get_optional_number(*names, least=0) or 0
        step = 1
        if not isinstance(config.get("moe_layer_freq"), Sequence):
            step = config.get_optional_number("moe_layer_freq") or 1
        return sum(i < first or i % step != 0 for i in range(layers))

    return count


def count_listed(default: CountDense) -> CountDense:
    """The layers that `mlp_layer_types` names `dense`; without that list as `default` says."""

    def count(config: ConfigFields, layers: int) -> int:
        names = config.get_list("mlp_layer_types")
        if names is None:
            return default(config, layers)
        if len(names) < layers or any(name not in ("dense", "sparse") for name in names):
            remedy = f"write dense or sparse for each of {layers} layers"
            raise config.build_error("mlp_layer_types", remedy)
        default(config, layers)
        return sum(name == "dense" for name in names[:layers])

    return count


def count_agreeing(own: CountDense) -> CountDense:
    """As `own` says, with which `mlp_layer_types` must agree: classes of vLLM do not read it."""
    listed = count_listed(own)

    def count(config: ConfigFields, layers: int) -> int:
        number = own(config, layers)
        if listed(config, layers) != number:
            remedy = f"{number} layers are dense by the other fields; {REMEDY}"
            raise config.build_error("mlp_layer_types", remedy)
        return number

    return count


def count_numbers(number: int) -> CountDense:
    """A fixed number of layers."""
    return lambda _, __: number


def count_between_steps(config: ConfigFields, layers: int) -> int:
    """All but each `decoder_sparse_step`-th layer, and those in `mlp_only_layers` (Qwen)."""
    step = config.get_optional_number("decoder_sparse_step") or 1
    only = config.get_list("mlp_only_layers") or ()
    return sum(i in only or (i + 1) % step != 0 for i in range(layers))


def count_interleaved(config: ConfigFields, layers: int) -> int:
    """All but each `interleave_moe_layer_step`-th layer (Llama 4)."""
    step = config.get_optional_number("interleave_moe_layer_step", least=0)
    return layers if step == 0 else sum((i + 1) % (step or 1) != 0 for i in range(layers))


def count_outside_range(config: ConfigFields, layers: int) -> int:
    """The layers before the first and after the last one with experts, and others between them
    (ERNIE 4.5)."""
    start = config.get_optional_number("moe_layer_start_index", least=0) or 0
    end = config.get_optional_number("moe_layer_end_index", least=-1)
    last = layers - 1 if end is None or end == -1 else end
    step = config.get_optional_number("moe_layer_interval") or 1
    return sum(not (start <= i <= last and (i + 1) % step == 0) for i in range(layers))


def count_by_period(config: ConfigFields, layers: int) -> int:
    """All but the layers of a period with an offset (Jamba)."""
    period = config.get_number("expert_layer_period")
    offset = config.get_optional_number("expert_layer_offset", least=0) or 0
    return sum(i % period != offset for i in range(layers))


def count_zeros(config: ConfigFields, layers: int) -> int:
    """The layers with 0 in the list `moe_layer_freq` (MiMo)."""
    freq = config.get_list("moe_layer_freq")
    if freq is None or len(freq) < layers or any(each not in (0, 1) for each in freq):
        raise config.build_error("moe_layer_freq", f"write 0 or 1 for each of {layers} layers")
    return sum(each == 0 for each in freq[:layers])
