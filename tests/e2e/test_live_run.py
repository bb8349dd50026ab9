"""The real parts together: Ray Serve, vLLM and torch. The tests share one run and go through it in order."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import psutil
import pytest

from fakes.live_runs import Live, train_step
from rlhfless.fleet.replica import Replica
from rlhfless.functions.calls import Call, StaleCall
from rlhfless.functions.generation.deployment import WrongVersion
from rlhfless.functions.generation.messages import GenerateRequest, SampleItem
from rlhfless.functions.loopback import is_loopback
from rlhfless.orchestrator.launch import TOKEN_FILE
from rlhfless.orchestrator.rollout_request import sampling_of
from rlhfless.orchestrator.step import evaluate_held_out
from rlhfless.records import FunctionName, ReplicaState, Work
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.accounting import check_holdings, summarise
from rlhfless.scaling.function_specs import Bounds
from rlhfless.scaling.prices import PriceBook
from rlhfless.weights.check import WeightCheckFailed

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def written(live: Live) -> Trace:
    """The trace up to now; a run writes its last step's rows while it draws the next one."""
    live.run.ledger.write(live.run.pools.values())
    return read_trace(live.folder / "trace")


async def test_a_step_trains_and_its_trace_says_what_happened(live: Live) -> None:
    run = live.run
    before = run.published
    record = await train_step(run, 1)
    assert run.published.version.step == 1
    assert run.published.version.digest != before.version.digest
    trace = written(live)
    rollouts = [row for row in trace.rollouts if row.step == 1]
    assert len(rollouts) == 16
    for row in rollouts:
        assert row.version_spans[-1].end == row.response_tokens
        assert {span.version for span in row.version_spans} == {before.version.label}
        assert len(row.token_ids or ()) == len(row.logprobs or ()) == row.response_tokens
    assert record.metrics["rollout_logprob_difference_max"] < 1e-3
    assert record.metrics["reference_kl"] < 1e-4  # the reference is the policy before its first update
    assert {call.work for call in trace.invocations if call.step == 1} == {
        Work.GENERATE,
        Work.SCORE,
        Work.LOGPROBS,
        Work.LEARN,
        Work.PUBLISH,
    }


async def test_nothing_of_a_private_cluster_listens_off_loopback(live: Live) -> None:
    """Ray's daemons and workers, Serve, the learner's rank with its store by HTTP, and vLLM."""
    assert live.run.published.location.startswith("http://127.0.0.1:")
    me = psutil.Process()
    found = {
        (f"{process.name()} {' '.join(process.cmdline())}", socket.laddr.ip.removeprefix("::ffff:"))
        for process in (me, *me.children(recursive=True))
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    for part in ("gcs_server", "raylet", "DashboardAgent", "ServeReplica", "LearnerActor", "vllm.loop"):
        assert any(part in name for name, _ in found), f"{part} listens nowhere: {sorted(found)}"
    assert not [(name, ip) for name, ip in found if not is_loopback(ip)]


async def test_others_can_read_neither_the_weights_nor_the_token(live: Live) -> None:
    folders = list(Path("/dev/shm").glob("rlhfless-live-1*"))
    assert len(folders) == 2  # the store, and the node's cache of it
    private = [Path.home() / ".ray" / "auth_token", live.folder / TOKEN_FILE, *folders]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in private} == {0}


