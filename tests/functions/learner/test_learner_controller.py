"""The learner's controller without Ray: which call waits for which. Its ranks answer when the test lets them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from fakes.builders import LONG
from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.functions import ranks as ranks_module
from rlhfless.functions.base import DeviceBinding
from rlhfless.functions.calls import Call, FunctionBroken
from rlhfless.functions.devices import OutOfMemory
from rlhfless.functions.learner.controller import (
    LearnerActor,
    LearnerFunction,
    LearnerSettings,
    StoreHome,
    SupervisedActor,
)
from rlhfless.functions.learner.rank import LearnerRank, SupervisedRank
from rlhfless.functions.ranks import RankGroup
from rlhfless.functions.training.controller import CriticActor
from rlhfless.functions.training.critic import CriticRank
from rlhfless.records import Probe, PublishedWeights, WeightVersion
from rlhfless.spec import AdamWSpec, DPOSpec, GRPOSpec, LearnerSpec, ModelSpec

PLANNED = SimpleNamespace(planned={})
STEP = Call("run", 1, 3)
PROBE = Probe((1, 2), (-1.0,), {"w": b"values"})


class Batch:
    tokens = (1, 2, 3)
    sequences = 1


class Rank:
    """Every method answers at once, but for `learn`."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.asked: list[str] = []
        self.learned: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


class Method:
    def __init__(self, rank: Rank, name: str) -> None:
        self._rank, self._name = rank, name

    async def remote(self, *arguments: Any) -> Any:
        self._rank.asked.append(self._name)
        match self._name:
            case "learn":
                return await self._rank.learned
            case "publish":
                run_id, attempt, step, *_ = arguments
                version, probe = WeightVersion(run_id, attempt, step, "digest"), replace(PROBE, logprobs=())
                return () if self._rank.number else (PublishedWeights(version, "here", 10, 2, probe),)
            case "probe":
                return PROBE.logprobs
            case "feed":
                return arguments[1][self._rank.number]
        return None


class Controller(LearnerFunction):
    def _rank_actor(self, settings: Any, rank: int) -> Any:
        return Rank(rank)


async def controller_of(
    monkeypatch: pytest.MonkeyPatch, ranks: int = 1, call_timeout_s: float = 10.0, store: str = "nowhere"
) -> Controller:
    monkeypatch.setattr(ranks_module.ray, "put", lambda batch: batch)
    settings = LearnerSettings(
        run_type="rlhf",
        dpo=DPOSpec(),
        run_id="run",
        lease=LONG,
        model=ModelSpec(path="m"),
        training=LearnerSpec(ranks=ranks),
        optimizer=AdamWSpec(),
        algorithm=GRPOSpec(),
        temperature=1.0,
        quantization="off",
        publishes_adapters=False,
        routes_folder="",
        probe_token_ids=PROBE.token_ids,
        read_back=True,
        store=StoreHome(store),
        kept_versions=2,
        rank_bindings=(DeviceBinding("cpu", ("0",), exclusive=False),) * ranks,
        call_timeout_s=call_timeout_s,
    )
    function = Controller.__new__(Controller)
    await cast("Any", function).__init__(settings)  # Serve awaits the constructor, too
    return function


def learn(function: Controller) -> asyncio.Task[Any]:
    return asyncio.create_task(function.learn(STEP, cast("PackedBatch", Batch()), Passes()))


async def test_weights_are_given_while_no_step_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    function = await controller_of(monkeypatch, ranks=2)
    before, after = (WeightVersion("run", 1, step, "digest") for step in (0, STEP.step))
    assert (await function.offers(STEP, before)).value
    assert not (await function.offers(STEP, after)).value
    assert (await function.feed(STEP, before, [1, 2])).value == (1, 2)
    learning = learn(function)
    await asyncio.sleep(0)
    assert not (await function.offers(STEP, before)).value
    assert (await function.feed(STEP, before, [1, 2])).value == (), "nothing is given of weights that move"
    for rank in function._group.ranks:
        rank.learned.set_result({})
    await learning
    assert not (await function.offers(STEP, before)).value
    assert (await function.feed(STEP, after, [0, 1])).value == (0, 1)


