"""Flags of engines by what they could do in the hands of an author. Values and look-ups only.

Used by `cleave.controller.author_policy.commands`. All of both engines' parsers
(`cleave.api.pods.engine_flags`; a test compares them), without their dashes. A flag that is not
here is unknown, and not harmless.
"""

from cleave.api.engine import EngineType
from cleave.api.pods.engine_flags import EngineFlag, load_parser

_HARMLESS = """
    aggregate-engine-logging all2all-backend allow-deprecated-quantization
    anthropic-disabled-thinking-effort async-scheduling attention-backend block-size
    chat-template-content-format cohere-format cohere-is-reasoning-model convert
    cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-gb
    cpu-offload-params cudagraph-capture-sizes cudagraph-metrics custom-histogram-buckets
    dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend
    dcp-kv-cache-interleave-size dcp-q-replicate decode-context-parallel-size
    default-chat-template-kwargs device-ids device-memory-utilization
    disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
    disable-custom-all-reduce disable-fastapi-docs disable-hybrid-kv-cache-manager
    disable-log-stats disable-nccl-for-dp-synchronization disable-sliding-window
    disable-uvicorn-access-log distributed-timeout-seconds dp-sync-interval dtype
    enable-auto-tool-choice enable-batch-sharded-sampling enable-chunked-prefill
    enable-cumem-allocator enable-dbo enable-ep-weight-filter enable-eplb enable-expert-parallel
    enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage
    enable-hc-sp enable-layerwise-nvtx-tracing enable-lora
    enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint
    enable-mfu-metrics enable-mixed-moe-lora-format enable-moe-shared-loras
    enable-nccl-comm-suspend enable-per-request-metrics enable-prefix-caching
    enable-prompt-tokens-details enable-request-id-headers enable-return-routed-experts
    enable-server-load-tracking enable-shm-tensor-arena enable-tower-connector-lora
    enforce-eager eplb-config exclude-tools-when-tool-choice-none expert-placement-strategy
    fail-on-environ-validation fully-sharded-loras gdn-prefill-backend gpu-memory-utilization
    h11-max-header-count h11-max-incomplete-event-size ignore-patterns interleave-mm-strings
    jit-monitor-mode jit-monitor-verbose kda-decode-backend kda-prefill-backend
    kv-cache-dtype-skip-layers kv-cache-dtype kv-cache-memory-bytes
    kv-cache-metrics kv-cache-metrics-sample kv-offloading-size
    kv-sharing-fast-prefill language-model-only limit-mm-per-prompt linear-backend
    log-level logprobs-mode long-prefill-token-threshold-adaptive
    long-prefill-token-threshold lora-dtype lora-target-modules mamba-backend
    mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds
    mamba-ssm-cache-dtype mamba-ssu-algorithm master-addr max-cpu-loras
    max-cudagraph-capture-size max-log-len max-logprobs max-lora-cls-labels max-lora-rank
    max-loras max-num-active-seqs max-num-batched-tokens max-num-queued-reqs
    max-num-queued-tokens max-num-scheduled-tokens max-num-seqs max-parallel-loading-workers
    mm-device-do-normalize mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-only
    mm-encoder-tp-mode mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb
    mm-processor-cache-type mm-processor-device mm-shm-cache-max-object-size-mb
    mm-tensor-ipc model-impl moe-backend nnodes node-rank num-gpu-blocks-override
    numa-bind numa-bind-cpus numa-bind-nodes offload-backend offload-group-size
    offload-num-in-group offload-params offload-prefetch-step optimization-level
    override-generation-config per-request-spec-decode-metrics performance-mode
    pooler-config prefill-context-parallel-size prefill-schedule-interval
    prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit quantization
    reasoning-config reasoning-parser renderer-num-workers replayssm-buffer-len
    response-role return-sampling-mask return-tokens-as-token-ids revision runner
    safetensors-load-strategy safetensors-prefetch-block-size
    safetensors-prefetch-num-threads scheduler-reserve-full-isl scheduling-policy seed
    show-hidden-metrics-for-version shutdown-timeout skip-mm-profiling skip-tokenizer-init
    sleep-mode-offload-cudagraph sleep-preserve-parameter-names sparse-indexer-topk-backend
    spec-tokens specialize-active-lora sse-keep-alive-interval stream-interval
    swa-bounded-replay time-scale tokenizer-revision tokens-only tool-call-parser
    tool-strict-level ubatch-size use-fp64-gumbel use-replayssm use-tqdm-on-load
    uvicorn-log-level video-pruning-method video-pruning-rate watermark
"""
"""They change speed, limits, numbers and answers of their own deployment."""