async def test_groups_are_scored_and_referred_while_the_longest_is_still_drawn(live: Live) -> None:
    await train_step(live.run, 2)
    trace = written(live)
    calls = [call for call in trace.invocations if call.step == 2]
    generated = max(call.end_s for call in calls if call.work is Work.GENERATE)
    lengths = sorted(row.response_tokens for row in trace.rollouts if row.step == 2)
    assert lengths[-1] > 1.5 * lengths[len(lengths) // 2], "no long tail, so there is nothing to see"
    for work in (Work.SCORE, Work.LOGPROBS):
        early = [call for call in calls if call.work is work and call.end_s < generated]
        assert early, f"no {work} call ended before generation did"


async def test_generation_without_the_asked_version_is_refused(live: Live) -> None:
    run, actor = live.run, live.run.generation.serving()[0]
    request = GenerateRequest(
        items=(SampleItem("p", 0, (1, 2), seed=1),),
        sampling=sampling_of(run.spec),
        version="live-1/1/7/other",
        actor=actor.name,
        progress_interval_s=1,
        heartbeat_s=30,
        timeout_s=30,
    )
    with pytest.raises(WrongVersion, match="was asked for live-1/1/7/other and serves live-1/1/"):
        async for _ in actor.stream(Work.GENERATE, "generate", run.call(2), request, timeout_s=30):
            pass


async def test_an_actor_can_join_and_another_be_drained_during_a_step(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = live.run
    first = run.generation.serving()[0]

    step = asyncio.create_task(train_step(run, 3))
    second = await run.generation.add(run.call(3))
    await step
    assert {actor.name for actor in run.generation.serving()} == {first.name, second.name}
    # By its plan a step so short wants one actor, and its policy would release the other.
    both = dataclasses.replace(run.generation._blueprint, bounds=Bounds(2, "the test wants both"))
    monkeypatch.setattr(run.generation, "_blueprint", both)

    step = asyncio.create_task(train_step(run, 4))
    async with asyncio.timeout(60):
        while not ((context := run.under_way.get(4)) and context.stage and context.stage.samples.progress):
            await asyncio.sleep(0.02)
    await run.generation.remove(first)
    await step
    assert first.state is ReplicaState.RETIRED
    assert run.generation.serving() == (second,)

    trace = written(live)
    for number in (3, 4):
        keys = {(row.prompt_id, row.sample_index) for row in trace.rollouts if row.step == number}
        assert len(keys) == 16
    moved = [row for row in trace.rollouts if row.step == 4 and len(row.version_spans) > 1]
    assert moved, "no sample went on with another actor"
    for row in moved:
        spans = row.version_spans
        assert [span.start for span in spans] == [0] + [span.end for span in spans[:-1]]
        assert spans[-1].end == row.response_tokens == len(row.token_ids or ())
    (replayed,) = [decision for decision in trace.decisions if decision.step == 4 and decision.kind == "replayed"]
    # The last token of each is drawn anew; a sample that had one token alone has all of its tokens of the second actor.
    assert replayed.inputs["tokens"] >= len(moved)
    assert replayed.inputs["differ"] == 0


async def test_a_released_function_is_gone_and_starts_again_at_a_recorded_price(live: Live) -> None:
    run = live.run
    scoring = run.pools["scoring"]
    old = await scoring.ready(run.call(4))
    assert old.info is not None
    assert alive(old.info.pid)
    await scoring.stop(old)
    assert old.state is ReplicaState.RETIRED
    assert not alive(old.info.pid)
    new = await scoring.ready(run.call(4))
    assert new.incarnation != old.incarnation
    trace = written(live)
    starts = [h for h in trace.holdings if h.function == FunctionName.SCORING and h.state is ReplicaState.STARTING]
    assert len({start.incarnation for start in starts}) == 2
    assert all(start.duration_s > 0 for start in starts)


async def test_held_out_figures_do_not_depend_on_when_they_are_drawn(live: Live) -> None:
    first = await evaluate_held_out(live.run, 4)
    assert first == await evaluate_held_out(live.run, 4)
    assert set(first) == {"has_seven", "has_seven_greedy", "reward_mean"}


async def test_an_older_attempt_is_refused_everywhere(live: Live) -> None:
    run = live.run
    newer = replace(run.call(4), attempt=2)
    learner: Replica = await run.learner.ready(run.call(4))
    await learner.call("describe", newer, timeout_s=30, waiting_for="a description")
    with pytest.raises(StaleCall, match="attempt 2 has taken over"):
        await learner.call("publish", run.call(4), timeout_s=30, waiting_for="a publication")
    with pytest.raises(StaleCall, match="belongs to 'live-1'"):
        await learner.call("describe", Call("other", 9, 0), timeout_s=30, waiting_for="a description")


async def test_old_bytes_under_a_new_name_stop_the_run(live: Live) -> None:
    """The folder of the weights hands out the version before: found by the digest of what the engine consumed."""
    run = live.run
    actor = run.generation.serving()[0]
    folder = next(iter(Path("/dev/shm").glob("rlhfless-live-1")))
    assert urlparse(run.published.location).scheme == "http"
    old = next(folder.glob("live-1~1~4~*"))
    fake = replace(run.published.version, step=5, digest="0" * 32)
    name = Path(run.published.location).name
    forged = name.replace("~4~", "~5~").replace(run.published.version.digest, fake.digest)
    shutil.copytree(old, folder / forged)
    published = replace(run.published, version=fake, location=run.published.location.replace(name, forged))
    with pytest.raises(WeightCheckFailed, match="consumed"):
        await run.weights.load(actor, published, run.call(5))
    assert actor.state is ReplicaState.STALE


async def test_the_ledger_adds_up(live: Live) -> None:
    run = live.run
    trace = written(live)
    check_holdings(trace.holdings)
    prices = PriceBook.model_validate(trace.meta.prices)
    summary = summarise(trace, prices)
    held = sum(holding.device_s for holding in trace.holdings)
    total = summary.total
    assert total.busy_device_s + total.idle_device_s + total.cold_device_s == pytest.approx(held, rel=1e-9)
    assert total.cost_usd == pytest.approx(held * prices.device("cpu-core").usd_per_hour / 3600, rel=1e-9)
    assert sum(row.cost_usd for row in summary.functions) == pytest.approx(total.cost_usd, rel=1e-9)
    assert np.isfinite(run.ledger.cost_usd(run.pools.values()))
