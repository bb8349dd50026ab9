"""Recorded runs whose true latencies are known: found by calibration, and carried over to other fleets and batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.recorded_run import ENGINE, EVALUATE_TOKEN_S, LEARN_S, LEARN_TOKEN_S, LOAD_S, PUBLISH_S, record
from rlhfless.control.compute.jobs import best_static
from rlhfless.prefixes.packing import ALWAYS, ON_CPUS
from rlhfless.records import FunctionName, Invocation, StepRecord, Work
from rlhfless.records.schema import TraceError
from rlhfless.records.traces import Trace, read_trace
from rlhfless.scaling.engine_model import decode_s
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.sim.policies import make_policy
from rlhfless.sim.replay.calibrate import calibrate, device_kind, line_through
from rlhfless.sim.replay.fleet import RecordedFleet
from rlhfless.sim.replay.latency_file import LatencyFile, LineFit, load_latency, write_latency
from rlhfless.sim.replay.measured import helper_cores, shared_s
from rlhfless.sim.replay.recorded import setup_of
from rlhfless.sim.replay.replay import fitted, replay
from rlhfless.sim.replay.what_if import OtherDevices
from rlhfless.sim.scenarios.work import PrefixLevel
from rlhfless.sim.workloads.recorded import read_runtime
from rlhfless.spec.errors import InputError


@pytest.fixture(scope="module")
def one_actor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("one"), actors=1)


@pytest.fixture(scope="module")
def latency(one_actor: Path) -> LatencyFile:
    return calibrate([read_trace(one_actor)])


def test_calibration_finds_the_latencies(latency: LatencyFile) -> None:
    # What a sequence costs and what its context costs can hardly be told apart: contexts grow alike in all steps.
    found_s = decode_s(latency.engine, 40, 40 * 20, 10)
    assert found_s == pytest.approx(decode_s(ENGINE, 40, 40 * 20, 10), rel=0.02)
    assert latency.learn.fixed_s == pytest.approx(LEARN_S, rel=1e-3)
    assert latency.learn.token_s == pytest.approx(LEARN_TOKEN_S, rel=1e-3)
    assert latency.evaluate is not None
    assert latency.evaluate.token_s == pytest.approx(EVALUATE_TOKEN_S, rel=1e-3)
    assert latency.load_weights_s == pytest.approx(LOAD_S)
    assert latency.publish_s == pytest.approx(PUBLISH_S)
    assert latency.starts.keys() == {"scoring", "learner"}
    assert latency.turns == {}  # nothing slept
    assert latency.steps == 8
    assert latency.device_kind == "cpu-core"


def test_one_actor_tells_of_two_of_other_batches_and_of_other_lengths(latency: LatencyFile, tmp_path: Path) -> None:
    """The goal is 10 %; here nothing but the model itself can be off."""
    others = {"two": (2, 16, 20.0), "batch": (1, 40, 20.0), "longer": (1, 16, 40.0)}
    for name, (actors, prompts, median) in others.items():
        folder = record(tmp_path / name, actors, prompts, median)
        again = replay(read_trace(folder), read_runtime(folder), latency)
        errors = {error.stage: error.error for error in again.errors}
        assert errors["generation"] < 0.05, name
        assert errors["step"] < 0.03, name
        wall = again.errors[-1]
        assert wall.error < wall.error_of_mean / 2


def test_a_run_with_prefill_actors_is_not_replayed(one_actor: Path) -> None:
    trace = read_trace(one_actor)
    prefill = [
        replace(row, function=FunctionName.PREFILL, replica="prefill-0")
        for row in trace.holdings
        if row.function == FunctionName.GENERATION
    ]
    with pytest.raises(TraceError, match="computed prompts on prefill actors, and a simulated fleet has none"):
        RecordedFleet(replace(trace, holdings=(*trace.holdings, *prefill)))


def test_half_of_a_trace_foretells_the_other(one_actor: Path) -> None:
    again = replay(read_trace(one_actor), read_runtime(one_actor))
    assert [step.step for step in again.steps] == [5, 6, 7, 8]
    assert again.fitted_to == "steps 1 to 4"
    wall = again.errors[-1]
    assert wall.stage == "step"
    assert wall.error < 0.03
    assert wall.skill == pytest.approx(1 - wall.error / wall.error_of_mean)
    assert wall.skill > 0.5
    assert again.predicted_usd == pytest.approx(again.measured_usd, rel=0.05)


def slowed(trace: Trace, times: Mapping[int, float]) -> Trace:
    """The trace with the learn calls of some steps that many times as long, and all that follows later."""
    at_s, calls, steps = 0.0, list[Invocation](), list[StepRecord]()
    for step in trace.steps:
        begin_s = at_s
        own = [call for call in trace.invocations if call.step == step.step]
        for call in sorted(own, key=lambda call: call.start_s):
            more_s = (times.get(step.step, 1.0) - 1) * call.duration_s * (call.work is Work.LEARN)
            calls.append(replace(call, start_s=call.start_s + at_s, end_s=call.end_s + at_s + more_s))
            at_s += more_s
        steps.append(replace(step, start_s=step.start_s + begin_s, end_s=step.end_s + at_s))
    return replace(trace, invocations=tuple(calls), steps=tuple(steps))


def test_a_fit_keeps_the_means_of_the_steps_it_was_fitted_to(
    one_actor: Path, latency: LatencyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medians of requests once said 0.75 of what 60 steps of a run took to draw: here a fit that is off as much."""
    trace, drawn = read_trace(one_actor), read_runtime(one_actor)
    off = latency.scaled({"generation": 0.75, "learn": 1.3}).model_copy(update={"driver_s": latency.driver_s + 0.5})
    monkeypatch.setattr("rlhfless.sim.replay.replay.calibrate", lambda *_: off)
    for error in replay(trace, drawn, fitted([trace], [drawn])).errors:
        if error.stage in ("generation", "learn", "step"):
            assert error.predicted_s == pytest.approx(error.measured_s, rel=0.02), error.stage


