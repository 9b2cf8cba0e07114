"""`vllm bench serve`, once for each way to ask: python vllm_bench.py URL MODEL TOKENIZER OUTDIR.

Through its functions, not its command: that looks up a package named vllm, and its wheel for CPU is
named otherwise.
"""

import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def bench(url: str, model: str, tokenizer: str, folder: str) -> None:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for backend, path in PATHS.items():
        command = [
            *("--backend", backend, "--base-url", url, "--endpoint", path, "--model", model),
            *("--tokenizer", tokenizer, "--dataset-name", "random", "--num-prompts", "40"),
            *("--random-input-len", "64", "--random-output-len", "16", "--ignore-eos"),
            *("--max-concurrency", "8", "--disable-tqdm", "--save-result"),
            *("--result-dir", folder, "--result-filename", f"{backend}.json"),
        ]
        main(parser.parse_args(command))


if __name__ == "__main__":
    bench(*sys.argv[1:])