_RISKS = {
    "may load code": """
    additional-config attention-config aux-output-config code-revision compilation-config
    config-format config diffusion-config distributed-executor-backend enable-mm-embeds
    enable-prompt-embeds engram-config hf-overrides io-processor-plugin ir-op-priority
    kernel-config kv-offloading-backend load-format log-config-file logging-config
    logits-processors media-io-kwargs middleware mm-processor-kwargs model-class-overrides
    model-loader-extra-config pt-load-map-location quantization-config ray-workers-use-nsight
    reasoning-parser-plugin scheduler-cls spec-method speculative-config
    structured-outputs-config tokenizer-mode tool-parser-plugin trust-remote-code
    trust-request-chat-template trust-request-mm-kwargs worker-cls worker-extension-cls
    """,
    "reads or writes files": """
    latency
    allowed-local-media-path chat-template default-mm-loras download-dir enable-ssl-refresh
    generation-config hf-config-path lora-modules mm-encoder-fp8-scale-path
    mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path profiler-config
    ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile uds
    """,
    "opens connections or the API": """
    allow-credentials allowed-headers allowed-media-domains allowed-methods allowed-origins
    api-key collect-detailed-traces elastic-ep-max-dp-size enable-elastic-ep
    enable-fault-tolerance enable-scale-out fault-tolerance-config hf-token
    otlp-traces-endpoint root-path spec-model tokenizer tool-server weight-transfer-config
    """,
    "says where KV goes": """
    ec-manager-config ec-transfer-config kv-events-config kv-transfer-config
    """,
    "shows or keeps more of requests": """
    enable-log-deltas enable-log-outputs enable-log-requests enable-logging-iteration-details
    enable-offline-docs enable-sleep-mode enable-tokenizer-info-endpoint enable-trace-replay
    fingerprint-mode fingerprint-value log-error-stack watermark-config
    """,
    "is Cleave's to set": """
    api-server-count data-parallel-address data-parallel-backend data-parallel-external-lb
    data-parallel-hybrid-lb data-parallel-multi-port-external-lb data-parallel-rank
    data-parallel-rpc-port data-parallel-size-local data-parallel-size
    data-parallel-start-rank data-parallel-supervisor-port
    dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
    dp-supervisor-probe-timeout-s grpc grpc-port headless host master-port max-model-len
    model pipeline-parallel-size port served-model-name tensor-parallel-size
    """,
    "is for tests with emulated engines": """
    fault-injection kv-bandwidth-gbps kv-latency-ms
    """,
}
"""By risk. JSON that may name a class, a module or a file counts as code."""

_UNKNOWN = "is not known to this version of Cleave"
_MANY = 1 << 16
_PARSERS = [load_parser(engine) for engine in EngineType]


def _read(text: str) -> list[str]:
    return [f"--{name}" for name in text.split()]


HARMLESS = frozenset(_read(_HARMLESS))
"""Flags that are harmless."""
RISKS = {flag: risk for risk, text in _RISKS.items() for flag in _read(text)}
"""What the others could do, by flag."""


def _find(name: str) -> EngineFlag | None:
    return next(filter(None, (parser.find(name) for parser in _PARSERS)), None)


def _name_switch(name: str) -> str:
    """The flag itself, for `--no-NAME` of a switch."""
    flag = _find(name)
    is_negation = flag is not None and flag.negated and name.startswith("--no-")
    return f"--{name.removeprefix('--no-')}" if is_negation else name


def find_risk(flag: str) -> str:
    """What a flag, with hyphens and in full, could do; empty: it is harmless."""
    name = _name_switch(flag)
    return "" if name in HARMLESS else RISKS.get(name, _UNKNOWN)


def count_values(name: str) -> int:
    """The most values that may follow a flag; one if it is not known."""
    flag = _find(name)
    if flag is None or flag.values == "?":
        return 1
    return _MANY if flag.values == "+" else int(flag.values)
