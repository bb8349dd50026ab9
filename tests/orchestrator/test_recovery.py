"""Recovered faults are counted, and their time belongs to the step in which they happened."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.fake_run import ledger_in
from rlhfless.fleet.replica import CallTimeout, Replica, ReplicaLost
from rlhfless.functions.calls import Call, ReplicaInfo
from rlhfless.orchestrator.base_run import BaseRun, TrainerPools
from rlhfless.orchestrator.ledger import StepClock
from rlhfless.orchestrator.recovery import Recovered, Recovery
from rlhfless.orchestrator.run import RLRun
from rlhfless.orchestrator.step_metrics import tokens_per_s
from rlhfless.records import FunctionName, Invocation, ReplicaState, StepRecord, WeightVersion, Work
from rlhfless.scaling.placement import CPU_KIND, Allocation, Device
from rlhfless.sim.run import SPEC
from rlhfless.spec import RunSpec
from rlhfless.util.clock import VirtualClock


class FakeRun:
    """The part of a run that a recovery uses. The test may remove its learner; the newest checkpoint is of step 4."""

    def __init__(self, *pools: Any, faults: tuple[Exception, ...] = (), learner_lost: bool = False) -> None:
        self.pools = dict(enumerate([FakePool(*faults), *pools]))
        self.decisions: list[Any] = []
        self.ledger = SimpleNamespace(add_decision=self.decisions.append)
        self.spec = SimpleNamespace(recovery=SimpleNamespace(per_step=2))
        learner = SimpleNamespace(learned_step=7)
        self.learner = SimpleNamespace(replicas=lambda: [learner])
        self.trainers = SimpleNamespace(all_there=not learner_lost, restore_again=lambda: None)
        self.published = SimpleNamespace(version=WeightVersion("run", 1, 7, "d"))
        self.before = {"reward": 1.0}

    def call(self, step: int) -> Call:
        return Call("run", 1, step)

    async def restore(self) -> int:
        return 4

    async def open_weights(self, step: int) -> None:
        assert step == 4

    async def restore_and_open(self) -> int:
        return await RLRun.restore_and_open(self)  # type: ignore[arg-type]

    async def publish(self, call: Call) -> Any:
        return self.published

    async def publish_again(self, before: int) -> None:
        await RLRun.publish_again(self, before)  # type: ignore[arg-type]


class FakePool:
    """A pool in which no replica is lost. Probing its replicas raises the faults in sequence."""

    lost = 0

    def __init__(self, *faults: Exception) -> None:
        self._faults = list(faults)

    async def probe_all(self, call: Call) -> None:
        if self._faults:
            raise self._faults.pop(0)

    async def remove_dead(self) -> None: ...


def lost_pool(*states: str) -> Any:
    """Return a pool whose replicas were lost while serving or while leaving."""
    replicas = [replica_that(state) for state in states]
    pool = FakePool()
    pool.lost = sum(replica.lost for replica in replicas)  # type: ignore[misc]
    return pool


def replica_that(end: str) -> Replica:
    recorder = SimpleNamespace(add_holding=lambda _: None)
    allocation = Allocation.of([Device("cpu-0", CPU_KIND, 0)])
    replica = Replica("r", FunctionName.SCORING, allocation, recorder)  # type: ignore[arg-type]
    replica.mark_up(SimpleNamespace(), ReplicaInfo("a", 1, "here"))  # type: ignore[arg-type]
    if end == "leaves":
        replica.drain()
    replica.give_up("it died")
    replica.give_up("it is still dead")
    return replica


async def test_a_step_that_is_done_again_counts_once_also_if_the_mending_failed_at_first() -> None:
    run = FakeRun(faults=(CallTimeout("no answer"),))
    recovery = Recovery(run)  # type: ignore[arg-type]
    assert await recovery.after(8, ReplicaLost("scoring died")) == 8
    assert recovery.recovered == Recovered(replicas_lost=0, steps_again=1)
    assert [decision.inputs["fault"] for decision in run.decisions] == ["CallTimeout: no answer"]


async def test_steps_that_a_new_learner_takes_again_count() -> None:
    recovery = Recovery(FakeRun(learner_lost=True))  # type: ignore[arg-type]
    assert await recovery.after(8, ReplicaLost("the learner died")) == 5
    assert recovery.recovered.steps_again == 4  # 5, 6, 7 and 8


class FakeLearner:
    """A learner that is up, and its pool. Its calls raise the faults in sequence."""

    kind = SimpleNamespace(publishes=True)
    function, learned_step, state = "learner", 0, ReplicaState.SERVING

    def __init__(self, *faults: Exception) -> None:
        self._faults = list(faults)

    def replicas(self) -> list[Any]:
        return [self]

    async def ready(self, call: Call) -> Any:
        return self

    def turn(self, call: Call) -> Any:
        return contextlib.nullcontext()

    async def stop(self, *replicas: Any) -> None: ...

    async def call(self, method: str, call: Call, *_: Any, **__: Any) -> Any:
        if self._faults:
            raise self._faults.pop(0)
        return ()


def trainers_of(learner: Any) -> TrainerPools:
    return TrainerPools([learner], RunSpec.model_validate(SPEC), None)  # type: ignore[arg-type]


CHECKPOINTS: Any = SimpleNamespace(token=lambda: contextlib.nullcontext("folder/token"))


async def test_a_learner_whose_restore_failed_is_restored_before_it_works() -> None:
    """It is up, but has not learned what the run has."""
    learner = FakeLearner(CallTimeout("no answer"))
    trainers, call = trainers_of(learner), Call("run", 1, 0)
    with pytest.raises(CallTimeout):
        await trainers.restore(call, CHECKPOINTS, None)
    assert not trainers.all_there
    with pytest.raises(ReplicaLost, match="the learner was lost"):
        trainers.replica(learner)  # type: ignore[arg-type]
    await trainers.restore(call, CHECKPOINTS, None)
    assert trainers.all_there
    assert trainers.replica(learner) is learner  # type: ignore[arg-type, comparison-overlap]


async def test_weights_that_were_not_opened_are_restored_again() -> None:
    """The step to continue with is that of the restored state."""
    trainers = trainers_of(FakeLearner())

    async def restore() -> int:
        await trainers.restore(Call("run", 1, 0), CHECKPOINTS, None)
        return 0

    async def open_weights(step: int) -> None:
        raise CallTimeout(f"the weights of step {step}")

    run = SimpleNamespace(trainers=trainers, restore=restore, open_weights=open_weights)
    with pytest.raises(CallTimeout, match="the weights of step 0"):
        await BaseRun.restore_and_open(run)  # type: ignore[arg-type]
    assert not trainers.all_there


async def test_a_trained_function_that_is_new_computes_nothing() -> None:
    """Such as a critic that died between two steps, and starts again with its initial weights."""
    learner = FakeLearner()
    trainers, call = trainers_of(learner), Call("run", 1, 3)
    run: Any = SimpleNamespace(trainers=trainers, spec=RunSpec.model_validate(SPEC))
    await trainers.restore(call, CHECKPOINTS, None)
    assert await BaseRun.serve(run, learner, Work.LOGPROBS, "compute", call, ()) == ()  # type: ignore[arg-type]
    trainers.restore_again()
    with pytest.raises(ReplicaLost):
        await BaseRun.serve(run, learner, Work.LOGPROBS, "compute", call, ())  # type: ignore[arg-type]


async def test_the_fault_that_ends_the_run_was_not_mended() -> None:
    recovery = Recovery(FakeRun())  # type: ignore[arg-type]
    for _ in range(2):
        await recovery.after(8, ReplicaLost("scoring died"))
    with pytest.raises(ReplicaLost, match="the third time"):
        await recovery.after(8, ReplicaLost("the third time"))
    assert recovery.recovered.steps_again == 2


async def test_lost_replicas_count_whether_or_not_a_step_is_done_again_for_them() -> None:
    run = FakeRun(lost_pool("serves", "serves", "leaves"), lost_pool("serves"))
    assert Recovery(run).recovered == Recovered(replicas_lost=3, steps_again=0)  # type: ignore[arg-type]


async def test_a_fault_with_any_text_is_kept_as_what_can_be_stored() -> None:
    run = FakeRun()
    await Recovery(run).after(1, ReplicaLost("engine: \udcff\x1b"))  # type: ignore[arg-type]
    assert run.decisions[0].inputs["fault"] == "ReplicaLost: engine: \\udcff\\x1b"


@pytest.fixture(name="clock")
def at_100(clock: VirtualClock) -> VirtualClock:
    clock.now_s = 100.0
    return clock


def begin(steps: StepClock, step: int, *, up: bool = True) -> tuple[float, float, bool]:
    """Return (start of its first try, start of this try, whether it recovers)."""
    begun = steps.begin(step, fleet_is_up=up)
    assert begun.step == step
    return begun.start_s, begun.tried_s, begun.recovers


def test_a_step_counts_from_its_first_try_and_from_the_end_of_the_step_before(clock: VirtualClock) -> None:
    steps = StepClock()
    assert begin(steps, 5) == (100, 100, False)
    assert steps.end(5, 110.0) == 110
    clock.now_s = 112.0
    assert begin(steps, 6) == (110, 112, False)  # the learner dies in it
    clock.now_s = 150.0
    assert begin(steps, 5) == (150, 150, False)  # the new learner repeats step 5, which is in the ledger
    assert steps.end(5, 160.0) == 110
    clock.now_s = 161.0
    assert begin(steps, 6) == (110, 161, True)
    assert steps.end(6, 170.0) == 170
    assert begin(steps, 7) == (170, 161, False)


def test_an_evaluation_between_two_steps_is_in_neither(clock: VirtualClock) -> None:
    steps = StepClock()
    begin(steps, 1)
    steps.end(1, 110.0)
    steps.interrupt()
    clock.now_s = 130.0
    assert begin(steps, 2) == (130, 130, False)


def test_a_step_that_is_drawn_while_another_is_learned_keeps_what_was_called_since_it_began(
    tmp_path: Path, clock: VirtualClock
) -> None:
    ledger, steps = ledger_in(tmp_path), StepClock()
    first = steps.begin(1, fleet_is_up=True)
    clock.now_s = 104.0
    second = steps.begin(2, fleet_is_up=True)
    for step, work, start_s, end_s in (
        (1, Work.GENERATE, 100, 103),
        (2, Work.GENERATE, 105, 109),
        (1, Work.LEARN, 104, 107),
    ):
        function = FunctionName.LEARNER if work is Work.LEARN else FunctionName.GENERATION
        ledger.add_invocation(Invocation(function, "r", "a", work, step, start_s, end_s))
    assert [call.step for call in ledger.done_in_step(1)[0]] == [1, 1]
    assert ledger.step_times(first, 107.0).phases_s["learn"] == 3
    ledger.add_step(StepRecord(1, first.start_s, 107.0, {}), steps.end(1, 107.0))
    assert ledger.calls == 3
    assert [call.work for call in ledger.calls_after(1)] == [Work.GENERATE, Work.LEARN], "also of a step that has ended"
    times = ledger.step_times(second, 110.0)
    assert (times.wall_s, times.phases_s["generation"], times.phases_s["learn"]) == (3, 2, 0), "from the end of step 1"
    assert [call.work for call in ledger.done_in_step(2)[0]] == [Work.GENERATE], "with what it did before that"
    ledger.close()


def test_the_times_of_steps_that_overlap_add_up_to_the_time_of_the_run(clock: VirtualClock) -> None:
    """Step 2 generates from 104 on, an evaluation from 110 to 115 belongs to no step, and step 3 generates from 116
    on."""
    steps = StepClock()
    first = steps.begin(1, fleet_is_up=True)
    clock.now_s = 104.0
    second = steps.begin(2, fleet_is_up=True)
    assert steps.end(1, 110.0) == 104
    steps.interrupt()
    clock.now_s = 115.0
    steps.resume()
    assert (first.start_s, second.start_s) == (100, 115)
    clock.now_s = 116.0
    third = steps.begin(3, fleet_is_up=True)
    assert steps.end(2, 120.0) == 116
    steps.resume()
    assert (second.start_s, third.start_s) == (115, 120)


def test_a_step_that_is_drawn_on_while_a_new_learner_takes_others_again_counts_from_the_last_of_them(
    clock: VirtualClock,
) -> None:
    steps = StepClock()
    steps.begin(5, fleet_is_up=True)
    steps.end(5, 110.0)
    steps.begin(6, fleet_is_up=True)
    clock.now_s = 112.0
    later = steps.begin(7, fleet_is_up=True)  # generated while step 6, in which the learner dies, is learned
    clock.now_s = 150.0
    steps.begin(5, fleet_is_up=True)
    steps.end(5, 160.0)
    clock.now_s = 161.0
    again = steps.begin(6, fleet_is_up=True)
    assert (again.start_s, again.recovers) == (110, True)
    steps.end(6, 170.0)
    assert (later.start_s, later.recovers) == (170, False)


def test_a_step_that_begins_without_an_actor_recovers(clock: VirtualClock) -> None:
    assert begin(StepClock(), 3, up=False) == (100, 100, True)


def test_the_recovery_lasts_until_a_function_works_in_the_last_try(tmp_path: Any, clock: VirtualClock) -> None:
    ledger, steps = ledger_in(tmp_path), StepClock()

    def work(what: Work, start_s: float, end_s: float) -> None:
        ledger.add_invocation(Invocation(FunctionName.GENERATION, "r", "a", what, 6, start_s, end_s))

    steps.begin(6, fleet_is_up=True)
    work(Work.GENERATE, 101, 104)
    clock.now_s = 120.0
    begun = steps.begin(6, fleet_is_up=True)
    work(Work.LOAD_WEIGHTS, 128, 130)
    work(Work.GENERATE, 131, 132)
    times = ledger.step_times(begun, 133.0)
    assert (times.wall_s, times.recovery_s, times.overhead_s) == (33, 31, 1)
    assert {phase: seconds for phase, seconds in times.phases_s.items() if seconds} == {"generation": 1}
    ledger.close()


def test_the_speed_of_generation_is_that_of_the_steps_own_calls() -> None:
    """Two requests generate 90 tokens from second 2 to 5; a precomputation generates none."""

    def call(work: Work, start_s: float, end_s: float, tokens: int) -> Invocation:
        return Invocation(
            FunctionName.GENERATION, "r", "a", work, 6, start_s, end_s, input_tokens=9, output_tokens=tokens
        )

    calls = [call(Work.GENERATE, 2, 4, 50), call(Work.GENERATE, 3, 5, 40), call(Work.PRECOMPUTE, 0, 1, 0)]
    assert tokens_per_s(calls) == 30
    assert tokens_per_s(calls[2:]) == 0, "all of its samples came from the journal"
