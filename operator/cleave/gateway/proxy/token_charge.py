"""How many tokens a tenant with a token limit is charged for one request. Pure.

Used by the proxied request while it runs and when it ends. Engines report the tokens, exactly. What
is hard is the rest: when a client leaves early, its engine has computed a prompt and generated
tokens that it has not reported yet; and an engine may report anything. Both are bounded, and by
this request alone: what other streams do never changes the price of this one.
"""

import math

from cleave.gateway.http.completion_request import CompletionRequest
from cleave.gateway.http.engine_fields import PROMPT_NAMES
from cleave.gateway.http.token_estimate import BYTES_PER_TOKEN

MIN_TOKEN_S = 0.005
"""Engines need at least so long for a token of one sequence: 8 billion weights of a byte, read at
1.6 TB/s."""


def count_charged(
    completion: CompletionRequest, prompt_tokens: int, output_tokens: int, max_model_len: int
) -> int:
    """Tokens of prompt and output, as reported, but no more than the request allows.
    `max_model_len`: the largest of the model's instances, in tokens; 0: not known."""
    report = completion.report
    if report is None:
        return prompt_tokens + output_tokens
    limit = completion.output_tokens or max_model_len
    if limit:
        output_tokens = min(output_tokens, limit * report.num_choices)
    if max_model_len:
        prompt_tokens = min(prompt_tokens, max_model_len * report.num_prompts)
    return prompt_tokens + output_tokens


def bound_prompt(completion: CompletionRequest) -> int:
    """Tokens of a prompt that no engine has counted: as estimated, but no fewer than a text of its
    size has in most languages. So nothing that looks like an image is free."""
    fields = completion.fields
    size = sum([len(fields[name]) for name in PROMPT_NAMES.intersection(fields)])
    return max(completion.prompt_tokens, size // BYTES_PER_TOKEN)


def bound_unseen(completion: CompletionRequest, unseen_s: float, *, is_streamed: bool) -> int:
    """The most tokens that an engine can have generated without an event when a client leaves;
    `unseen_s`: seconds in which nothing was read from it, 0: every event was."""
    report = completion.report
    if report is None:
        return 0
    waiting = report.interval - 1 if is_streamed else 0
    return report.num_choices * (waiting + math.ceil(unseen_s / MIN_TOKEN_S))
