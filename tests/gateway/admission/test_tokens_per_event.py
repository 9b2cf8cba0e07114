"""Tokens of a stream from its events, once some streams have been counted."""

from cleave.gateway.admission.tokens_per_event import SAMPLE_EVERY, TokensPerEvent

PATH = b"/v1/completions"


def test_the_first_stream_and_some_others_are_counted() -> None:
    ratios = TokensPerEvent()
    assert ratios.estimate(PATH, "m", 10) is None
    ratios.observe(PATH, "m", 10, 25)
    estimates = [ratios.estimate(PATH, "m", 8) for _ in range(SAMPLE_EVERY)]
    assert estimates.count(None) == 1
    assert set(estimates) == {None, 20}


def test_each_model_and_path_has_its_ratio_which_follows_slowly() -> None:
    ratios = TokensPerEvent()
    ratios.observe(PATH, "m", 10, 10)
    ratios.observe(PATH, "m", 10, 20)
    ratios.observe(PATH, "m", 0, 0)
    assert ratios.estimate(PATH, "m", 100) == 120
    assert ratios.estimate(PATH, "other", 100) is None
    assert ratios.estimate(b"/v1/messages", "m", 100) is None
