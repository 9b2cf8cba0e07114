"""Sizes as an engine would report them for a model of a shape."""

from cleave.perf.model.model_report import SizeFacts
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.model.quantization import WeightPart


def build_sizes(shape: ModelShape) -> SizeFacts:
    experts, one = shape.experts, shape.count_expert_parameters()
    routed = shape.expert_layers * (experts.count if experts else 0) * one
    head = 0 if shape.has_tied_embeddings else shape.lm_head_parameters
    tables = shape.embedding_parameters + head
    expert_bytes = round(routed * shape.get_bytes_per_weight(WeightPart.EXPERTS))
    head_bytes = 0 if shape.has_tied_embeddings else round(shape.compute_lm_head_bytes())
    table_bytes = shape.embedding_parameters * shape.dtype_bytes + head_bytes
    return SizeFacts(
        layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        attention_heads=shape.num_attention_heads,
        kv_heads=1 if shape.latent else shape.num_kv_heads,
        head_size=shape.head_size,
        vocab_size=shape.vocab_size,
        weight_bytes=shape.weight_bytes,
        linear_weights=shape.parameters - tables - routed,
        linear_bytes=shape.weight_bytes - table_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        expert_layers=shape.expert_layers,
        experts=experts.count if experts else 0,
        experts_per_token=experts.per_token if experts else 0,
        expert_width=experts.intermediate_size if experts else 0,
        expert_hidden_size=(experts.latent_size or shape.hidden_size) if experts else 0,
        expert_matrices=3 if shape.has_gated_mlp else 2,
    )
