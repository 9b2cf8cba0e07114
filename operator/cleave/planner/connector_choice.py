"""Chooses the KV connector of a deployment whose `engine.connector` is absent. Pure.

Called by `resolved_deployment`, which knows the model's dimensions. Cleave's connector is the
default; vLLM's NixlConnector is chosen only where Cleave's cannot do the work
(docs/decisions/kv-connector.md).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from cleave.api.deployment import LLMDeploymentSpec
from cleave.api.engine import (
    Connector,
    EngineSpec,
    EngineType,
    TransferMode,
)
from cleave.perf.model.model_shape import ModelShape

SPECULATION_FLAG = "--speculative-config"
METHODS_WITHOUT_LAYERS = {"ngram", "ngram_gpu", "suffix", "custom_class"}
"""Speculative methods of vLLM 0.32 that draft without computing layers on the GPU ..."""
METHODS_OF_HEADS = {"medusa", "mlp_speculator"}
"""... and with further LM heads only. Drafts of all others come from layers with a KV cache."""


@dataclass(frozen=True, slots=True)
class ConnectorChoice:
    """The connector in use."""

    connector: Connector
    reason: str | None = None
    """Why it is another than the default although the spec names none."""
    fault: str | None = None
    """`path: why` engines would end at start with it."""

    def describe(self) -> str | None:
        """A sentence about a connector that was chosen for the user; None: the default or the
        spec's is in use."""
        return self.reason and f"connector {self.connector} is used: {self.reason}"


def choose_connector(spec: LLMDeploymentSpec, shape: ModelShape | None) -> ConnectorChoice:
    """The connector of a deployment. `shape`: its model's; None: not known, or not relevant."""
    engine = spec.engine
    is_free = engine.connector is None and engine.transfer is TransferMode.PULL
    is_replaced = any(arg.startswith("--kv-transfer-config") for arg in engine.args)
    if engine.type is EngineType.EMULATED or is_replaced or engine.connector is Connector.NIXL:
        return ConnectorChoice(engine.kv_connector)
    if why := _explain_immovable(engine, shape):
        if is_free:
            return ConnectorChoice(Connector.NIXL, reason=why)
        if engine.connector is None:
            fault = f"spec.engine.transfer: {why}, and Nixl transfers by Pull only; remove it"
        else:
            fault = f"spec.engine.connector: {why}; set it to Nixl, or remove it"
        return ConnectorChoice(Connector.CLEAVE, fault=fault)
    return ConnectorChoice(engine.kv_connector)


def _explain_immovable(engine: EngineSpec, shape: ModelShape | None) -> str | None:
    """Why Cleave's connector does not move all KV of an engine; None: it does, as far as known."""
    if shape is not None and not shape.has_one_kind_of_cache:
        return f"{shape.name} has {_describe_caches(shape)}, which Cleave's connector does not move"
    method = _find_drafting_method(engine)
    if method is None:
        return None
    return (
        f"--speculative-config in spec.engine.args asks for {method}, whose layers have KV of "
        "their own, which Cleave's connector does not move"
    )


def read_speculation(engine: EngineSpec) -> Mapping[str, object] | None:
    """The value of `--speculative-config`; None: there is none, or one that vLLM refuses."""
    try:
        config = json.loads(engine.get_flag_value(SPECULATION_FLAG) or "null")
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _find_drafting_method(engine: EngineSpec) -> str | None:
    """vLLM's speculative method, if its drafts come from layers with KV; None: no such method, or
    a text that vLLM refuses. Cleave's connector knows the model's own layers only and ends such an
    engine at its start (or takes a draft model's layers for the model's); vLLM's NixlConnector
    transfers all layers, and compares the drafting models of both sides in its handshake."""
    config = read_speculation(engine)
    if config is None:
        return None
    # Without a method vLLM derives it from the draft's own config.
    method = str(config.get("method") or "a draft model")
    return None if method in METHODS_WITHOUT_LAYERS | METHODS_OF_HEADS else method


def _describe_caches(shape: ModelShape) -> str:
    """What a model with several kinds of caches has besides those of full attention."""
    if shape.has_states:
        return "layers with states"
    if not shape.keeps_whole_contexts:
        return "layers with a sliding window"
    return "layers that share KV" if shape.layers_without_cache else "an indexer with own keys"
