"""Every architecture that vLLM registers is sized as vLLM allocates it, or refused by name."""

from collections import Counter
from collections.abc import Callable
from types import ModuleType

import pytest

from cleave.perf.model import config_classes, model_shape
from cleave.perf.model.family_table import FAMILIES, OUTER_TYPES

Import = Callable[[str], ModuleType]


def test_no_registered_architecture_is_sized_wrongly_without_a_word(module: Import) -> None:
    architectures = module("architectures")
    registered, measured = architectures.read_recorded()
    judged = architectures.judge(registered, measured)
    wrong = {
        name: each
        for name, each in judged.items()
        if each != "equal"
        and not each.startswith(("refused: ", "not compared: ", "its language model", "as another"))
    }
    assert not wrong
    counts = Counter(each.partition(":")[0] for each in judged.values())
    assert len(judged) > 300
    assert counts["equal"] > 70
    assert counts["not compared"] < 8


def test_every_type_that_plans_know_is_sized_as_vllm_allocates(module: Import) -> None:
    architectures = module("architectures")
    _, measured = architectures.read_recorded()
    for name, theirs in measured.items():
        ours = architectures.compute(architectures.build_config(name))
        assert not isinstance(ours, str), (name, ours)
        if not isinstance(theirs, str):
            assert not architectures.describe_difference(ours, theirs), name


def test_the_table_of_architectures_is_up_to_date(module: Import) -> None:
    architectures = module("architectures")
    table = architectures.build_table(*architectures.read_recorded())
    assert table in architectures.run.README.read_text()


def test_a_class_of_another_type_is_refused(module: Import) -> None:
    registered, _ = module("architectures").read_recorded()
    for model_type in FAMILIES:
        known = config_classes.find_class(model_type).architectures
        for name in [*registered][:: 1 + len(registered) // 40]:
            if name not in known and known:
                config = {"architectures": [name], "model_type": model_type}
                with pytest.raises(model_shape.UnknownModelError, match="architectures is"):
                    model_shape.from_config("m", config)


def test_a_part_is_sized_as_the_model_alone(module: Import) -> None:
    architectures = module("architectures")
    tried = 0
    for outer in sorted(OUTER_TYPES):
        known = config_classes.find_class(outer)
        config = architectures.build_config(known.part_type)
        if known.part and config is not None:
            part = {name: each for name, each in config.items() if name != "architectures"}
            own = {"architectures": [*known.architectures], "model_type": outer, known.part: part}
            assert architectures.compute(own) == architectures.compute(config), outer
            tried += 1
    assert tried > 10
