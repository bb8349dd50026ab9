"""The controller and rank actors of a function that trains a model (rlhfless.functions.ranks), and of the critic.

`learn` sends the whole batch to all ranks. It is idempotent by step: a repeated call gets the first call's answer, so a
retry never takes a second optimiser step. After a lost rank, a new replica resumes from a checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import ray

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.base import CallResult, DistributedSettings, admitted
from rlhfless.functions.calls import Call, CallUsage, Reply
from rlhfless.functions.launching import Launch
from rlhfless.functions.ranks import DistributedFunction, RankActor
from rlhfless.scaling.function_specs import FunctionSpec
from rlhfless.scaling.placement import Allocation
from rlhfless.spec import AdamWSpec, AlgorithmSpec, CriticSpec, ModelSpec, TrainingSpec

if TYPE_CHECKING:
    from rlhfless.functions.training.critic import CriticRank
    from rlhfless.functions.training.rank import TrainingRank


Learned: TypeAlias = Reply[Mapping[str, float]]
"""The metrics of a training step."""


class TrainedFunction(DistributedFunction):
    """The controller of a trained model; `actor` is a TrainingActor."""

    async def __init__(self, settings: TrainedSettings) -> None:  # type: ignore[misc]
        self._learning: tuple[Call, asyncio.Task[Learned]] | None = None
        self._step = 0
        """The last training step applied to the weights."""
        self._asked = asyncio.Event()
        """Set and replaced by each new `learn`."""
        await super().__init__(settings)  # type: ignore[misc]  # Serve awaits constructors

    @property
    def _step_of_weights(self) -> int:
        return self._step

    async def learn(self, call: Call, batch: PackedBatch, passes: Passes) -> Learned:
        """Take a training step: an optimiser step per mini-batch of each pass. Return the metrics.

        Idempotent by step: a repeated call, even while the first runs, gets the first call's answer.
        """
        self.admit(call)
        if self._learning is None or self._learning[0] != call:
            self._learning = (call, asyncio.create_task(self._learn(call, batch, passes)))
            self._asked.set()
            self._asked = asyncio.Event()
        return await asyncio.shield(self._learning[1])

    async def _learn(self, call: Call, batch: PackedBatch, passes: Passes) -> Learned:
        start_s = time.time()
        metrics = dict((await self._group.call_all("learn", ray.put(batch), passes))[0])
        self._step = call.step
        shared = int(metrics.pop("shared_prompt_tokens", 0))
        tokens, sequences = passes.epochs * len(batch.tokens), passes.epochs * batch.sequences
        usage = CallUsage(input_tokens=tokens, cached_tokens=shared, sequences=sequences)
        return self.reply(metrics, start_s, usage)

    @admitted
    async def check_shared_storage(self, _: Call, token: str) -> CallResult[tuple[str, ...]]:
        """Return why ranks cannot read a file of the run, or write next to it; empty if all can."""
        answers: list[str | None] = await self._group.call_all("check_shared_storage", token)
        return CallResult(tuple(sorted({fault for fault in answers if fault})))

    @admitted
    async def restore(self, call: Call, location: str) -> CallResult[None]:
        """Load a checkpoint and resume after its step. Idempotent."""
        await self._restore(call, location)
        return CallResult(None)

    async def _restore(self, call: Call, location: str) -> None:
        await self._group.call("restore", location)
        self._learning, self._step = None, call.step

    @admitted
    async def checkpoint(self, _: Call, location: str, notes: Mapping[str, Any], background: bool) -> CallResult[bool]:
        """Save model, optimiser and the run's `notes`. Return whether ranks still write files (TrainingRank.save)."""
        later: list[bool] = await self._group.call("save", location, notes, background=background)
        return CallResult(all(later))

    @admitted
    async def wait_written(self, _: Call) -> CallResult[None]:
        """Wait until the last checkpoint's files are written. Raises CheckpointError."""
        await self._group.call_all("wait_written")
        return CallResult(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSettings(DistributedSettings):
    """Settings of a replica that trains a model."""

    model: ModelSpec
    training: TrainingSpec
    optimizer: AdamWSpec
    algorithm: AlgorithmSpec


S = TypeVar("S", bound=TrainedSettings)
R = TypeVar("R", bound="TrainingRank")


class TrainingActor(RankActor[S]):
    """Rank `rank` of a trained model."""

    phases: ClassVar[Mapping[str, str]] = {"restore": "restore", "save": "checkpoint"}
    _rank: TrainingRank
    """Set by `_load`."""

    def _joined(self, address: str, rank: Callable[..., R], *own: Any) -> R:
        """Create this rank's model of class `rank`, with its `own` arguments, among the others. *Collective.*"""
        settings, training = self._settings, self._settings.training
        if training.threads is None and settings.rank_bindings[self._number].kind == "cpu":
            training = training.model_copy(update={"threads": self._threads})
        with self._at_work("learn"):
            return rank(self._place(address), settings.model, training, settings.optimizer, *own)

    def learn(self, batch: PackedBatch, passes: Passes) -> Mapping[str, float]:
        """Take a training step (TrainingRank.learn); add this call's `shared_prompt_tokens`. *Collective.*"""
        before = self._rank.shared_prompt_tokens
        with self._at_work("learn"):
            metrics = self._rank.learn(batch, passes)
        return metrics | {"shared_prompt_tokens": float(self._rank.shared_prompt_tokens - before)}

    @ray.method(concurrency_group="waits")
    def wait_written(self) -> None:
        """Wait for the last checkpoint's files (TrainingRank.wait_written)."""
        self._rank.wait_written()

    def check_shared_storage(self, token: str) -> str | None:
        """Return why this node cannot read a file of the run, or write next to it; None if it can."""
        from rlhfless.records.checkpoints import files_of

        files, path = files_of(token)
        answer = f"{path}-{self.named.replace(' ', '-')}-{self._number}"
        try:
            files.pipe_file(answer, files.cat_file(path))
            files.rm_file(answer)
        except Exception as error:  # every kind of store raises errors of its own
            return f"node {self.node()}: {type(error).__name__}: {error}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings(TrainedSettings):
    """Settings of a critic replica. `model` is its initial model."""

    training: CriticSpec


class CriticActor(TrainingActor[CriticSettings]):
    """Rank `rank` of the critic."""

    named = "critic"
    phases: ClassVar[Mapping[str, str]] = {**TrainingActor.phases, "compute": "values"}
    _rank: CriticRank

    def _load(self, address: str) -> None:
        from rlhfless.functions.training.critic import CriticRank

        self._rank = self._joined(address, CriticRank, self._settings.algorithm)


class CriticFunction(TrainedFunction):
    """The controller of the critic. A checkpoint of the run includes the state of critic and learner."""

    named = "critic"
    actor = CriticActor

    @staticmethod
    def settings_of(launch: Launch, kind: FunctionSpec, allocation: Allocation) -> CriticSettings:
        """Return a replica's settings for an allocation with bound devices."""
        spec = launch.spec
        assert spec.critic is not None, "the kind is wanted with it alone"
        return CriticSettings(
            model=launch.within_context(spec.critic_source),
            training=spec.critic,
            optimizer=spec.critic.optimizer,
            algorithm=spec.algorithm,
            **launch.of_ranks(kind, allocation),
        )
