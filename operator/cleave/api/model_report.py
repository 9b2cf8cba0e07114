"""What an engine reports about its model. Part of the status of an LLMDeployment.

Engines write it as JSON (`cleave.perf.model.model_report`), and the operator checks it here before
it counts: any worker may send anything.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from cleave.api.base import ApiModel
from cleave.api.model import AnyObject, check_config
from cleave.api.role import Parallelism

_Count = Annotated[int, Field(ge=0, le=10**12)]
_Size = Annotated[int, Field(ge=0, le=10**15)]
_Text = Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")]


class CacheGroup(ApiModel):
    """Layers whose KV the engine keeps in blocks of one kind, on one GPU."""

    kind: _Text
    """The engine's name of the kind, such as FullAttentionSpec or MambaSpec."""
    layers: _Count
    """Number of layers."""
    block_size: _Count
    """Tokens per block."""
    bytes_per_token: _Count = 0
    """Bytes of a token over all these layers; 0: the size does not depend on the tokens."""
    window: _Count = 0
    """How many of the last tokens are kept; 0: all."""
    state_bytes: _Count = 0
    """Bytes of a request's states over all these layers."""


class EngineSizes(ApiModel):
    """What one engine knows about its model's layers without the config.json; of all GPUs."""

    layers: _Count
    """Number of layers."""
    hidden_size: _Count
    """Size of the hidden state."""
    attention_heads: _Count
    """Heads of queries."""
    kv_heads: _Count
    """Heads that are cached; 1 with latents, of which each GPU caches all."""
    head_size: _Count
    """Size of a head."""
    vocab_size: _Count
    """Number of tokens."""
    weight_bytes: _Size
    """Bytes of all weights, also of parts for images."""
    linear_weights: _Size
    """Weights of linear layers without routed experts, embeddings and LM head."""
    linear_bytes: _Size
    """Their bytes."""
    expert_bytes: _Size = 0
    """Bytes of routed experts; 0: there are none."""
    expert_layers: _Count = 0
    """Number of layers with routed experts."""
    experts: _Count = 0
    """Routed experts of a layer."""
    experts_per_token: _Count = 0
    """Routed experts that a token uses."""
    expert_width: _Count = 0
    """Width of one of them."""
    expert_hidden_size: _Count = 0
    """Size of their inputs."""
    expert_matrices: _Count = 0
    """Matrices of one: three with a gate, else two."""


class ModelReport(ApiModel):
    """What one engine knows about its model."""

    config: Annotated[dict[str, Any], AfterValidator(check_config), AnyObject()]
    """The model's config.json, without parts that no plan reads."""
    config_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    """Hash of the whole config.json, by which engines are compared; empty: a worker of an earlier
    version reported it."""
    max_model_len: Annotated[int, Field(ge=1, le=10**9)]
    """Maximum length of prompt plus output in tokens."""
    block_size: _Count
    """Tokens per block of the KV cache."""
    dtype: _Text = ""
    """Number format of weights that are not quantised."""
    kv_dtype: _Text = ""
    """Number format of the KV cache; auto: the weights' own."""
    parallelism: Parallelism = Parallelism()
    """Parallel sizes of the engine, to which the bytes of its caches belong."""
    cache_groups: Annotated[list[CacheGroup], Field(max_length=64)] = Field(default_factory=list)
    """Its KV caches; empty: not known."""
    sizes: EngineSizes | None = None
    """Sizes of its layers and weights; absent: a worker of an earlier version reported it, or the
    engine is emulated."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token on one GPU over all layers; 0: not known."""
        return sum(group.bytes_per_token for group in self.cache_groups)


class ReportedModel(ModelReport):
    """A report, and the model and instance that it is about."""

    source: Annotated[str, Field(max_length=1024)]
    """spec.model.source when the instance started."""
    model_revision: Annotated[str, Field(max_length=256)] = ""
    """spec.model.revision then."""
    instance: Annotated[str, Field(max_length=253)]
    """Pod of the engine."""
    instance_revision: Annotated[str, Field(max_length=253)] = ""
    """Revision of the instance: one report of each is kept."""
