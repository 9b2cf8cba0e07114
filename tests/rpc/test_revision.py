"""The revision of an instance is that of its spec and its weights."""

from hypothesis import given
from hypothesis import strategies as st

from cleave.rpc.revision import build_revision, get_spec_revision

SPEC = st.text("abcdefghij0123456789-._", max_size=20)
DIGEST = st.text("0123456789abcdef", max_size=12)


@given(SPEC, SPEC, DIGEST, DIGEST)
def test_revisions_are_equal_only_if_spec_and_weights_are(
    one: str, other: str, weights: str, others: str
) -> None:
    are_equal = build_revision(one, weights) == build_revision(other, others)
    assert are_equal == ((one, weights) == (other, others))
    assert get_spec_revision(build_revision(one, weights)) == one


def test_an_engine_that_loads_nothing_has_the_revision_of_its_spec() -> None:
    assert build_revision("r1", "") == "r1"