async def test_a_learner_that_was_replaced_leaves_the_store_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Serve restarts a learner that was killed; its lease runs out beside the one that the driver has started."""
    store = tmp_path / "store"
    restarted, following = [await controller_of(monkeypatch, store=str(store)) for _ in range(2)]
    restarted.admit(STEP)
    store.mkdir()  # by the ranks
    (store / "weights").touch()
    restarted.admit(STEP)
    following.admit(STEP)
    restarted.clean_up()
    assert (store / "weights").exists()
    following.clean_up()
    assert not store.exists()
    store.mkdir()
    (await controller_of(monkeypatch, store=str(store))).clean_up()  # never called: nothing else was
    assert not store.exists()


@pytest.mark.parametrize("first", ["learn", "publish"])
async def test_a_publication_follows_the_step_that_it_is_of(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    function = await controller_of(monkeypatch)
    (rank,) = function._group.ranks
    learning = learn(function) if first == "learn" else None
    publishing = asyncio.create_task(function.publish(STEP))
    for _ in range(5):
        await asyncio.sleep(0)
    learning = learning or learn(function)
    for _ in range(5):
        await asyncio.sleep(0)
    assert "publish" not in rank.asked
    rank.learned.set_result({"loss": 1.0})
    assert (await learning).value == {"loss": 1.0}
    published = (await publishing).value
    assert (published.version.step, published.probe) == (3, PROBE)


async def test_it_fails_as_the_step_did(monkeypatch: pytest.MonkeyPatch) -> None:
    function = await controller_of(monkeypatch)
    learning, publishing = learn(function), asyncio.create_task(function.publish(STEP))
    await asyncio.sleep(0)
    function._group.ranks[0].learned.set_exception(ValueError("no advantages"))
    for task in (learning, publishing):
        with pytest.raises(ValueError, match="no advantages"):
            await task
    assert "publish" not in function._group.ranks[0].asked


async def test_a_step_that_is_not_asked_for_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    function = await controller_of(monkeypatch, call_timeout_s=0.05)
    with pytest.raises(TimeoutError, match="no call asked to learn step 3"):
        await function.publish(STEP)


async def test_every_rank_takes_part_in_a_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    function = await controller_of(monkeypatch, ranks=2)
    assert (await function.publish(Call("run", 1, 0))).value.probe == PROBE
    for rank in function._group.ranks:
        assert [name for name in rank.asked if name in ("publish", "probe")] == ["publish", "probe"]


class Lost(Exception):
    """Stands for a rank that never answers."""


def outcome(error: BaseException | None) -> Any:
    """A rank whose `learn` ends like this."""
    rank = Rank()
    if error is None:
        rank.learned.set_result({"loss": 1.0})
    elif not isinstance(error, Lost):
        rank.learned.set_exception(error)
    return rank


def raised(error: Exception) -> RayTaskError:
    """As Ray hands on what an actor's method raised."""
    return RayTaskError("learn", str(error), error)


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:42371")
DEAD = ActorUnavailableError("the process was killed by signal 9", None)


@pytest.mark.parametrize(
    ("outcomes", "error", "said"),
    [
        ([raised(CLOSED), DEAD], FunctionBroken, r"learner rank 1 was lost during `learn`: .*signal 9"),
        (
            [raised(CLOSED), raised(KeyError("odd"))],
            FunctionBroken,
            r"learner rank 1 failed in `learn`: KeyError: 'odd'",
        ),
        ([Lost(), raised(KeyError("odd"))], FunctionBroken, r"learner rank 1 failed in `learn`: KeyError: 'odd'"),
        ([Lost(), raised(OutOfMemory("rank 1 ran out"))], OutOfMemory, "rank 1 ran out"),
        ([None, Lost(), Lost()], FunctionBroken, r"did not finish `learn` within 0 s \(still at work: 1, 2\)"),
        ([raised(CLOSED), raised(CLOSED)], FunctionBroken, r"learner rank 0 failed in `learn`: RuntimeError: .*closed"),
    ],
    ids=["killed", "raised", "raised, others wait", "out of memory", "hangs", "network"],
)
async def test_a_failing_rank_ends_all_and_is_named(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[BaseException | None], error: type[Exception], said: str
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(ranks_module.ray, "kill", killed.append)
    monkeypatch.setattr(ranks_module, "GRACE_S", 0.05)
    ranks = [outcome(given) for given in outcomes]
    with pytest.raises(error, match=said):
        await RankGroup(ranks, 0.1, "learner").call_all("learn")
    assert killed == ranks


@pytest.mark.parametrize(
    ("actor", "model"), [(LearnerActor, LearnerRank), (SupervisedActor, SupervisedRank), (CriticActor, CriticRank)]
)
def test_methods_of_a_rank_are_called_in_their_phase(actor: Any, model: type) -> None:
    assert all(hasattr(model, method) for method in actor.phases)
    rank = actor.__new__(actor)
    rank._rank, rank._number, rank._settings = SimpleNamespace(save=lambda *given, **named: (given, named)), 0, PLANNED
    assert rank.call("save", "here", background=True) == (("here",), {"background": True})
    with pytest.raises(KeyError, match="close"):
        rank.call("close")


async def test_what_all_ranks_refuse_ends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module.ray, "kill", lambda _: pytest.fail("no rank may be ended"))
    ranks = [outcome(raised(ValueError("no advantages"))) for _ in range(2)]
    with pytest.raises(ValueError, match="no advantages"):
        await RankGroup(ranks, 1, "learner").call_all("learn")
