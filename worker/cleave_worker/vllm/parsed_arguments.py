"""Parses the command line of vLLM's processes, for `api_server` and `headless`.

As `vllm serve` does, except that a part of an option's name is refused: agents and admission
policies read options by their whole names.
"""

from argparse import Namespace
from typing import cast


def parse_arguments() -> Namespace:
    """Return the arguments of this process; ends it, with a message, where they are wrong."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
    return cast("Namespace", parser.parse_args())
