"""The families of model types: which parts their layers have, and which fields say how large.

Called by cleave.perf.model.model_shape. The types are those whose weights and caches were compared
with the class that vLLM 0.32 registers for them (benchmarks/models), and some older ones of papers;
any other type is refused by name. Values that files leave out are in class_defaults.json.
"""

from collections.abc import Mapping
from dataclasses import replace

from cleave.perf.model import layer_kinds as kinds
from cleave.perf.model import states
from cleave.perf.model.experts import (
    ExpertFields,
    count_agreeing,
    count_between_steps,
    count_by_period,
    count_first,
    count_interleaved,
    count_listed,
    count_numbers,
    count_outside_range,
    count_zeros,
)
from cleave.perf.model.families import (
    ModelFamily,
    PartNames,
    WindowHeads,
    read_adjusted,
    read_always_four_times,
    read_four_times,
    read_halved,
    read_shared,
    read_width,
)
from cleave.perf.model.layer_kinds import match_all_but, match_none, read_listed

_PLAIN = ModelFamily()
_UNGATED = ModelFamily(is_gated=False)
_QWEN = ModelFamily(kinds=kinds.read_flagged)
_BLOCK_SPARSE = PartNames(experts="block_sparse_moe.experts", shared="shared_mlp")
_SHARED_EXPERT = PartNames(shared="mlp.shared_expert")
_QWEN_EXPERTS = ExpertFields(
    shared_width="shared_expert_intermediate_size", count_dense=count_between_steps, may_lack=True
)
_DEEPSEEK_EXPERTS = ExpertFields(
    count="n_routed_experts",
    shared_count="n_shared_experts",
    count_dense=count_first("first_k_dense_replace"),
)
_DEEPSEEK = ModelFamily(
    kinds=kinds.read_whole, has_latents=True, experts=_DEEPSEEK_EXPERTS, tied=False
)
_NUM_SHARED = ExpertFields(
    shared_count="num_shared_experts", count_dense=count_first("num_dense_layers")
)
_GRANITE_EXPERTS = ExpertFields(
    count="num_local_experts", width="intermediate_size", shared_width="shared_intermediate_size"
)
_ALL_HEADS = {"num_key_value_heads": "num_attention_heads"}
_GPT = ModelFamily(is_gated=False, computes_heads=True, kv_heads=(), same=_ALL_HEADS)
_DELTA_NET = ModelFamily(
    kinds=kinds.read_interval,
    states=states.read_gated_delta_net,
    output_gate=True,
    parts=_SHARED_EXPERT,
)
_THREE_OF_FOUR = ModelFamily(kinds=read_listed(match_all_but(4, "sliding_window_pattern")))

