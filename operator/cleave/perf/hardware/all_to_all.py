"""Time to bring tokens to their experts and back: dispatch and combine of one layer.

Used by cleave.perf.hardware.expert_group for instances of data-parallel ranks. What is hard:
engines have several kernels for it, which move different numbers of bytes. vLLM's
`--all2all-backend` names one.

Published, not measured by Cleave, all with tokens of 7,168 values, 8 experts for each, dispatch in
8 bits and combine in 16: DeepEP on H200 over 1 to 8 nodes with 400 Gbit/s for each GPU, and
TensorRT-LLM's kernel on GB200 over 8 to 64 GPUs of one NVLink domain (aiconfigurator-core 0.12.0,
Apache-2.0: sglang 0.5.6.post2 `wideep_deepep_*`, trtllm 1.3.0rc10 `trtllm_alltoall`). The constants
are fitted to them by least mean relative error: 3 % (low latency), 3 and 11 % (high throughput in
and between nodes), 5 % (NVLink domain); `benchmarks/wide/exchanges.py` prints it. DeepEP's own
figures (github.com/deepseek-ai/DeepEP, docs/legacy.md, low latency on H800) are longer by 4 to 8 %
with EP 16 to 64, 12 % with EP 128 and 8 % with EP 256, and 17 % shorter in one node.
Over 8 nodes the published high-throughput kernel takes 2.5 times
as long as this model and as DeepEP's own 50 GB/s: a congested network, which is not modelled.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from cleave.perf.hardware.link import Link, LinkEfficiency, LinkKind


class AllToAllBackend(StrEnum):
    """The values of vLLM's `--all2all-backend` whose times are known."""

    ALL_GATHER = "allgather_reducescatter"
    """vLLM's default: every GPU gets the tokens of all, and returns a sum of them."""
    HIGH_THROUGHPUT = "deepep_high_throughput"
    LOW_LATENCY = "deepep_low_latency"
    DEEPEP = "deepep_v2"
    """One interface for both: the faster of the two is assumed."""
    NVLINK = "flashinfer_nvlink_two_sided"
    """Inside one NVLink domain; elsewhere the same is assumed as of DEEPEP."""


# Each of a pair of dispatch and combine over one kind of link.
_LOW_LATENCY_NODE = LinkEfficiency(24.0, 0.47)
_LOW_LATENCY_NETWORK = LinkEfficiency(50.0, 0.92)
_THROUGHPUT_NODE = LinkEfficiency(86.0, 0.76)
# A token crosses the network once for each node, which counts the node it is on.
_THROUGHPUT_NETWORK = LinkEfficiency(186.0, 1.23)
_NVLINK_DOMAIN = LinkEfficiency(41.0, 0.50)
_DOMAIN_FROM_GB_PER_S = 900.0
_DISPATCH_BYTES, _COMBINE_BYTES = 1, 2
"""Of one value of a token."""


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """The GPUs that share the experts of each layer."""

    gpus: int
    gpus_per_node: int
    """GPUs that `node_link` joins: those of a node, or of an NVLink domain of several."""
    node_link: Link
    network: Link
    """From one GPU to another node."""

    @property
    def nodes(self) -> int:
        """Nodes, or NVLink domains, that the group spans."""
        return -(-self.gpus // self.gpus_per_node)


def compute_all_to_all_ms(
    group: GpuGroup, backend: AllToAllBackend, rows: float, hidden_size: int, per_token: int
) -> float:
    """Dispatch and combine of one layer, with `rows` tokens on each GPU of `hidden_size` values,
    each for `per_token` experts on GPUs drawn evenly; 0 for one GPU. Over TCP only the all-gather
    works."""
    if group.gpus <= 1:
        return 0.0
    is_tcp = group.nodes > 1 and group.network.kind is LinkKind.ETHERNET
    if backend is AllToAllBackend.ALL_GATHER or is_tcp:
        return _compute_all_gather_ms(group, rows, hidden_size)
    token_bytes = hidden_size * (_DISPATCH_BYTES + _COMBINE_BYTES)
    is_domain = group.nodes == 1 and group.node_link.gb_per_s >= _DOMAIN_FROM_GB_PER_S
    if is_domain:
        copies = count_distinct(group.gpus, per_token)
        return _compute_kernel_ms(_NVLINK_DOMAIN, group.node_link, rows * copies * token_bytes)
    # High throughput: a token goes once to each node (in one: to each GPU), and is forwarded there.
    # Low latency: a copy for each of its experts.
    if group.nodes == 1:
        copies = count_distinct(group.gpus, per_token)
        direct = per_token * (group.gpus - 1) / group.gpus
        kernels, link = (_THROUGHPUT_NODE, _LOW_LATENCY_NODE), group.node_link
    else:
        copies = count_distinct(group.nodes, per_token)
        direct = per_token * (group.nodes - 1) / group.nodes
        kernels, link = (_THROUGHPUT_NETWORK, _LOW_LATENCY_NETWORK), group.network
    high, low = (
        _compute_kernel_ms(kernel, link, rows * sent * token_bytes)
        for kernel, sent in zip(kernels, (copies, direct), strict=True)
    )
    chosen = {AllToAllBackend.HIGH_THROUGHPUT: high, AllToAllBackend.LOW_LATENCY: low}
    return chosen.get(backend, min(high, low))


def count_distinct(places: int, draws: int) -> float:
    """Expected number of distinct ones among `draws` even draws from `places`."""
    missed: float = (1 - 1 / places) ** draws
    return places * (1 - missed)


def _compute_kernel_ms(kernel: LinkEfficiency, link: Link, size_bytes: float) -> float:
    """`link.latency_us` is not added: the published times include a network's."""
    return kernel.start_us / 1e3 + size_bytes / (link.gb_per_s * kernel.bandwidth_share * 1e6)


def _compute_all_gather_ms(group: GpuGroup, rows: float, hidden_size: int) -> float:
    """All-gather and reduce-scatter of all tokens in 16 bits move what one all-reduce of them does,
    but are two calls. Between nodes NCCL divides them over the cards of all GPUs of a node. An
    estimate from Vidur's all-reduces and sends: no times of these calls are published, and measured
    all-reduces do not tell them."""
    size_bytes = group.gpus * rows * hidden_size * _COMBINE_BYTES
    node_link = link = replace(group.node_link, all_reduce_gbps=None)
    if group.nodes > 1:
        shared = min(group.network.gb_per_s * group.gpus_per_node, group.node_link.gb_per_s)
        link = Link(group.network.kind, shared, group.network.latency_us)
    second_ms = node_link.compute_all_reduce_ms(0, group.gpus_per_node)
    return second_ms + link.compute_all_reduce_ms(size_bytes, group.gpus)
