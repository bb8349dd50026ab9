"""A step whose reward fails with a text that no file can hold is written, and a resumed run writes it again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from fakes.fake_cluster import FakePool
from fakes.fake_run import draw, stage_of, until
from rlhfless.functions.scoring.deployment import score_groups
from rlhfless.orchestrator.experience import added_up, without_failures
from rlhfless.orchestrator.group_pipeline import collect
from rlhfless.orchestrator.ledger import NOTHING, Ledger
from rlhfless.records import Experience, Group, Score
from rlhfless.records.journal import Journal
from rlhfless.records.traces import TraceMeta, TraceWriter, read_trace
from rlhfless.rewards import Rewards
from rlhfless.scaling.prices import load_price_book
from rlhfless.spec import PythonRewardSpec, ScoringSpec
from rlhfless.telemetry.logs import RunLog

REWARD = """
import os
def score(sample_index):
    print(os.fsdecode(b"log \\xff"))
    if sample_index:
        raise ValueError(os.fsdecode(b"no such file: caf\\xe9.txt") + chr(0) + chr(0xD800))
    return 1.0
"""


class Attempt:
    """One driver of a run: its journal, trace and log in a folder, and its scoring with a real worker."""

    def __init__(self, folder: Path, reward: PythonRewardSpec, number: int) -> None:
        prices = load_price_book(None)
        self.pool = FakePool("a")
        self.journal = Journal(folder / "journal.sqlite")
        self.scoring = ScoringSpec(workers=1)
        self.log = RunLog(folder, "run")
        self._rewards = Rewards([reward], self.scoring)
        earlier = read_trace(folder / "trace") if number > 1 else NOTHING
        assert self.journal.begin_attempt() == number
        meta = TraceMeta("run", number, prices.snapshot(), {}, {})
        self.ledger = Ledger(TraceWriter(folder / "trace", meta, record_tokens=True), prices, earlier)

    async def step(self) -> Experience:
        stage = stage_of(self.pool, draw("pq"), self.journal)  # type: ignore[arg-type]

        async def score(groups: list[Group]) -> list[list[Score]]:
            return [list(each) for each in added_up(groups, [await score_groups(self._rewards, groups)], self.scoring)]

        return await collect(stage.groups(), 2, score, {})  # type: ignore[arg-type]

    def end(self, experience: Experience) -> None:
        self.ledger.add_rollouts(3, experience.groups)
        self.close()

    def close(self) -> None:
        self._rewards.close()
        self.ledger.close()
        self.journal.close()
        self.log.close()


async def test_a_step_with_such_a_failure_is_written_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: logging.Handler, record: logging.LogRecord) -> None:
        raise AssertionError(f"{record.name} could not be logged")

    monkeypatch.setattr(logging.Handler, "handleError", fail)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "outside_text_reward.py").write_text(REWARD)
    reward = PythonRewardSpec(type="python", name="judge", target="outside_text_reward:score")

    first = Attempt(tmp_path, reward, 1)
    drawing = asyncio.create_task(first.step())
    await until(lambda: len(first.pool["a"].running) == 4)
    first.pool["a"].finish()
    experience = await drawing
    kept = without_failures(experience, first.scoring, 3)
    assert [len(group.rollouts) for group in kept.groups] == [1, 1]
    first.end(experience)

    second = Attempt(tmp_path, reward, 2)
    again = await second.step()  # from the journal: no request reaches an actor
    assert second.pool["a"].requests == []
    assert second.ledger.has_rollouts_of(3)
    without_failures(again, second.scoring, 3)
    second.close()

    assert [group.rollouts[0].key for group in again.groups] == [("p", 0), ("q", 0)]
    causes = {row.reward_failures.get("judge") for row in read_trace(tmp_path / "trace").rollouts}
    (cause,) = causes - {None}
    assert cause is not None
    assert "ValueError: no such file: caf\\udce9.txt\\x00\\ud800" in cause
    logged = (tmp_path / "run.log").read_text("utf-8")
    assert logged.count(f"reward 'judge' failed on 2 of 4 samples; sample 1 of prompt 'p': {cause}") == 2
