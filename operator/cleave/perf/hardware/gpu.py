"""GPU types: compute, memory, links, power, price. Used by the planner's latency models.

What is hard: vendors advertise sparse rates and two-way bandwidths. Here all rates are dense, all
bandwidths are one way, and memory is what CUDA reports, not the nominal size.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches

GPU_PRODUCT = "nvidia.com/gpu.product"
"""Node label of NVIDIA's feature discovery: the kind of its GPUs."""
_CAPPED_PROMPT_SLOWDOWN = 1.30
"""Prompt phase of an H100 capped to half its power: Splitwise's performance model (its published
data, github.com/Mutinifni/splitwise-sim at 8f99e7d, data/perf_model.csv, MIT: the h100-80gb-pcap
rows are the H100's with prompt times multiplied by 1.30 and token times unchanged)."""
_MIN_CAP_SHARE = 0.5
"""Share of the rated power down to which the token phase keeps its speed (Splitwise, III-F)."""


PRICE_SOURCE = (
    "public on-demand prices of AWS us-east-1 (MI300X: Azure) in the middle of 2025, for a GPU's "
    "share of its machine"
)
"""Of the catalogue's prices."""


class UnknownGpuError(LookupError):
    """Neither the catalogue nor the cluster file describes a GPU of that name."""


class PowerCapError(ValueError):
    """A power cap so low that its effect is not known."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU type."""

    name: str
    memory_gib: float
    """Device memory as CUDA reports it."""
    memory_gbps: float
    """Memory bandwidth in GB/s."""
    dense_tflops: float
    """16-bit matrix products in TFLOP/s, without sparsity."""
    fp8_tflops: float | None
    """The same in 8 bits; None: not faster than in 16 bits."""
    nvlink_gbps: float | None
    """Bandwidth to all other GPUs of the node in total, in GB/s one way; None: PCIe only."""
    pcie_gbps: float
    """PCIe bandwidth in GB/s one way."""
    power_watts: float
    """Power at full load, or the power cap."""
    price_per_hour: float
    """Price of one GPU; in the catalogue in US dollars."""
    labels: tuple[str, ...] = ()
    """Other names; the first is the value of the node label `nvidia.com/gpu.product`."""
    all_reduce_gbps: float | None = None
    """Measured bus bandwidth of all-reduces over PCIe in GB/s; None: not measured on this host."""
    prompt_slowdown: float = 1.0
    """Factor on prompt times under the power cap; `dense_tflops` already includes it."""
    limitation: str | None = None
    """Why Cleave's images do not run on it, in one sentence; None: they do."""

    @property
    def product(self) -> str:
        """The value of the nodes' label `nvidia.com/gpu.product`, or the name if not known."""
        return self.labels[0] if self.labels else self.name

    @property
    def memory_bytes(self) -> int:
        """Device memory in bytes."""
        return round(self.memory_gib * 2**30)

    def get_tflops(self, is_8_bit: bool) -> float:
        """Dense matrix products in TFLOP/s."""
        return (self.fp8_tflops or self.dense_tflops) if is_8_bit else self.dense_tflops

    def with_power_cap(self, watts: float) -> "Gpu":
        """The same GPU under a power cap: prompts slow down, decoding does not.

        Splitwise (section III-F, fig. 9) shows that token generation keeps its speed down to half
        the power; the published slowdown of prompts at half power is 1.30. The linear interpolation
        in between is an assumption, not measured. A cap above the rated power changes nothing.
        Raises PowerCapError below half, where no measurements exist.
        """
        if watts >= self.power_watts:
            return self
        share = watts / self.power_watts
        if not share >= _MIN_CAP_SHARE:
            raise PowerCapError(
                f"powerCapWatts {watts:g} is below half of the {self.power_watts:g} W of "
                f"{self.name}; how decoding slows down there is not known, "
                f"set {self.power_watts * _MIN_CAP_SHARE:g} or more"
            )
        slowdown = 1 + (_CAPPED_PROMPT_SLOWDOWN - 1) * (1 - share) / (1 - _MIN_CAP_SHARE)
        return replace(
            self,
            dense_tflops=self.dense_tflops / slowdown,
            fp8_tflops=self.fp8_tflops / slowdown if self.fp8_tflops else None,
            power_watts=watts,
            prompt_slowdown=slowdown,
        )


