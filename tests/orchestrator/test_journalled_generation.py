"""Journalled samples are not generated again, and new samples are in the journal before they count."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.fake_cluster import FakePool, rollout
from fakes.fake_run import Reader, draw, stage_of, until
from rlhfless.fleet.replica import ReplicaLost
from rlhfless.records.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_attempt()
    return journal


async def test_only_what_is_missing_is_drawn(journal: Journal) -> None:
    items = [item for prompt in draw("pq").prompts for item in draw("pq").items(prompt)]
    journal.add(3, [rollout(item, "before", 4) for item in items[:3]])  # both samples of p, one of q
    pool = FakePool("a")
    reader = Reader(stage_of(pool, draw("pq"), journal))
    await until(lambda: bool(pool["a"].running))
    assert reader.names == ["p"]
    assert list(pool["a"].running) == [("q", 1)]
    pool["a"].finish()
    await reader.task
    assert [(r.key, r.actor) for r in reader.groups[1].rollouts] == [(("q", 0), "before"), (("q", 1), "a")]
    assert [r.key for r in journal.rollouts(3)] == [item.key for item in items]


async def test_a_step_that_is_all_there_needs_no_actor(journal: Journal) -> None:
    whole = draw("pq")
    journal.add(3, [rollout(item, "before", 4) for prompt in whole.prompts for item in whole.items(prompt)])
    reader = Reader(stage_of(FakePool(), whole, journal))
    await reader.task
    assert reader.names == ["p", "q"]


async def test_groups_come_in_the_order_in_which_they_became_complete(journal: Journal) -> None:
    whole = draw("pq")
    p, q = ([rollout(item, "before", 4) for item in whole.items(prompt)] for prompt in whole.prompts)
    for samples in (p[1:], q, p[:1]):
        journal.add(3, samples)
    reader = Reader(stage_of(FakePool(), whole, journal))
    await reader.task
    assert reader.names == ["q", "p"]


async def test_a_sample_with_another_seed_is_another_sample(journal: Journal) -> None:
    other = draw("p")
    items = [item for prompt in other.prompts for item in other.items(prompt)]
    journal.add(3, [rollout(type(item)(*item.key, item.prompt_token_ids, seed=1), "before", 4) for item in items])
    pool = FakePool("a")
    Reader(stage_of(pool, other, journal))
    await until(lambda: len(pool["a"].running) == 2)


async def test_a_sample_that_moves_is_journalled_once_when_it_has_ended(journal: Journal) -> None:
    pool = FakePool("a", "b")
    stage = stage_of(pool, draw("p"), journal)
    reader = Reader(stage)
    await until(lambda: bool(pool["a"].running))
    await stage.drain(pool["a"])  # type: ignore[arg-type]
    await until(lambda: bool(pool["b"].running))
    assert journal.rollouts(3) == []
    pool["b"].finish(tokens=9)
    await reader.task
    assert [(r.key, r.actor, len(r.token_ids)) for r in journal.rollouts(3)] == [
        (("p", 0), "b", 9),
        (("p", 1), "b", 9),
    ]


async def test_without_an_actor_nothing_is_waited_for(journal: Journal) -> None:
    with pytest.raises(ReplicaLost, match="no generation actor is left for 4 unfinished samples"):
        await Reader(stage_of(FakePool(), draw("pq"), journal)).task
