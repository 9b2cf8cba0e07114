"""Computes a small share of clients' greedy streams again, as a whole, and compares the tokens.

Run by each gateway process for its own requests. Canaries test pairs with random words at quiet
moments; this tests what clients really got. An engine that has not received the handoff computes
the prompt under a cache salt of its own, so that no cached KV can repeat the fault. What is hard: a
long output meets near-ties, at which another engine may rightly go on differently; so only the
first token that differs counts, by the probabilities that this engine gives both.
"""

import asyncio
import logging
import secrets

import msgspec

from cleave.gateway.context import GatewayContext
from cleave.gateway.failover.resumption import COMPLETIONS_PATH
from cleave.gateway.upstream.handoff_samples import HandoffSample
from cleave.gateway.upstream.response_types import CompletionChoice, decode_completion
from cleave.gateway.witness import engine_call
from cleave.gateway.witness.engine_call import EngineCallError
from cleave.gateway.witness.pair_recorder import PairRecorder, SendProofs
from cleave.gateway.witness.witness import is_idle
from cleave.policy.pair_trust import TokenVerdict, is_near_tie
from cleave.router.errors import RouterError
from cleave.router.pair_proofs import PairResult
from cleave.rpc.v1 import agent_pb2

log = logging.getLogger(__name__)

TICK_S = 0.5
MAX_WAIT_S = 60.0
"""How long a sample waits for an idle engine."""
_NUM_LOGPROBS = 5
_RESULTS = {
    TokenVerdict.SAME: "same",
    TokenVerdict.NEAR_TIE: "near_tie",
    TokenVerdict.DIFFERENT: "different",
}


class Auditor:
    """Takes the context's samples one by one."""

    def __init__(self, context: GatewayContext, send: SendProofs) -> None:
        self._context = context
        self._recorder = PairRecorder(context, send)

    async def run(self) -> None:
        """Audit samples until cancelled."""
        try:
            while True:
                sample = self._context.handoff_samples.take()
                if sample is None:
                    await asyncio.sleep(TICK_S)
                    continue
                self._context.metrics.audits[await self._review(sample)] += 1
        finally:
            self._recorder.stop()

    async def _review(self, sample: HandoffSample) -> str:
        """The result, for the metrics."""
        end = self._context.clock() + MAX_WAIT_S
        while self._context.clock() < end:
            try:
                verdict = await self._compare(sample)
            except (
                EngineCallError,
                RouterError,
                msgspec.MsgspecError,
                UnicodeDecodeError,
            ) as error:
                log.info("a handoff of a request cannot be computed again: %s", error)
                break
            if verdict is TokenVerdict.DIFFERENT:
                self._record_fault(sample)
            if verdict is not None:
                return _RESULTS[verdict]
            await asyncio.sleep(TICK_S)
        return "skipped"

    async def _compare(self, sample: HandoffSample) -> TokenVerdict | None:
        """How the output compares with that of one engine; None: no engine is idle now.
        Raises EngineCallError, RouterError, MsgspecError, UnicodeDecodeError."""
        context, num_outputs = self._context, len(sample.output_ids)
        instances = context.router.registry.instances.values()
        # With other weights, as during their rollout, other tokens are right.
        others = [each.name for each in instances if each.target.revision != sample.decode.revision]
        pick = context.router.pick(
            sample.model,
            sample.prompt_tokens,
            num_outputs,
            colocated=True,
            excluded=others,
            suspect=(sample.decode.instance,),
        )
        try:
            instance = context.router.registry.instances.get(pick.decode.instance)
            if instance is None or not is_idle(instance, own_prompt=sample.prompt_tokens):
                return None
            fields = {
                **sample.fields,
                "prompt": msgspec.Raw(b"[%b]" % sample.prompt_ids),
                "max_tokens": num_outputs,
                "temperature": 0,
                "logprobs": _NUM_LOGPROBS,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "cache_salt": secrets.token_hex(16),
                "stream": False,
            }
            answer = await engine_call.post(
                context,
                pick.decode,
                COMPLETIONS_PATH,
                fields,
                context.make_request_id(),
                context.config.timeouts.response_s,
            )
        finally:
            context.router.release(pick)
        context.metrics.canary_seconds["audit"] += answer.ms / 1000
        if answer.status != 200:
            raise EngineCallError(f"{pick.decode.instance} answered {answer.status}")
        choices = decode_completion(answer.body).choices
        if not choices or choices[0].token_ids is None:
            raise EngineCallError(f"{pick.decode.instance} answered without token ids")
        return compare_outputs(sample.output_ids, choices[0])

    def _record_fault(self, sample: HandoffSample) -> None:
        """Suspend the pair; the witness's canaries confirm or refute the fault."""
        name = f"{sample.prefill.instance} -> {sample.decode.instance}"
        reason = f"{name}: a request's tokens differ from those of one engine"
        log.warning("%s", reason)
        decode = self._context.router.registry.instances.get(sample.decode.instance)
        if decode is not None and decode.target.boot_id == sample.decode.boot_id:
            now = self._context.clock()
            result = PairResult(
                sample.prefill.instance, agent_pb2.TRUST_SUSPECT, now, reason=reason
            )
            boots = sample.prefill.boot_id, sample.decode.boot_id
            self._recorder.record(decode, boots, result)


def compare_outputs(output_ids: list[int], choice: CompletionChoice) -> TokenVerdict:
    """Compare the tokens that a client got with those of an engine that computed all of them."""
    computed = choice.token_ids or []
    for index, (got, right) in enumerate(zip(output_ids, computed, strict=False)):
        if got == right:
            continue
        top = choice.logprobs.top_logprobs if choice.logprobs is not None else None
        likely = (top[index] or {}) if top and index < len(top) else {}
        # As vLLM writes tokens with return_tokens_as_token_ids.
        is_tie = is_near_tie(likely, f"token_id:{right}", f"token_id:{got}")
        return TokenVerdict.NEAR_TIE if is_tie else TokenVerdict.DIFFERENT
    return TokenVerdict.SAME
