"""A KV connector for vLLM's scheduler alone: it says what is to be pulled, and moves nothing."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.outputs import KVConnectorOutput as KVConnectorOutput


class PairConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Requests with `do_remote_decode` keep their blocks when they end; those with
    `do_remote_prefill` pull what is not cached of their prompt, once."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.started: list[tuple[str, int]] = []
        """Requests whose KV is to be pulled from now on, and its tokens."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """The tokens to pull, and that this happens between steps."""
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Its blocks are allocated."""
        if num_external_tokens:
            self.started.append((request.request_id, num_external_tokens))
            request.kv_transfer_params = None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Nothing."""
        return base.KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """Whether its blocks are kept."""
        return bool((request.kv_transfer_params or {}).get("do_remote_decode")), None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Of workers, as what follows."""

    def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""