FAMILIES: Mapping[str, ModelFamily] = {
    # Llama's layer.
    **dict.fromkeys(("llama", "mistral", "ministral3", "exaone", "internlm", "internlm3"), _PLAIN),
    **dict.fromkeys(("granite", "glm", "glm4", "seed_oss", "ernie4_5"), _PLAIN),
    **dict.fromkeys(("hunyuan_v1_dense", "hyperclovax", "solar"), _PLAIN),
    **dict.fromkeys(("telechat3", "iquestcoder", "xverse", "aquila"), _PLAIN),
    "step1": ModelFamily(
        kv_heads=("num_attention_groups", "num_key_value_heads"), computes_heads=True
    ),
    **dict.fromkeys(("olmo", "olmo2", "stablelm", "internlm2"), ModelFamily(computes_heads=True)),
    "orion": ModelFamily(computes_heads=True),
    "smollm3": replace(_QWEN, only={"use_sliding_window": (None, False)}),
    "baichuan": ModelFamily(computes_heads=True, kv_heads=(), same=_ALL_HEADS),
    "cohere": ModelFamily(tied=True),
    "phi3": ModelFamily(computes_heads=True),
    "gemma": ModelFamily(only={"use_bidirectional_attention": (None, False)}),
    "qwen": ModelFamily(
        width=read_halved, kv_heads=(), same=_ALL_HEADS, ignored=("seq_length", "kv_channels")
    ),
    "qwen3": _QWEN,
    **dict.fromkeys(
        ("qwen2", "mimo", "qwen2_vl_text", "qwen2_5_vl_text"), replace(_QWEN, computes_heads=True)
    ),
    "qwen3_vl_text": _PLAIN,
    "glm4v_text": ModelFamily(computes_heads=True),
    "chatglm": ModelFamily(
        computes_heads=True,
        width=read_width("ffn_hidden_size"),
        kv_heads=("multi_query_group_num",),
        names={
            "vocab_size": "padded_vocab_size",
            "max_position_embeddings": "seq_length",
            "head_dim": "kv_channels",
        },
    ),
    # Without a gate.
    **dict.fromkeys(("apertus", "arcee", "jais2", "nemotron"), _UNGATED),
    **dict.fromkeys(("phi", "starcoder2"), ModelFamily(is_gated=False, computes_heads=True)),
    "gpt_neox": _GPT,
    "gpt2": replace(_GPT, width=read_four_times("n_inner"), learned_positions=0),
    "gptj": replace(_GPT, width=read_four_times("n_inner")),
    "codegen": replace(_GPT, width=read_four_times("n_inner")),
    "gpt_neo": replace(_GPT, width=read_four_times("intermediate_size"), learned_positions=0),
    "gpt_bigcode": replace(
        _GPT, has_single_head=True, width=read_four_times("n_inner"), learned_positions=0
    ),
    "mpt": replace(_GPT, width=read_four_times(), tied=True),
    "bloom": replace(_GPT, width=read_four_times(), names={"hidden_size": "n_embed"}),
    "falcon": ModelFamily(
        is_gated=False,
        computes_heads=True,
        width=read_always_four_times("ffn_hidden_size"),
        kv_heads=("num_kv_heads",),
        has_single_head=True,
        kinds=kinds.read_whole,
    ),
    "opt": replace(_GPT, width=read_width("ffn_dim"), learned_positions=2),
    # Layers with windows.
    "gemma2": ModelFamily(
        kinds=read_listed(match_all_but(2)), tied=True, ignored=("sliding_window_size",)
    ),
    "vaultgemma": ModelFamily(kinds=read_listed(match_all_but(2))),
    "gemma3_text": ModelFamily(
        # Its longest context has that factor already.
        ignored=("rope_scaling", "rope_parameters"),
        kinds=read_listed(match_all_but(6, "sliding_window_pattern")),
        only={"use_bidirectional_attention": (None, False)},
    ),
    "cohere2": replace(_THREE_OF_FOUR, window_more=1, computes_heads=True, tied=True),
    "exaone4": _THREE_OF_FOUR,
    "olmo3": ModelFamily(computes_heads=True, kinds=read_listed(match_all_but(4))),
    "cwm": ModelFamily(kinds=read_listed(match_all_but(4, is_first_full=True))),
    "granite_swa": ModelFamily(kinds=read_listed(match_all_but(4, is_first_full=True))),
    # Experts.
    "mixtral": ModelFamily(
        experts=ExpertFields(count="num_local_experts", width="intermediate_size"),
        parts=_BLOCK_SPARSE,
    ),
    "phimoe": ModelFamily(
        experts=ExpertFields(count="num_local_experts", width="intermediate_size"),
        computes_heads=True,
        tied=False,
        parts=_BLOCK_SPARSE,
    ),
    "olmoe": ModelFamily(
        experts=ExpertFields(width="intermediate_size"), computes_heads=True, tied=False
    ),
    "flex_olmo": ModelFamily(experts=ExpertFields(width="intermediate_size"), computes_heads=True),
    "qwen2_moe": replace(_QWEN, computes_heads=True, experts=_QWEN_EXPERTS, parts=_SHARED_EXPERT),
    "qwen3_moe": replace(_QWEN, experts=replace(_QWEN_EXPERTS, shared_width="")),
    "qwen3_vl_moe_text": ModelFamily(experts=replace(_QWEN_EXPERTS, shared_width="")),
    "gpt_oss": ModelFamily(
        tied=False,
        kinds=read_listed(match_all_but(2)),
        experts=ExpertFields(count="num_local_experts", width="intermediate_size"),
    ),
    "minimax_m2": ModelFamily(
        tied=False,
        norms_all_heads=True,
        experts=ExpertFields(count="num_local_experts", width="intermediate_size"),
        ignored=("attn_type_list",),
        parts=_BLOCK_SPARSE,
    ),
    "granitemoe": ModelFamily(
        experts=replace(_GRANITE_EXPERTS, shared_width=""),
        computes_heads=True,
        parts=_BLOCK_SPARSE,
    ),
    "granitemoeshared": ModelFamily(
        experts=_GRANITE_EXPERTS, computes_heads=True, parts=_BLOCK_SPARSE
    ),
    "granitemoe_swa": ModelFamily(
        experts=_GRANITE_EXPERTS,
        computes_heads=True,
        kinds=read_listed(match_all_but(4, is_first_full=True)),
        parts=_BLOCK_SPARSE,
    ),
    "ernie4_5_moe": ModelFamily(
        experts=ExpertFields(
            count="moe_num_experts",
            top_k="moe_k",
            shared_count="moe_num_shared_experts",
            count_dense=count_outside_range,
            may_lack=True,
        )
    ),
    "bailing_moe": ModelFamily(
        experts=replace(
            _NUM_SHARED,
            shared_each="moe_shared_expert_intermediate_size",
            count_dense=count_first("first_k_dense_replace"),
        )
    ),
    "afmoe": ModelFamily(
        kinds=read_listed(match_all_but(4, "global_attn_every_n_layers")),
        experts=_NUM_SHARED,
        output_gate=True,
        gate_field="",
        tied=False,
    ),
    "exaone_moe": replace(
        _THREE_OF_FOUR,
        experts=replace(
            _NUM_SHARED, count_dense=count_listed(count_first("first_k_dense_replace"))
        ),
    ),
    "cohere2_moe": replace(
        _THREE_OF_FOUR,
        window_more=1,
        tied=True,
        experts=ExpertFields(
            width="intermediate_size",
            shared_count="num_shared_experts",
            count_dense=count_listed(count_first("first_k_dense_replace")),
        ),
    ),
    "mellum": ModelFamily(
        kinds=read_listed(match_none),
        experts=ExpertFields(count_dense=count_listed(count_numbers(0))),
    ),
    "hunyuan_v1_moe": ModelFamily(
        experts=ExpertFields(
            top_k="moe_topk", width="intermediate_size", shared_width="intermediate_size"
        ),
    ),
    "hy_v3": ModelFamily(
        experts=replace(
            _NUM_SHARED,
            width="expert_hidden_dim",
            count_dense=count_agreeing(count_first("first_k_dense_replace")),
        ),
        same={"moe_intermediate_size": "expert_hidden_dim"},
    ),
    "llama4_text": ModelFamily(
        kinds=kinds.read_chunked,
        width=read_width("intermediate_size_mlp"),
        experts=ExpertFields(
            count="num_local_experts",
            width="intermediate_size",
            shared_width="intermediate_size",
            count_dense=count_interleaved,
        ),
        ignored=("nope_layer_interval",),
        parts=PartNames(
            mlp="feed_forward",
            experts="feed_forward.experts",
            shared="feed_forward.shared_expert",
        ),
    ),
    "glm4_moe": ModelFamily(experts=_DEEPSEEK_EXPERTS, tied=False),
    # Latents.
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "axk1"), _DEEPSEEK),
    **dict.fromkeys(
        ("glm_moe_dsa", "glm4_moe_lite"),
        replace(
            _DEEPSEEK,
            experts=replace(
                _DEEPSEEK_EXPERTS, count_dense=count_agreeing(count_first("first_k_dense_replace"))
            ),
        ),
    ),
    "deepseek": ModelFamily(experts=_DEEPSEEK_EXPERTS, tied=False),
    # Heads of several sizes.
    "mimo_v2_flash": ModelFamily(
        kinds=kinds.read_ones("hybrid_layer_pattern"),
        window_heads=WindowHeads(
            heads="swa_num_attention_heads",
            kv_heads="swa_num_key_value_heads",
            key_size="swa_head_dim",
            value_size="swa_v_head_dim",
        ),
        value_size="v_head_dim",
        experts=replace(_DEEPSEEK_EXPERTS, shared_count="", count_dense=count_zeros),
        # vLLM takes it out: the family has no chunks.
        ignored=("attention_chunk_size",),
    ),
    "gemma4_text": ModelFamily(
        kinds=kinds.read_but_last(match_all_but(6)),
        window_heads=WindowHeads(
            whole_kv_heads="num_global_key_value_heads", whole_head_size="global_head_dim"
        ),
        has_layer_tables=True,
        experts=ExpertFields(top_k="top_k_experts", keeps_dense=True, may_lack=True),
        only={
            "use_bidirectional_attention": (None, False, "vision"),
            "use_double_wide_mlp": (None, False),
        },
        ignored=("enable_moe_block",),
        parts=PartNames(experts="experts", shared="mlp"),
    ),
    # States.
    "qwen3_next": replace(_DELTA_NET, experts=_QWEN_EXPERTS, tied=False),
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": replace(
        _DELTA_NET,
        experts=replace(_QWEN_EXPERTS, count_dense=count_numbers(0)),
        width=read_width("moe_intermediate_size"),
    ),
    "nemotron_h": ModelFamily(
        is_gated=False,
        tied=False,
        kinds=kinds.read_single,
        experts=ExpertFields(
            count="n_routed_experts",
            shared_count="n_shared_experts",
            shared_each="moe_shared_expert_intermediate_size",
            latent="moe_latent_size",
        ),
        states=states.read_mamba2(default_bytes=4),
        ignored=("attention_head_dim", "expand"),
        parts=PartNames("mixer", "mixer", "mixer", "mixer.experts", "mixer.shared_experts"),
    ),
    "granitemoehybrid": ModelFamily(
        kinds=kinds.read_states,
        computes_heads=True,
        width=read_shared,
        experts=replace(_GRANITE_EXPERTS, may_lack=True),
        states=states.read_mamba2(inner_field="mamba_inner"),
        ignored=("position_embedding_type",),
        parts=_BLOCK_SPARSE,
    ),
    "falcon_h1": ModelFamily(
        kinds=kinds.read_both,
        states=states.read_mamba2(inner_field="mamba_d_ssm"),
        parts=PartNames(mlp="feed_forward", states="mamba"),
    ),
    "jamba": ModelFamily(
        tied=False,
        kinds=kinds.read_attention_period,
        computes_heads=True,
        experts=ExpertFields(width="intermediate_size", count_dense=count_by_period, may_lack=True),
        states=states.read_mamba,
        parts=PartNames(mlp="feed_forward", experts="feed_forward.experts", states="mamba"),
    ),
    "lfm2": ModelFamily(
        tied=True,
        kinds=kinds.read_states,
        computes_heads=True,
        width=read_adjusted,
        states=states.read_convolution,
        same={"block_dim": "hidden_size", "conv_dim": "hidden_size"},
        parts=PartNames(mlp="feed_forward", states="conv"),
    ),
    "lfm2_moe": ModelFamily(
        tied=True,
        kinds=kinds.read_states,
        computes_heads=True,
        experts=replace(_NUM_SHARED, shared_count=""),
        states=states.read_convolution,
        parts=PartNames(mlp="feed_forward", experts="feed_forward.experts", states="conv"),
    ),
    "kimi_linear": ModelFamily(
        kinds=kinds.read_numbers,
        tied=False,
        has_latents=True,
        experts=replace(
            _NUM_SHARED,
            top_k="num_experts_per_token",
            latent="routed_expert_hidden_size",
            may_lack=True,
            count_dense=count_first("first_k_dense_replace"),
        ),
        states=states.read_delta_attention,
        ignored=("mla_use_nope",),
        parts=PartNames(
            states="self_attn", experts="block_sparse_moe.experts", shared="block_sparse_moe"
        ),
    ),
}
"""By `model_type` of the language model's part of a config.json."""
_OUTER_TYPES = """
aria cohere2_vision deepseek_vl_v2 exaone4_5 gemma3 gemma4 gemma4_unified glm4v glm4v_moe
idefics3 internvl internvl_chat kimi_k25 kimi_vl lfm2_vl llama4 llava llava_next
llava_next_video llava_onevision mistral3 paligemma qwen2_5_vl qwen2_audio qwen2_vl qwen3_5
qwen3_5_moe qwen3_vl qwen3_vl_moe skywork_chat smolvlm voxtral
"""
OUTER_TYPES = frozenset(_OUTER_TYPES.split())
"""Model types whose language model is a part of the file, of one of the families."""
