"""Which hosts are this machine alone."""

from __future__ import annotations

import pytest

from rlhfless.functions.loopback import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "head", ""])
def test_others_can_reach_it(host: str) -> None:
    assert not is_loopback(host)
