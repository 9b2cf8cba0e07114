"""Why an engine ended; what vLLM 0.32 printed, shortened."""

import pytest

from cleave_worker.agent.exit_reason import CASCADE_S, ExitReason

WORKER_KILLED = """
(EngineCore pid=7) INFO 11-22 07:52:41 [core.py:102] Initializing a V1 LLM engine
(EngineCore pid=7) ERROR 11-22 07:52:58 [multiproc_executor.py:315] Worker proc VllmWorker-0 \
died unexpectedly (exit code: -4), shutting down executor.
(EngineCore pid=7) ERROR 11-22 07:52:58 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 07:52:58 [core.py:1512]     raise RuntimeError("cancelled")
(EngineCore pid=7) ERROR 11-22 07:52:58 [core.py:1512] RuntimeError: cancelled
(APIServer pid=5) INFO 11-22 07:52:59 [core_client.py:777] [shutdown] MPClient: complete
  warnings.warn('resource_tracker: There appear to be %d '
"""
CHAINED = """
(APIServer pid=5) WARNING 11-22 07:57:22 [utils.py:255] this can cause OSError: Too many open files
Traceback (most recent call last):
httpcore2.ConnectError: [Errno -2] Name or service not known

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
OSError: We couldn't connect to the hub to load the files
"""
FIELD = """
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (999999) is greater than 8192 [type=value_error]
    For further information visit the manual
"""
FLAG = """
                    [--jit-monitor-mode {error,warn}]
api_server.py: error: unrecognized arguments: --bogus
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (WORKER_KILLED, "Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting"),
        (CHAINED, "OSError: We couldn't connect to the hub to load the files"),
        (FIELD, "Value error, User-specified max_model_len (999999) is greater than 8192"),
        (FLAG, "api_server.py: error: unrecognized arguments: --bogus"),
        ("loading\nKilled\n\n", "Killed"),
        ("", ""),
    ],
)
def test_the_cause_is_reported_and_not_what_follows_from_it(output: str, cause: str) -> None:
    words = ExitReason({}, clock=lambda: 0.0)
    for line in output.split("\n"):
        words.feed(line)
    assert words.describe().startswith(cause)
    assert cause or not words.describe()


def test_an_error_of_long_ago_is_not_the_cause() -> None:
    now = 0.0
    words = ExitReason({}, clock=lambda: now)
    words.feed("ValueError: of one request")
    now = CASCADE_S + 1
    words.feed("stopping")
    assert words.describe() == "stopping"
    words.feed("RuntimeError: of the engine")
    assert words.describe() == "RuntimeError: of the engine"


@pytest.mark.parametrize("padding", ["", "x" * 280])
def test_no_secret_of_its_environment_is_reported(padding: str) -> None:
    words = ExitReason({"HF_TOKEN": "hf_abcdefgh", "HOME": "/home/me", "API_KEY": "1"})
    words.feed(f"OSError: {padding} 401 for hf_abcdefgh of /home/me, 1 time")
    assert "hf_" not in words.describe()
    assert words.describe().startswith(f"OSError: {padding}")
    assert padding or words.describe() == "OSError:  401 for *** of /home/me, 1 time"


@pytest.mark.parametrize(
    ("env", "argv", "said"),
    [
        ({}, (), "cannot reach http://me:hidden99@proxy:3128/"),
        ({"PGPASSWD": "hidden99"}, (), "no hidden99"),
        ({"REDIS_PWD": "hidden99"}, (), "no hidden99"),
        ({"BASIC_AUTH": "hidden99"}, (), "no hidden99"),
        ({"A_KEY": "prefix", "B_KEY": "prefixhidden99"}, (), "no prefixhidden99"),
        ({}, ("--api-key", "first1", "hidden99", "--port", "1"), "no hidden99"),
        ({}, ("--hf-token=hidden99",), "no hidden99"),
    ],
)
def test_no_secret_of_its_arguments_or_of_a_url_is_reported(env, argv, said: str) -> None:
    words = ExitReason(env, argv)
    words.feed(f"OSError: {said}")
    assert "hidden99" not in words.describe()
    assert "***" in words.describe()


def test_folders_and_what_is_no_secret_are_reported() -> None:
    words = ExitReason({"PWD": "/models"}, ("--max-num-batched-tokens", "123456"))
    words.feed("OSError: /models/a: 123456, see https://host/a@b")
    assert words.describe() == "OSError: /models/a: 123456, see https://host/a@b"
