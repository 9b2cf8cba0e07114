"""Which changes of a decode engine's weights the witness's comparison notices, and how often it is
wrong where there are none.

    .venv/bin/python benchmarks/quality/perturbed_weights.py --canaries 200

A canary as `cleave.gateway.witness.canary` sends it: random words, whose KV one model computes and
whose last token another one computes from that KV; `cleave.policy.pair_trust.compare_tokens`
judges the two first tokens. Here both run in this process, with transformers instead of vLLM. Each
weight gets noise of a share of its matrix's root mean square, as a light fine-tune might change it.
"""

import argparse
import copy
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cleave.local.smollm2.preparation import get_or_prepare
from cleave.policy.kv_transfer_sample import make_random_prompt
from cleave.policy.pair_trust import (
    MAX_FAULTS,
    MAX_SHIFT_NATS,
    TokenChoice,
    TokenVerdict,
    compare_tokens,
)

SHARES = (0.0, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2)
TOP = 5
REPORT_EACH = 500
"""Canaries between two tables."""
CHARACTERS = 130, 1000
"""Of prompts: about 64 to 480 tokens."""


def main() -> None:
    """Print a row for each perturbation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder; default: the demo's model")
    parser.add_argument("--canaries", type=int, default=200, help="for each perturbation")
    parser.add_argument("--seed", type=int, default=0, help="of prompts; runs add up")
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    folder = args.model or get_or_prepare(lambda *_: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
    others = {share: perturb(model, share) for share in args.shares}
    verdicts: dict[float, list[TokenVerdict]] = {share: [] for share in others}
    shifts: dict[float, list[float]] = {share: [] for share in others}
    canaries = iter_canaries(model, folder, args.canaries, args.seed)
    for number, (reference, prompt, cached) in enumerate(canaries, 1):
        for share, other in others.items():
            found = decode(other, prompt, cached)
            verdicts[share].append(compare_tokens(reference, found))
            shared = reference.logprobs.keys() & found.logprobs.keys()
            differences = [abs(reference.logprobs[n] - found.logprobs[n]) for n in shared]
            shifts[share].append(max(differences, default=0.0))
        if number % REPORT_EACH == 0 or number == args.canaries:
            print_table(verdicts, shifts)


def print_table(
    verdicts: dict[float, list[TokenVerdict]], shifts: dict[float, list[float]]
) -> None:
    """What the canaries so far have shown."""
    (count, *_) = map(len, verdicts.values())
    print(f"{count} canaries; a shift of more than {MAX_SHIFT_NATS} nats is a fault, and")
    print(f"{MAX_FAULTS} faults of 8 take a pair out\n")
    print("| perturbation | faults | near ties | median shift | greatest shift |")
    print("|---|---|---|---|---|")
    for share, found_verdicts in verdicts.items():
        faults = found_verdicts.count(TokenVerdict.DIFFERENT)
        ties = found_verdicts.count(TokenVerdict.NEAR_TIE)
        ordered = sorted(shifts[share])
        median, greatest = ordered[len(ordered) // 2], ordered[-1]
        print(f"| {share:.1%} | {faults} | {ties} | {median:.1e} | {greatest:.1e} |")
    sys.stdout.flush()


def perturb(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """A copy whose matrices have noise."""
    if not share:
        return model
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in other.parameters():
            if weights.dim() > 1:
                spread = share * weights.float().pow(2).mean().sqrt()
                noise = torch.randn(weights.shape, generator=generator) * spread
                weights += noise.to(weights.dtype)
    return other


def iter_canaries(
    model: PreTrainedModel, folder: Path, count: int, seed: int
) -> Iterator[tuple[TokenChoice, torch.Tensor, object]]:
    """The first token of the engine that computes the prompt; prompt; the KV of all but its end."""
    tokenizer, words = AutoTokenizer.from_pretrained(folder), random.Random(seed)
    for _ in range(count):
        text = make_random_prompt(words, words.randint(*CHARACTERS))
        prompt = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = model(prompt, use_cache=True, logits_to_keep=1)
        whole.past_key_values.crop(prompt.shape[1] - 1)
        yield choose(whole.logits), prompt, whole.past_key_values


def decode(model: PreTrainedModel, prompt: torch.Tensor, cached: object) -> TokenChoice:
    """The first token of the engine that gets the KV."""
    with torch.no_grad():
        return choose(model(prompt[:, -1:], past_key_values=copy.deepcopy(cached)).logits)


def choose(logits: torch.Tensor) -> TokenChoice:
    """As an engine reports it."""
    top = torch.log_softmax(logits[0, -1].float(), -1).topk(TOP)
    logprobs = dict(zip(map(str, top.indices.tolist()), top.values.tolist(), strict=True))
    return TokenChoice(next(iter(logprobs)), logprobs)


if __name__ == "__main__":
    main()