def find_gpu(name: str, own: Iterable[Gpu] = ()) -> Gpu:
    """The GPU of this name or label, ignoring case and punctuation; `own` before the catalogue.
    Raises UnknownGpuError, which suggests similar names."""
    by_word: dict[str, Gpu] = {}
    for gpu in (*own, *CATALOGUE):
        for word in (gpu.name, *gpu.labels):
            by_word.setdefault(_normalize_name(word), gpu)
    match = by_word.get(_normalize_name(name))
    if match is not None:
        return match
    if why := explain_part(name):
        raise UnknownGpuError(
            f"{name!r} {why}; describe the part as a GPU of its own, or use whole ones"
        )
    by_model = {word.removeprefix("nvidia"): gpu for word, gpu in reversed(by_word.items())}
    model = _normalize_name(name).removeprefix("nvidia")
    close = [word for word in by_model if model and word.startswith(model)][::-1]
    close = close or get_close_matches(model, by_model, n=2, cutoff=0.7)
    similar = list(dict.fromkeys(by_model[word].name for word in close))
    names = list(dict.fromkeys(gpu.name for gpu in by_word.values()))
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"known: {', '.join(names)}"
    raise UnknownGpuError(f"unknown GPU {name!r}; {hint}")


def explain_part(label: str) -> str:
    """Why a node with this value of nvidia.com/gpu.product offers parts of GPUs, as NVIDIA's
    feature discovery marks them; empty: it does not say so."""
    if "-MIG-" in label:
        return "is a part of a GPU (MIG)"
    return "is a GPU that pods share" if label.endswith("-SHARED") else ""