def test_a_difference_that_may_be_chance_changes_no_fit(one_actor: Path) -> None:
    """The mean of the learn calls is 1.06 times what it was, and no one can say so from one slow step."""
    trace, drawn = slowed(read_trace(one_actor), {4: 1.5}), read_runtime(one_actor)
    plain, kept = calibrate([trace]), fitted([trace], [drawn])
    assert kept.learn == plain.learn


def test_a_run_that_slows_down_is_said_to(one_actor: Path, latency: LatencyFile) -> None:
    trace, drawn = read_trace(one_actor), read_runtime(one_actor)
    assert replay(trace, drawn).changed_pace == ""
    quick = latency.scaled({"generation": 0.5})
    assert "generation 2.0" in replay(trace, drawn, quick).changed_pace


@pytest.fixture(scope="module")
def with_losses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("losses"), actors=2)


def lose(trace: Trace, name: str, after_step: int, successor: str, device: str | None = None) -> Trace:
    """The trace of a run that lost a replica after a step; its successor holds the same share of the same or another
    device."""
    at_s = next(step.end_s for step in trace.steps if step.step == after_step)
    holdings = []
    for holding in trace.holdings:
        if holding.replica != name or holding.end_s <= at_s:
            holdings.append(holding)
            continue
        follows = replace(
            holding, replica=successor, incarnation=successor, start_s=at_s + 0.01, device=device or holding.device
        )
        holdings += [*([replace(holding, end_s=at_s)] if holding.start_s < at_s else []), follows]
    calls = [
        replace(call, replica=successor) if call.replica == name and call.step > after_step else call
        for call in trace.invocations
    ]
    rows = [
        replace(row, actor=successor) if row.actor == name and row.step > after_step else row for row in trace.rollouts
    ]
    return replace(trace, holdings=tuple(holdings), invocations=tuple(calls), rollouts=tuple(rows))


def test_successors_of_lost_replicas_have_their_place(with_losses: Path) -> None:
    """Shares of all that ever were on a core add up to 1.5; the replay is the one of the run without losses."""
    whole, drawn = read_trace(with_losses), read_runtime(with_losses)
    broken = lose(whole, "simulated-generation-0", 2, "generation-2")
    broken = lose(broken, "generation-2", 5, "generation-10")
    broken = lose(broken, "simulated-scoring-0", 3, "scoring-7")
    fleet = RecordedFleet(broken)
    assert len(fleet.actors) == 2
    assert [fleet.slot_of(name, whole.steps[-1].end_s) for name in ("generation-10", "simulated-generation-1")] == [
        0,
        1,
    ]
    for again, unbroken in zip(replay(broken, drawn).steps, replay(whole, drawn).steps, strict=True):
        assert again.predicted_s == pytest.approx(unbroken.predicted_s)
    assert best_static(broken, drawn) == pytest.approx(best_static(whole, drawn))


