"""The API admits exactly the adapters that agents take."""

from cleave.api import adapters as api
from cleave.policy import adapters as policy


def test_the_api_and_agents_have_the_same_limits() -> None:
    assert (api.NAME, api.SOURCE) == (policy.NAME, policy.SOURCE)
    assert api.MAX_ADAPTERS == policy.MAX_ADAPTERS
    fields = api.LoraAdapter.model_fields
    lengths = [
        next(each.max_length for each in fields[name].metadata if hasattr(each, "max_length"))
        for name in ("name", "source")
    ]
    assert lengths == [policy.MAX_NAME_CHARACTERS, policy.MAX_SOURCE_CHARACTERS]
