"""Engines for tests of translated APIs."""

import pytest


@pytest.fixture
async def fleet(make_fleet):
    """Emulated engines: two of each role."""
    return await make_fleet({"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"})