def _normalize_name(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


_ARM = "its nodes have Arm processors, and Cleave's images are built for x86-64 only"
_VOLTA = "the images' CUDA 13 has no code for compute capability 7.0; the oldest is 7.5"
_ROCM = "the images contain CUDA, and pods request nvidia.com/gpu"

_GEFORCE = "NVIDIA-GeForce-RTX"
CATALOGUE: tuple[Gpu, ...] = (
    # Compute, bandwidth, links and power: the vendors' data sheets named on each line. Memory: what
    # torch.cuda reports on such a machine. Prices: indicative, from public price lists
    # (PRICE_SOURCE). GPUs marked * have the price of the GPU named there.
    #
    # NVIDIA A100 data sheet (2021)
    Gpu(
        *("A100-SXM-40GB", 39.4, 1555, 312, None, 300, 32, 400, 2.75),
        labels=("NVIDIA-A100-SXM4-40GB", "A100-40GB", "A100-SXM4-40GB"),
    ),
    Gpu(
        *("A100-SXM-80GB", 79.15, 2039, 312, None, 300, 32, 400, 3.43),
        labels=("NVIDIA-A100-SXM4-80GB", "A100-80GB", "A100-SXM4-80GB"),
    ),
    Gpu(
        *("A100-PCIe-80GB", 79.15, 1935, 312, None, None, 32, 300, 3.43),
        labels=("NVIDIA-A100-80GB-PCIe", "A100-80GB-PCIe"),
    ),
    Gpu(
        *("A100-PCIe-40GB", 39.4, 1555, 312, None, None, 32, 250, 2.75),
        labels=("NVIDIA-A100-PCIE-40GB", "A100-40GB-PCIe"),
    ),
    # NVIDIA's data sheet of the A800 (2022): the A100 with less NVLink. * A100
    Gpu(
        *("A800-SXM-80GB", 79.15, 2039, 312, None, 200, 32, 400, 3.43),
        labels=("NVIDIA-A800-SXM4-80GB", "A800-80GB", "A800-SXM4-80GB"),
    ),
    Gpu(
        *("A800-PCIe-80GB", 79.15, 1935, 312, None, None, 32, 300, 3.43),
        labels=("NVIDIA-A800-80GB-PCIe", "A800-80GB-PCIe"),
    ),
    # NVIDIA H100 data sheet (2023), H200 data sheet (2024), DGX B200 data sheet (2024); the memory
    # of the B200 is driven at 7.67 TB/s, not 8 (pytorch/ao, pull request 4002)
    Gpu(
        *("H100-SXM-80GB", 79.1, 3350, 989, 1979, 450, 64, 700, 6.88),
        labels=("NVIDIA-H100-80GB-HBM3", "H100", "H100-80GB", "H100-SXM", "H100-SXM5-80GB"),
    ),
    Gpu(
        *("H200-SXM-141GB", 139.8, 4800, 989, 1979, 450, 64, 700, 7.91),
        labels=("NVIDIA-H200", "H200", "H200-141GB", "H200-SXM"),
    ),
    Gpu(
        *("B200-SXM-180GB", 178.35, 7672, 2250, 4500, 900, 64, 1000, 14.24),
        labels=("NVIDIA-B200", "B200", "B200-180GB"),
    ),
    # NVIDIA H100 PCIe, H100 NVL and H200 NVL product briefs (2022, 2024): NVLink joins pairs, or
    # four, not counted. * H100-SXM-80GB; H200: H200-SXM-141GB
    Gpu(
        *("H100-PCIe-80GB", 79.1, 2039, 756, 1513, None, 64, 350, 6.88),
        labels=("NVIDIA-H100-PCIe", "H100-PCIe"),
    ),
    Gpu(
        *("H100-NVL-94GB", 93.0, 3938, 835, 1671, None, 64, 400, 6.88),
        labels=("NVIDIA-H100-NVL", "H100-NVL"),
    ),
    Gpu(
        *("H200-NVL-141GB", 139.8, 4800, 835, 1671, None, 64, 600, 7.91),
        labels=("NVIDIA-H200-NVL", "H200-NVL"),
    ),
    # NVIDIA's data sheets of the variants for China (2023): H800 with less NVLink, H20 with fewer
    # multiprocessors. * H100-SXM-80GB
    Gpu(
        *("H800-SXM-80GB", 79.1, 3350, 989, 1979, 200, 64, 700, 6.88),
        labels=("NVIDIA-H800", "H800", "H800-80GB"),
    ),
    Gpu(
        *("H20-SXM-96GB", 95.0, 4000, 148, 296, 450, 64, 400, 6.88),
        labels=("NVIDIA-H20", "H20", "H20-96GB"),
    ),
    # NVIDIA GH200 data sheet (2024): one GPU a node, links over the network. * H200-SXM-141GB
    Gpu(
        *("GH200-96GB", 94.5, 4000, 989, 1979, None, 64, 900, 7.91),
        labels=("NVIDIA-GH200-480GB", "GH200"),
        limitation=_ARM,
    ),
    Gpu(
        *("GH200-144GB", 140.0, 4900, 989, 1979, None, 64, 900, 7.91),
        labels=("NVIDIA-GH200-144G-HBM3e",),
        limitation=_ARM,
    ),
    # Rates, memory by nvidia-smi (less 0.6 GiB, as on the others) and power as in aiconfigurator
    # 0.12.0 (systems/{b300_sxm,gb200,gb300,rtx_pro_6000_server}.yaml, Apache-2.0), which cites
    # NVIDIA's data sheets. * B200-SXM-180GB; RTX PRO: L40S
    Gpu(
        *("B300-SXM-288GB", 268.0, 7750, 2250, 4500, 900, 64, 1100, 14.24),
        labels=("NVIDIA-B300-SXM6-AC", "NVIDIA-B300", "B300"),
    ),
    Gpu(
        *("GB200-NVL", 184.4, 8000, 2500, 5000, 900, 64, 1200, 14.24),
        labels=("NVIDIA-GB200", "GB200"),
        limitation=_ARM,
    ),
    Gpu(
        *("GB300-NVL", 276.9, 8000, 2500, 5000, 900, 64, 1400, 14.24),
        labels=("NVIDIA-GB300", "GB300"),
        limitation=_ARM,
    ),
    Gpu(
        *("RTX-PRO-6000-Server", 95.0, 1792, 467.8, 935.6, None, 64, 600, 1.86),
        labels=("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", "RTX-PRO-6000"),
    ),
    # NVIDIA RTX PRO 6000 Blackwell data sheets (2025): dense FP4 is half of the AI TOPS
    # there, FP8 a quarter, 16 bits an eighth. * L40S
    Gpu(
        *("RTX-PRO-6000-Workstation", 95.0, 1792, 500, 1000, None, 64, 600, 1.86),
        labels=("NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition",),
    ),
    Gpu(
        *("RTX-PRO-6000-Max-Q", 95.0, 1792, 438.9, 877.8, None, 64, 300, 1.86),
        labels=("NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition",),
    ),
    # NVIDIA data sheets: RTX 6000 Ada (2022), L40 (2022), L20 (2023), A40 (2020), RTX A6000 (2020),
    # A30 (2021), A10 (2021), T4 (2018); their NVLink joins pairs, not counted. Memory: as on L40S,
    # A10G and others of the same size. * L40S; A30 and A10: A10G
    Gpu(
        *("RTX-6000-Ada", 47.4, 960, 364, 728, None, 32, 300, 1.86),
        labels=("NVIDIA-RTX-6000-Ada-Generation",),
    ),
    Gpu(*("L40", 44.4, 864, 181, 362, None, 32, 300, 1.86), labels=("NVIDIA-L40", "L40-48GB")),
    Gpu(*("L20", 44.4, 864, 119.5, 239, None, 32, 275, 1.86), labels=("NVIDIA-L20", "L20-48GB")),
    Gpu(*("A40", 44.4, 696, 149.7, None, None, 32, 300, 1.86), labels=("NVIDIA-A40", "A40-48GB")),
    Gpu(*("RTX-A6000", 47.4, 768, 154.8, None, None, 32, 300, 1.86), labels=("NVIDIA-RTX-A6000",)),
    Gpu(*("A30", 23.4, 933, 165, None, None, 32, 165, 1.01), labels=("NVIDIA-A30", "A30-24GB")),
    Gpu(*("A10", 22.1, 600, 125, None, None, 32, 150, 1.01), labels=("NVIDIA-A10", "A10-24GB")),
    Gpu(*("T4", 14.56, 320, 65, None, None, 16, 70, 0.53), labels=("Tesla-T4", "NVIDIA-T4")),
    # NVIDIA L40S data sheet (2023), L4 data sheet (2023), A10G data sheet (2021)
    Gpu(*("L40S", 44.4, 864, 362, 733, None, 32, 350, 1.86), labels=("NVIDIA-L40S", "L40S-48GB")),
    Gpu(*("L4", 22.0, 300, 121, 242, None, 32, 72, 0.80), labels=("NVIDIA-L4", "L4-24GB")),
    Gpu(*("A10G", 22.1, 600, 70, None, None, 32, 300, 1.01), labels=("NVIDIA-A10G", "A10G-24GB")),
    # NVIDIA's white papers of GA102 (2020), Ada (2022) and Blackwell RTX (2025), products of 16 and
    # 8 bits with sums of 32; data sheet of the DGX Spark (2025): an eighth of FP4 with sparsity.
    # Memory: as CUDA reports it, less than on the label. * A10G; RTX 5090 and GB10: L40S
    Gpu(*("RTX-3090", 23.5, 936, 71, None, None, 32, 350, 1.01), labels=(f"{_GEFORCE}-3090",)),
    Gpu(*("RTX-4090", 23.5, 1008, 165.2, 330.3, None, 32, 450, 1.01), labels=(f"{_GEFORCE}-4090",)),
    Gpu(*("RTX-5090", 31.3, 1792, 209.5, 419, None, 64, 575, 1.86), labels=(f"{_GEFORCE}-5090",)),
    Gpu(
        *("GB10", 119.6, 273, 125, 250, None, 64, 140, 1.86),
        labels=("NVIDIA-GB10",),
        limitation=_ARM,
    ),
    # NVIDIA V100 data sheet (2020)
    Gpu(
        *("V100-SXM-16GB", 15.77, 900, 125, None, 150, 16, 300, 3.06),
        labels=("Tesla-V100-SXM2-16GB", "V100-16GB", "V100-SXM2-16GB"),
        limitation=_VOLTA,
    ),
    Gpu(
        *("V100-SXM-32GB", 31.74, 900, 125, None, 150, 16, 300, 3.90),
        labels=("Tesla-V100-SXM2-32GB", "V100-32GB", "V100-SXM2-32GB"),
        limitation=_VOLTA,
    ),
    # The PCIe variants of the same data sheet, and V100S (2019). * V100-SXM
    Gpu(
        *("V100-PCIe-16GB", 15.77, 900, 112, None, None, 16, 250, 3.06),
        labels=("Tesla-V100-PCIE-16GB", "V100-PCIE-16GB"),
        limitation=_VOLTA,
    ),
    Gpu(
        *("V100-PCIe-32GB", 31.74, 900, 112, None, None, 16, 250, 3.90),
        labels=("Tesla-V100-PCIE-32GB", "V100-PCIE-32GB"),
        limitation=_VOLTA,
    ),
    Gpu(
        *("V100S-PCIe-32GB", 31.74, 1134, 130, None, None, 16, 250, 3.90),
        labels=("Tesla-V100S-PCIE-32GB", "V100S"),
        limitation=_VOLTA,
    ),
    # AMD Instinct MI300X data sheet (2023); seven Infinity Fabric links of 64 GB/s one way
    Gpu(
        *("MI300X", 191.98, 5300, 1307, 2615, 448, 64, 750, 6.00),
        labels=("AMD_Instinct_MI300X_OAM", "AMD-Instinct-MI300X", "MI300X-192GB"),
        limitation=_ROCM,
    ),
)
