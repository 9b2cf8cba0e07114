"""How long an engine can copy a prompt's KV back from host memory, and how fast.

Called by the router for instances that report such memory, and by the simulator, which compiles it.
The rules are those of vLLM 0.32's OffloadingConnector (`offloading/scheduler.py`, and in
`kv_offload/cpu` `manager.py` and `policies/lru.py`), as its default options set them:
1. A full block of a prompt is copied to host memory when it is computed, not when the GPU evicts
   it: so host memory has what the GPU has, and not the sum but the larger of both counts. Blocks of
   answers are not copied (`offload_prompt_only`), and what comes from host memory is there already.
2. The block that was used longest ago is evicted first. A request uses all blocks of its prompt,
   and its first block last, when it ends.
3. Blocks that follow those on the GPU are looked up in host memory and copied back as long as each
   is there, while other prompts are computed. Then the GPU caches them as if they were computed.

What is hard: these two caches age by different clocks. A router has one for each engine, tokens
written to the GPU's KV; host memory gets less: neither answers, nor what it had already.
"""

_MAX_RATIO = 16.0
"""Of written to copied tokens: both are estimates, and the latter can be next to nothing."""
_MIN_LOADED_TOKENS = 20_000
"""Tokens that an engine has copied back from which its own rate counts."""


def measure_reach(gpu_tokens: float, host_tokens: float, written: float, stored: float) -> float:
    """Tokens that are written to the GPU's KV until neither the GPU nor host memory has a block
    that was used before.

    `gpu_tokens`, `host_tokens`: what each holds. `written`: tokens written to the GPU's KV since
    the engine started, `stored` those of them that were copied to host memory; their ratio is
    assumed to stay. All of one unit.
    """
    if stored <= 0.0 or written <= stored:
        return max(gpu_tokens, host_tokens)
    return max(gpu_tokens, host_tokens * min(written / stored, _MAX_RATIO))


def estimate_load_token_ms(loaded: float, load_ms: float, assumed_ms: float) -> float:
    """ms to copy one token back: of the `loaded` tokens, which took `load_ms`, once these are many,
    else as assumed; 0 if that is not known."""
    if loaded >= _MIN_LOADED_TOKENS and load_ms > 0.0:
        return load_ms / loaded
    return assumed_ms if assumed_ms > 0.0 else 0.0
