import importlib


def test_the_whole_answer_is_found_and_counted() -> None:
    found = importlib.import_module("searches").whole_answer(1)
    assert found.best.startswith("Colocate: ")
    assert found.num_requests > 1_000
