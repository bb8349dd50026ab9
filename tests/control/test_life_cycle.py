"""Which status follows which, and what may be asked for."""

from __future__ import annotations

import pytest

from rlhfless.control.lifecycle import (
    AT_REST,
    DRIVEN,
    ENDED,
    FOLLOWING,
    DesiredState,
    NotPossible,
    Status,
    apply_request,
)


@pytest.mark.parametrize(
    ("status", "wanted", "desired_state", "expected"),
    [
        ("queued", "run", "pause", ("paused", "pause")),
        ("queued", "run", "cancel", ("cancelled", "cancel")),
        ("running", "run", "pause", ("pausing", "pause")),
        ("pausing", "pause", "pause", ("pausing", "pause")),
        ("pausing", "pause", "run", ("running", "run")),
        ("paused", "pause", "run", ("queued", "run")),
        ("paused", "pause", "pause", ("paused", "pause")),
        ("paused", "pause", "cancel", ("cancelled", "cancel")),
        ("running", "run", "run", ("running", "run")),
        ("running", "run", "cancel", ("cancelling", "cancel")),
        ("pausing", "pause", "cancel", ("cancelling", "cancel")),
        ("cancelling", "cancel", "cancel", ("cancelling", "cancel")),
        ("cancelled", "cancel", "cancel", ("cancelled", "cancel")),
    ],
)
def test_what_is_asked_for(status: str, wanted: str, desired_state: str, expected: tuple[str, str]) -> None:
    assert apply_request(Status(status), DesiredState(wanted), DesiredState(desired_state)) == expected


@pytest.mark.parametrize(
    ("status", "wanted", "desired_state", "message"),
    [
        ("succeeded", "run", "cancel", "has succeeded"),
        ("failed", "run", "pause", "has failed"),
        ("cancelled", "cancel", "run", "is cancelled"),
        ("cancelling", "cancel", "pause", "is cancelled"),
    ],
)
def test_what_is_not_possible(status: str, wanted: str, desired_state: str, message: str) -> None:
    with pytest.raises(NotPossible, match=message):
        apply_request(Status(status), DesiredState(wanted), DesiredState(desired_state))


def test_every_status_has_followers_and_ends_have_none() -> None:
    assert set(FOLLOWING) == set(Status)
    assert {status for status, following in FOLLOWING.items() if not following} == ENDED
    for status in Status:
        for wanted in DesiredState:
            for desired_state in DesiredState:
                try:
                    following, _ = apply_request(status, wanted, desired_state)
                except NotPossible:
                    continue
                assert following == status or following in FOLLOWING[status]
    assert DRIVEN.isdisjoint(AT_REST)
