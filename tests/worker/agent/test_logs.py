"""What an agent and the engine below it write."""

import json

EMULATED = ("--engine", "emulated", "--model", "opt-13b", "--served-model-name", "m")


def end(agent) -> str:
    agent.until(lambda registration: registration.restarts >= 1)
    agent.process.terminate()
    assert agent.wait() == 0
    return agent.log.read_text()


def test_with_json_each_line_is_an_object_that_names_the_instance_also_the_engines(agents) -> None:
    agent = agents.start(
        "m-0", "mixed", *EMULATED, "--log-format", "json", engine_args=("--no-such-flag",)
    )
    lines = [json.loads(line) for line in end(agent).splitlines()]
    assert {line["instance"] for line in lines} == {"m-0"}
    engine = [line["message"] for line in lines if line["logger"] == "engine"]
    assert any("no-such-flag" in message for message in engine)
    assert not any("[engine]" in message for message in engine)
    assert any(line["logger"].startswith("cleave_worker.agent") for line in lines)


def test_as_text_the_engines_lines_are_marked(agents) -> None:
    agent = agents.start("m-0", "mixed", *EMULATED, engine_args=("--no-such-flag",))
    lines = end(agent).splitlines()
    assert any(line.startswith("[engine] ") and "no-such-flag" in line for line in lines)
    assert any(" INFO m-0: " in line for line in lines)
