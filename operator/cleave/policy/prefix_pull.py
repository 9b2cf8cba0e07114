"""Whether a prompt's beginning is pulled from another instance's prefix cache, or computed again.

Called by the simulator's dispatch, which compiles it, for prompts on prefill instances. With
prefill and decode apart an answer's KV lies on the decode instance, and the prompt's on the
instances that computed and pulled it; the next turn may be cheapest on another one. What is hard:
the saving has to be in the unit of `policy.prompt_cost`, so that a pull competes with waiting for
an instance that has the prefix, and not only with computing it.

Sources: Mooncake's Conductor balances by transferring the prefix where the best match of another
instance is longer than the local one (FAST 2025, algorithm 1), by a threshold on their ratio; here
the threshold is time. vLLM's NIXL connector has the mechanism for decode to prefill
(`bidirectional_kv_xfer`), with a threshold in tokens.
"""


def predict_saved_ms(
    here: float, there: float, token_ms: float, latency_ms: float, link_token_ms: float
) -> float:
    """ms by which a prompt is computed earlier if what is missing of its prefix is pulled; 0 if
    computing it takes no longer.

    `here`, `there`: tokens of the prompt that are cached at the instance, and at the one that has
    most of it. `token_ms`: computing a token, by the queue model's estimate and not its upper one:
    where times do not follow the tokens, it is 0 and nothing is pulled. A pull takes `latency_ms`
    and `link_token_ms` a token. It counts in full, although it may run while other prompts are
    computed.
    """
    return max((there - here) * (token_ms - link_token_ms) - latency_ms, 0.0)
