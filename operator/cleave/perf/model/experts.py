"""Mixture-of-experts layers, from a config.json. Part of cleave.perf.model.model_shape."""

from dataclasses import dataclass

from cleave.perf.model.hf_config import ConfigFields


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
    """Number of first layers that have a dense MLP instead."""

    def count_activated(self, tokens: float) -> float:
        """Expected number of a layer's experts that `tokens` tokens use, with even routing."""
        untouched: float = (1 - self.per_token / self.count) ** tokens
        return self.count * (1 - untouched)


def read(config: ConfigFields) -> Experts | None:
    """The expert layers of a model; None: every layer is dense. Raises ConfigError.

    Mixtral's experts are as wide as `intermediate_size`; DeepSeek and Qwen have
    `moe_intermediate_size`.
    """
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = config.get_optional_number(*names, least=0)
    if not count or count == 1:
        return None
    per_token = config.get_number("num_experts_per_tok", "num_experts_per_token")
    if per_token > count:
        raise config.build_error(
            "num_experts_per_tok", f"write at most the {count} experts there are"
        )
    width = config.get_number("moe_intermediate_size", "intermediate_size")
    shared = config.get_optional_number("shared_expert_intermediate_size", least=0)
    if shared is None:
        shared = width * (config.get_optional_number("n_shared_experts", least=0) or 0)
    dense_layers = config.get_optional_number("first_k_dense_replace", least=0) or 0
    return Experts(count, per_token, width, shared, dense_layers)
