"""The revision of an instance: that of its spec, and the weights that its engine has loaded.

Instances work together if and only if their whole revisions are equal. Agents write them; all that
compares instances (routers, role flips, agents that search for peers) compares these texts, so that
no consumer can forget the weights.
"""

WEIGHTS_ENV = "CLEAVE_WEIGHTS"
"""Variable in which an engine gets the id of its weights, for what it compares with other engines;
empty: it loads none."""
_SEPARATOR = "@"
"""Not in the revision of a spec."""


def build_revision(spec_revision: str, weights: str) -> str:
    """Return the revision of an instance; `weights`: their id, empty: there are none."""
    return f"{spec_revision}{_SEPARATOR}{weights}" if weights else spec_revision


def get_spec_revision(revision: str) -> str:
    """Return the part of a revision that its spec determines."""
    return revision.partition(_SEPARATOR)[0]
