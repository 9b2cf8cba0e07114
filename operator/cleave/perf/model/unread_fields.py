"""Refuses fields of a config.json that may change a model's size and that nothing has looked at.

Called by cleave.perf.model.model_shape once a shape is built. What is hard: files have hundreds of
fields, most of them about training, rotation or sampling, and new models bring new ones. A name
counts as one of sizes if it has a word of sizes and is not known to be of something else; with the
value that the model's class has by default, or an empty one, it changes nothing that was compared
with vLLM.
"""

import re
from collections.abc import Mapping

from cleave.perf.model.hf_config import REMEDY, ConfigFields

_SIZE_WORDS = re.compile(
    r"expert|moe|latent|swa|sliding|window|local|global|chunk|kv|shared?|pattern|compress|sparse"
    r"|head|hidden|dim|d_model|model_d|width|depth|rank|lora|size|layer|block|group|mlp|ffn|(^|_)ff"
    r"|inner|intermediate|state|ssm|mamba|conv|recurrent|index|top_?k|interval|stride|freq|period"
    r"|offset|embed|vocab|attn|attention|linear|gat(e|ing)|dtype|tie|multi_query|act($|_|ivation)"
    r"|cache|channel|span|token|count|length|num|(^|_)n_|position|expand|memory|mem_|adapter|rope_dim"
    r"|loop|repeat|cycle|branch|stream|heads|mtp|nextn|ngram|per_layer|dense|residual|merge"
    r"|multiple|factor|ratio|quant|bits|precision|mla|rout|matri|(^|_)hc_"
)
_OTHERS = re.compile(
    # Rotation, numerics, training and sampling.
    r"rope_(theta|scaling|parameters|type|ratio|base|local|max|fraction|interleaved?|percent)"
    r"|rope|rotary|theta|_eps$|epsilon|initializer|init_|dropout|drop_|pdrop|bias|_norm$|norm_"
    r"|^(pre|post|use|qk|q|k|rms|layer)_?\w*norm|layernorm|token_(id|index|idx)|_token$|loss|jitter"
    r"|_coeff?(icient)?$|coef|scal(e|ing)|multiplier|softcap|soft_cap|clip|clamp|temperature|penalty"
    r"|mup|^output_|return_|^use_cache$|pretraining_tp|^_?attn_implementation|time_step|_lr|alpha"
    r"|beams?|top_p|^top_k$|min_length|max_length|no_repeat|pruned|torchscript"
    r"|chunk_size_feed_forward|problem_type|summary_|label|task|version|name|path|seed|fp32|float32"
    r"|upcast|checkpoint|logits|prefix_lm|alibi_|reorder|scor(e|ing)_f|router_(act|dtype|bias|norm)"
    r"|^(n_group|topk_group|topk_method|norm_topk_prob|ep_size|num_expert_group)$"
    r"|^(hidden_act|activation_function|hidden_activation)_|noaux|aux_|balanc|capacity|_limits?$"
    r"|scaled|composition|original_max_position|max_position_embeddings|^(model_)?max_(seq_len|length)|tokeniz"
    r"|^(initial_context_length|query_pre_attn_scalar|cache_implementation|for_llm_compressor)$"
    r"|^(index_topk|topk_tokens|use_mtp|index_share_for_mtp_iteration)$|mtp|nextn|use_bfloat16|renorm|use_grouped_topk"
    # Parts beside the language model.
    r"|vision|image|visual|video|audio|speech|pixel|patch|^mm_|multimodal|projector|vit_|img"
    r"|spatial|temporal|mrope|perceiver|processor|feature"
)

_READ_WHOLE = ("quantization_config", "compression_config", "rope_scaling", "rope_parameters")
"""Objects whose fields their own reader looks at."""


def is_size_like(name: str) -> bool:
    """Whether a field of this name may change a model's size."""
    own = name.lower()
    return _SIZE_WORDS.search(own) is not None and _OTHERS.search(own) is None


def check_all_read(config: ConfigFields) -> None:
    """Raises ModelConfigError, which names the first field that was not looked at."""
    for name, value in config.values.items():
        if name in config.seen:
            part = config.seen[name]
            if part is not None and name not in _READ_WHOLE:
                check_all_read(part)
        elif is_size_like(name) and not _is_off(value) and not _is_default(config, name):
            raise config.build_error(name, f"plans do not know what it changes; {REMEDY}")


def _is_off(value: object) -> bool:
    """Whether a value says that there is nothing: null, false, zero, an empty list or text."""
    return value is None or value in (False, 0, "", "none") or value in ([], {}, ())


def _is_default(config: ConfigFields, name: str) -> bool:
    known: Mapping[str, object] = config.defaults
    return name in known and config.values[name] == known[name]
