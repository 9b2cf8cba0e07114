"""vLLM's host memory for KV, on an engine whose KV is in host memory already.

Loaded by vLLM in `e2e/test_vllm_offloading.py`. vLLM 0.32 copies with CUDA streams only; here the
copies are made at once. Scheduling, keys, eviction and metrics are vLLM's own.
"""

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks between the engine's tensors and others of the same size."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._engine = [each.tensor for each in kv_caches.tensors]
        self._host = [each.new_zeros((num_chunks, each.shape[1])) for each in self._engine]
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._copy(job_id, self._engine, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._host, src_spec, self._engine, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def _copy(self, job_id: int, sources, source, targets, target) -> bool:
        read, written = (torch.from_numpy(each.block_ids).long() for each in (source, target))
        for tensor, other in zip(sources, targets, strict=True):
            other[written] = tensor[read]
        self._finished.append(
            TransferResult(job_id, success=True, transfer_size=1, transfer_time=1e-6)
        )
        return True


class CopyingSpec(CPUOffloadingSpec):
    """CPUOffloadingSpec with that worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        self._worker = self._worker or CopyingWorker(kv_caches, self.num_chunks)
        return self._worker