def test_an_actor_that_came_back_elsewhere_has_the_free_place(with_losses: Path) -> None:
    """Also under its own name, which a later attempt of a run gives again."""
    broken = lose(read_trace(with_losses), "simulated-generation-0", 4, "simulated-generation-0", device="cpu-9")
    again = replay(broken, read_runtime(with_losses))
    assert len(RecordedFleet(broken).actors) == 2
    assert again.errors[-1].error < 0.05


def test_time_in_which_no_function_works_is_paid_for(one_actor: Path, latency: LatencyFile) -> None:
    """The driver's own second per step lengthens steps, and the bill by as much."""
    trace, drawn = read_trace(one_actor), read_runtime(one_actor)
    quick, slow = (replay(trace, drawn, latency.model_copy(update={"driver_s": s})) for s in (0.0, 1.0))
    assert slow.errors[-1].predicted_s == pytest.approx(quick.errors[-1].predicted_s + 1.0)
    assert slow.predicted_usd / quick.predicted_usd == pytest.approx(
        slow.errors[-1].predicted_s / quick.errors[-1].predicted_s, rel=0.05
    )


def test_steps_that_were_done_again_are_no_part_of_the_error(with_losses: Path) -> None:
    whole, drawn = read_trace(with_losses), read_runtime(with_losses)
    steps = [
        replace(
            step,
            start_s=step.start_s - 60,
            metrics={**step.metrics, "recovery_s": 60.0 + (step.end_s - step.start_s) / 2},
        )
        if step.step == 6
        else step
        for step in whole.steps
    ]
    again = replay(replace(whole, steps=tuple(steps)), drawn)
    assert [step.step for step in again.steps if step.done_again] == [6]
    others_s = [step.measured_s["step"] for step in again.steps if not step.done_again]
    assert again.errors[-1].measured_s == pytest.approx(sum(others_s) / 3)


def test_another_policy_is_asked(one_actor: Path, latency: LatencyFile) -> None:
    again = replay(read_trace(one_actor), read_runtime(one_actor), latency, ("static", make_policy("static")))
    assert again.policy == "static"
    assert again.errors[-1].error < 0.03  # it is the policy that the run had


def test_a_fleet_that_is_replayed_is_up_and_what_comes_later_takes_as_long_as_in_the_run(
    one_actor: Path, latency: LatencyFile
) -> None:
    trace = read_trace(one_actor)
    setup = setup_of(trace, latency)
    assert setup.warm
    assert setup.fewest_actors == 0
    starts = [slot.start_s for slot in setup.slot_setups]
    assert starts == pytest.approx([1.0, 1.0, 0.0])  # the learner is never released
    spec = trace.meta.spec | {"scaling": {"generation": {"min_actors": 1}}}
    asked = replace(trace, meta=replace(trace.meta, spec=spec))
    assert setup_of(asked, latency).fewest_actors == 1


def test_the_file_reads_back_and_is_checked(latency: LatencyFile, tmp_path: Path) -> None:
    write_latency(latency, tmp_path / "deep" / "latency.yaml")
    assert load_latency(tmp_path / "deep" / "latency.yaml") == latency
    (tmp_path / "latency.yaml").write_text("steps: 3\ngroups_s: 1\n")
    with pytest.raises(InputError, match=r"groups_s \(line 2\): unknown key\n    did you mean `group_s`"):
        load_latency(tmp_path / "latency.yaml")
    with pytest.raises(InputError, match="name a file that `rlhfless simulate --calibrate` has written"):
        load_latency(tmp_path / "missing.yaml")


def test_engines_share_the_cores_of_a_machine_with_its_helpers() -> None:
    """Two of 1 and 3 s on two cores, half a core of helpers each: 1 s of work at 2 / 3, and 2 s alone, with slot."""
    assert shared_s([3.0, 1.0], 0.5, 2.0) == pytest.approx(1.5 + 2.0)
    assert shared_s([3.0, 1.0], 0.0, 2.0) == 3.0
    assert shared_s([3.0], 1.0, 2.0) == 3.0
    assert shared_s([3.0], 1.5, 2.0) == pytest.approx(3.75)


