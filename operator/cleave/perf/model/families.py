"""What files of a model type leave to the code of its class: the layers' parts, and the names of
the fields that say how large they are.

The table of them is cleave.perf.model.family_table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cleave.perf.model.experts import ExpertFields
from cleave.perf.model.hf_config import REMEDY, ConfigFields
from cleave.perf.model.layer_kinds import ReadKinds, read_full
from cleave.perf.model.states import ReadStates

ReadWidth = Callable[[ConfigFields, int], int]
"""Width of a dense layer's MLP, of a model with a hidden size. Raises ModelConfigError."""


def read_width(*names: str) -> ReadWidth:
    """The width in one of these fields."""
    return lambda config, _: config.get_number(*names)


def read_four_times(*names: str) -> ReadWidth:
    """The same, and without such a field four times the hidden size."""
    return lambda config, hidden: (names and config.get_optional_number(*names)) or 4 * hidden


def read_always_four_times(name: str) -> ReadWidth:
    """Four times the hidden size, which this field may say too."""

    def read(config: ConfigFields, hidden: int) -> int:
        if config.get_optional_number(name) not in (None, 4 * hidden):
            raise config.build_error(name, f"its class has MLPs of {4 * hidden}; {REMEDY}")
        return 4 * hidden

    return read


def read_shared(config: ConfigFields, _: int) -> int:
    """Granite 4 without experts has shared ones alone."""
    has_experts = config.get_optional_number("num_local_experts", least=0)
    return config.get_number("intermediate_size" if has_experts else "shared_intermediate_size")


def read_halved(config: ConfigFields, _: int) -> int:
    """The first Qwen counts both halves of its gated MLP."""
    return config.get_number("intermediate_size") // 2


def read_adjusted(config: ConfigFields, _: int) -> int:
    """LFM2's `block_auto_adjust_ff_dim`."""
    width = config.get_number("block_ff_dim", "intermediate_size")
    if not config.get_flag("block_auto_adjust_ff_dim"):
        return width
    factor, multiple = config.get("block_ffn_dim_multiplier"), config.get("block_multiple_of")
    width = int(2 * width / 3)
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        width = int(factor * width)
    step = multiple if type(multiple) is int and multiple > 0 else 1
    return -(-width // step) * step


@dataclass(frozen=True, slots=True)
class PartNames:
    """How checkpoints call the linear layers of a layer, behind `layers.N.`."""

    attention: str = "self_attn"
    states: str = "linear_attn"
    mlp: str = "mlp"
    experts: str = "mlp.experts"
    shared: str = "mlp.shared_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowHeads:
    """Fields of the heads of layers with a window, where the other layers have others."""

    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    key_size: str = "head_dim"
    value_size: str = ""
    """Empty, or absent in the file: `key_size`."""
    whole_kv_heads: str = ""
    """Of layers without a window, where that is a field of its own: it needs `attention_k_eq_v`."""
    whole_head_size: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The layers of a model type, and which fields say how large they are."""

    is_gated: bool = True
    """Whether its MLP has a gate, a third matrix."""
    kinds: ReadKinds = read_full
    window_more: int = 0
    """Tokens that its class adds to `sliding_window`."""
    window_heads: WindowHeads | None = None
    """Heads of layers with a window; None: those of the others."""
    value_size: str = ""
    """Field of the size of a value; empty, or absent in the file: that of a key."""
    has_layer_tables: bool = False
    """Whether layers look tokens up in tables of their own (`hidden_size_per_layer_input`)."""
    width: ReadWidth = read_width("intermediate_size")  # noqa: RUF009 - a function
    experts: ExpertFields | None = None
    states: ReadStates | None = None
    has_latents: bool = False
    """Whether it caches latents (MLA) where its file has `kv_lora_rank`."""
    computes_heads: bool = False
    """Whether its class has heads of `hidden_size / num_attention_heads`, and no field for them."""
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    """Fields of KV heads; empty: as many as heads of queries."""
    has_single_head: bool = False
    """Whether all heads share one KV head where the file has `multi_query`."""
    output_gate: bool | None = None
    """Whether attention has a gate unless `gate_field` says otherwise; None: it has none."""
    gate_field: str = "attn_output_gate"
    norms_all_heads: bool = False
    """Whether queries and keys are normed over all heads together."""
    learned_positions: int | None = None
    """Rows of the table of positions beyond the longest context; None: there is no such table."""
    tied: bool | None = None
    """Whether its class shares embedding and LM head, where it does not read
    `tie_word_embeddings`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of its own for fields, for classes of which there are no defaults."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Fields that may have these values alone; others change layers in ways that plans lack."""
    same: Mapping[str, str] = field(default_factory=dict)
    """Fields that must have the value of another one, if the file has them."""
    ignored: tuple[str, ...] = ()
    """Fields of sizes that its class does not read."""
    parts: PartNames = PartNames()
