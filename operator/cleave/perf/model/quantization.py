"""How the weights of linear layers are stored, from a config's `quantization_config`.

Called by cleave.perf.model.model_shape. What is hard: every tool names the same facts differently;
unknown methods are refused, since a wrong guess is off by a factor of four in memory.
"""

from dataclasses import dataclass

from cleave.perf.model.hf_config import ConfigFields, ModelConfigError

_SCALE_BITS = 16
"""Bits of the scale of a group of weights."""
_SUPPORTED_METHODS = "fp8, awq, gptq, bitsandbytes, compressed-tensors, mxfp4"


@dataclass(frozen=True, slots=True)
class Quantization:
    """Storage of linear layers in fewer bits; embeddings and LM head are not quantised."""

    method: str
    """The config's `quant_method`."""
    weight_bits: float
    """Bits of one weight, including its share of scales and zero points."""
    is_8_bit_compute: bool
    """Whether activations are quantised, too, so that matrix products run at the 8-bit rate."""


def read(config: ConfigFields) -> Quantization | None:
    """The quantisation of a model; None: weights are not quantised. Raises ConfigError."""
    part = config.get_object("quantization_config")
    if part is None or not part.values:
        return None
    method = (part.get_text("quant_method") or "").lower()
    match method:
        case "fp8":
            return Quantization(method, 8, is_8_bit_compute=True)
        case "awq" | "gptq":
            bits = part.get_number("bits", "w_bit")
            # Each group has a scale and a zero point of the weights' own width.
            group = part.get_optional_number("group_size", "q_group_size", least=-1) or -1
            scales = (_SCALE_BITS + bits) / group if group > 0 else 0.0
            return Quantization(method, bits + scales, is_8_bit_compute=False)
        case "bitsandbytes":
            bits = 4 if part.get_flag("load_in_4bit", default=False) else 8
            # NF4: one 32-bit scale for 64 weights (Dettmers et al., QLoRA, section 3).
            return Quantization(method, 4.5 if bits == 4 else 8, is_8_bit_compute=False)
        case "mxfp4":
            # OCP Microscaling 1.0: 32 values share a scale of 8 bits.
            return Quantization(method, 4.25, is_8_bit_compute=False)
        case "compressed-tensors":
            return _read_compressed_tensors(part)
        case _:
            raise part.build_error("quant_method", f"known are {_SUPPORTED_METHODS}")


def _read_compressed_tensors(part: ConfigFields) -> Quantization:
    groups = part.get_object("config_groups")
    if groups is None or not groups.values:
        raise ModelConfigError(f"{part.path}config_groups is missing; it gives the weights' bits")
    group = groups.get_object(next(iter(groups.values)))
    weights = group.get_object("weights") if group else None
    if group is None or weights is None:
        raise ModelConfigError(f"{groups.path}*.weights is missing; it gives the weights' bits")
    bits = weights.get_number("num_bits")
    size = weights.get_optional_number("group_size", least=-1) or -1
    scales = _SCALE_BITS / size if size > 0 else 0.0
    activations = group.get_object("input_activations")
    is_8_bit = bits == 8 and activations is not None and activations.get_number("num_bits") == 8
    return Quantization("compressed-tensors", bits + scales, is_8_bit)