def test_helpers_are_what_the_engines_do_not_keep_busy(one_actor: Path) -> None:
    whole = read_trace(one_actor)
    assert calibrate([whole]).helper_cores == 0.0  # the trace does not say
    steps = [replace(step, metrics={**step.metrics, "host_busy_cores": 1.4}) for step in whole.steps]
    busy = replace(whole, steps=tuple(steps))
    assert calibrate([busy]).helper_cores == pytest.approx(0.4)  # one engine, on one core, at work all the time
    # Two engines that drew side by side had 0.7 each.
    twin = [replace(call, replica="twin") for call in busy.invocations if call.work is Work.GENERATE]
    held = [replace(holding, replica="twin") for holding in busy.holdings if holding.replica == twin_of(busy)]
    both = replace(busy, invocations=(*busy.invocations, *twin), holdings=(*busy.holdings, *held))
    more = [replace(step, metrics={**step.metrics, "host_busy_cores": 3.4}) for step in whole.steps]
    assert helper_cores(more[0], both) == pytest.approx(0.7)
    idle = [replace(step, metrics={**step.metrics, "host_busy_cores": 0.7}) for step in whole.steps]
    assert calibrate([replace(whole, steps=tuple(idle))]).helper_cores == 0.0
    gpus = tuple(replace(holding, device_kind="h100") for holding in busy.holdings)
    assert helper_cores(busy.steps[0], replace(busy, holdings=gpus)) is None


def twin_of(trace: Trace) -> str:
    """The only actor of the run."""
    return next(call.replica for call in trace.invocations if call.work is Work.GENERATE)


def test_two_actors_are_slower_where_helpers_need_a_core(latency: LatencyFile, tmp_path: Path) -> None:
    folder = record(tmp_path, 2, 16, 20.0)
    trace, drawn = read_trace(folder), read_runtime(folder)
    cores = replace(trace, meta=replace(trace.meta, machine={"cpu_cores": 2}))
    alone, beside = (
        replay(cores, drawn, latency.model_copy(update={"helper_cores": helpers})).errors for helpers in (0.0, 0.5)
    )
    assert alone[0].predicted_s < beside[0].predicted_s < 1.5 * alone[0].predicted_s
    assert beside[-1].predicted_s - alone[-1].predicted_s == pytest.approx(beside[0].predicted_s - alone[0].predicted_s)


def test_lines_by_hand() -> None:
    line = line_through([1, 2, 3, 4, 5], [3.0, 5.0, 7.0, 9.0, 900.0])  # 1 + 2 x, and one that was held up
    assert line == LineFit(fixed_s=1.0, token_s=2.0)
    assert line_through([5.0, 5.0], [2.0, 4.0]) == LineFit(fixed_s=3.0)
    never_negative = line_through([1.0, 2.0], [1.0, 3.0])  # -1 + 2 x: a tenth of 2 s, for two calls say little
    assert (never_negative.fixed_s, never_negative.token_s) == (pytest.approx(0.2, rel=0.01), pytest.approx(1.1, 0.01))


def test_calls_of_about_one_size_leave_the_fixed_part_at_what_it_was_taken_to_be() -> None:
    """Slopes -2, -0.5, -0.5, 0, 1, 1: their median is below 0, so 2 s for any size. The fixed part is
    2 +- 1.4826 * 0.5 * sqrt(1/4 + 10.5^2 / 5) = 3.5 s, and was 0.2 +- 0.2 s before: their mean by 1 / variance."""
    line = line_through([9.0, 10.0, 11.0, 12.0], [2.0, 3.0, 1.0, 2.0])
    error_s = 1.4826 * 0.5 * math.sqrt(1 / 4 + 10.5**2 / 5)
    assert line.fixed_s == pytest.approx((2.0 * 0.2**2 + 0.2 * error_s**2) / (0.2**2 + error_s**2))
    assert line.at(10.5) == pytest.approx(2.0, rel=0.1)
    spread = line_through([1.0, 10.0, 100.0, 1000.0], [2.01, 2.09, 3.01, 11.99])  # 2 + 0.01 x, and known as such
    assert spread.fixed_s == pytest.approx(2.0, rel=0.02)


def test_traces_without_what_is_needed_are_refused(one_actor: Path) -> None:
    whole = read_trace(one_actor)
    with pytest.raises(TraceError, match="has no step to fit to"):
        calibrate([Trace(whole.meta)])
    with pytest.raises(TraceError, match="has no step with rollouts"):
        replay(whole, [])
    with pytest.raises(TraceError, match="has no generate calls"):
        calibrate([Trace(whole.meta, whole.holdings, rollouts=whole.rollouts, steps=whole.steps)])


def test_a_replay_reproduces_the_prompt_tokens_that_were_computed(tmp_path: Path) -> None:
    """From the trace alone, which has no prompts: a system prompt, then one of four blocks of examples."""
    levels = (PrefixLevel(tokens=320), PrefixLevel(tokens=300, kinds=4))
    folder = record(tmp_path, actors=2, prompts=16, levels=levels)
    again = replay(read_trace(folder), read_runtime(folder))
    found = {each.function: each for each in again.prompt_tokens}
    assert found.keys() == {"generation", "learner"}
    for each in found.values():
        assert each.predicted == pytest.approx(each.measured, rel=0.03)
    # Two actors compute the 320 tokens and four times 300; of each sample what fills no block of 32.
    assert 1.5 < found["generation"].measured < 3
    assert again.errors[-1].error < 0.05


@pytest.mark.parametrize(("saved", "packs_all"), [(900, True), (810, True), (800, False), (0, False)])
def test_a_learner_that_computed_nearly_all_prompts_once_does_so_again(
    saved: int, packs_all: bool, one_actor: Path, latency: LatencyFile
) -> None:
    """Of 1,000 prompt tokens of a step 100 are different, so 900 can be saved. A trace has no tokens, and does not show
    what responses of siblings have in common."""
    trace = read_trace(one_actor)
    metrics = {"prompt_tokens_computed/learner": 1000.0 - saved, "prompt_tokens_unique/learner": 100.0}
    told = replace(
        trace,
        invocations=[
            replace(call, cached_tokens=saved) if call.work is Work.LEARN else call for call in trace.invocations
        ],
        steps=[replace(step, metrics={**step.metrics, **metrics}) for step in trace.steps],
    )
    forward = setup_of(told, latency).prefixes.forward
    assert forward is not None
    usual = ON_CPUS if device_kind(trace) == CPU_KIND else ALWAYS
    assert forward.packing == (ALWAYS if packs_all else usual)


def test_a_run_is_replayed_in_its_own_schedule(one_actor: Path, latency: LatencyFile) -> None:
    """The same samples, drawn ahead: a step takes the longer of its halves, and its time begins where the last one's
    ended."""
    trace, drawn = read_trace(one_actor), read_runtime(one_actor)
    step_s, generation_s, learn_s = {}, {}, {}
    held = {"type": "async", "max_staleness": 2, "in_flight": False}
    for schedule in ({"type": "sync"}, {"type": "one_step_off"}, held):
        told = replace(trace, meta=replace(trace.meta, spec={**trace.meta.spec, "schedule": schedule}))
        again = replay(told, drawn, latency)
        ahead_of = {"sync": 0, "one_step_off": 1, "async": 2}[str(schedule["type"])]
        assert replay(trace, drawn, latency, other=OtherDevices(max_staleness=ahead_of)).steps == again.steps
        steps = again.steps[1:-1]
        name = str(schedule["type"])
        step_s[name] = sum(step.predicted_s["step"] for step in steps)
        generation_s[name] = sum(step.predicted_s["generation"] for step in steps)
        learn_s[name] = sum(step.predicted_s["learn"] for step in steps)
    assert step_s["one_step_off"] < 0.9 * step_s["sync"]
    assert step_s["async"] <= step_s["one_step_off"] * 1.001
    for ahead in ("one_step_off", "async"):
        assert learn_s[ahead] == pytest.approx(learn_s["sync"], rel=0.02)
        assert step_s[ahead] >= max(generation_s[ahead], learn_s[ahead])


def test_a_run_that_drew_several_steps_at_once_is_replayed_so(one_actor: Path, latency: LatencyFile) -> None:
    """The tail of a step is filled by the next ones. Where weights are loaded between rollouts, only steps of the same
    version are generated at once, so all steps end later."""
    trace, drawn = read_trace(one_actor), read_runtime(one_actor)
    whole_s = {}
    for in_flight in (False, True):
        schedule = {"type": "async", "max_staleness": 2, "in_flight": in_flight}
        told = replace(trace, meta=replace(trace.meta, spec={**trace.meta.spec, "schedule": schedule}))
        steps = replay(told, drawn, latency).steps
        whole_s[in_flight] = sum(step.predicted_s["step"] for step in steps)
    assert whole_s[True] < 0.97 * whole_s[False]
