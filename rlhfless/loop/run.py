"""What a step needs of its run: pools of functions, published weights, ledger. Each stage is one method."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.fleet.pool import Pool
from rlhfless.fleet.replica import Replica
from rlhfless.fleet.tasks import together
from rlhfless.functions.base import Call
from rlhfless.loop.experience import Experience, ReferenceLogprobs, ScoredGroups, ScoreGroups
from rlhfless.loop.failures import added_up
from rlhfless.loop.generation import Draw, GenerationStage, sampling_of
from rlhfless.loop.holds import Keeper
from rlhfless.loop.ledger import Ledger
from rlhfless.loop.prompts import PromptOrder
from rlhfless.records import (
    FloatArray,
    Group,
    Prompt,
    PublishedWeights,
    StepRecord,
    Work,
)
from rlhfless.spec import RunSpec

HELD_OUT_SEED_STEP = -1
"""All evaluations draw with the same seeds, so that they differ by the weights alone."""


@dataclass
class Run:
    """A run that is under way."""

    run_id: str
    attempt: int
    spec: RunSpec
    order: PromptOrder
    held_out: Sequence[Prompt]
    generation: Pool
    scoring: Keeper
    reward_model: Keeper | None
    reference: Keeper | None
    learner: Pool
    ledger: Ledger
    published: PublishedWeights
    perturbed: PublishedWeights
    """A version whose load must move every engine's outputs; see GenerationFunction.prove_loading."""
    stage: GenerationStage | None = None
    """The generation that is under way."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of all functions of this run."""
        keepers = [keeper.pool for keeper in (self.scoring, self.reward_model, self.reference) if keeper]
        return (self.generation, *keepers, self.learner)

    def call(self, step: int) -> Call:
        """The identity that all calls of a step carry."""
        return Call(self.run_id, self.attempt, step)

    # -- generation

    def plan(self, step: int) -> Draw:
        """Which samples the step draws, and with which seeds."""
        spec = self.spec
        return Draw(
            call=self.call(step),
            prompts=tuple(self.order.batch(step - 1, spec.prompts_per_step)),
            samples_per_prompt=spec.samples_per_prompt,
            sampling=sampling_of(spec),
            version=self.published.version.label,
            work=Work.GENERATE,
            seed=spec.seed,
            seed_step=step,
        )

    def plan_held_out(self, step: int, *, greedy: bool) -> Draw:
        """The samples of an evaluation."""
        spec = self.spec
        return Draw(
            call=self.call(step),
            prompts=tuple(self.held_out),
            samples_per_prompt=1 if greedy else spec.evaluation.samples_per_prompt,
            sampling=sampling_of(spec, greedy=greedy),
            version=self.published.version.label,
            work=Work.HELD_OUT,
            seed=spec.seed,
            seed_step=HELD_OUT_SEED_STEP,
        )

    def generate(self, draw: Draw) -> AsyncIterator[Group]:
        """Groups as they are complete."""
        self.stage = GenerationStage(self.generation, draw, self.spec)
        return self.stage.groups()

    async def add_actor(self, call: Call) -> Replica:
        """Start one more generation actor and give it the current weights; during a step it takes work over."""
        actor = await self.generation.add()
        await self.prove_loading(actor, call)
        await self.generation.sync_one(actor, self.published, call)
        if self.stage is not None:
            await self.stage.rebalance()
        return actor

    async def remove_actor(self, actor: Replica) -> None:
        """Drain a chosen generation actor and stop it; during a step its samples go on elsewhere."""
        if self.stage is not None:
            await self.stage.drain(actor)
        await self.generation.stop(actor)

    async def prove_loading(self, actor: Replica, call: Call) -> float:
        """Check that loads reach every tensor of a new engine."""
        return await actor.call(
            "prove_loading",
            call,
            self.perturbed,
            timeout_s=self.spec.timeouts.sync_s,
            waiting_for="the proof that loads reach every tensor",
            work=Work.LOAD_WEIGHTS,
        )

    # -- scoring and reference

    def scoring_of(self, call: Call) -> ScoreGroups:
        """The scoring stage of a step. A replica that was released is started again, at a recorded price."""

        async def parts(keeper: Keeper, groups: Sequence[Group]) -> ScoredGroups:
            return await self._work(await keeper.ready(), Work.SCORE, "score", call, groups)

        async def score(groups: Sequence[Group]) -> ScoredGroups:
            keepers = [keeper for keeper in (self.scoring, self.reward_model) if keeper]
            scored = await together(*(parts(keeper, groups) for keeper in keepers))
            return added_up(groups, scored, self.spec.scoring)

        return score

    def reference_of(self, call: Call) -> ReferenceLogprobs | None:
        """The reference stage of a step; None when the run has no KL term."""
        keeper = self.reference
        if keeper is None:
            return None

        async def logprobs(groups: Sequence[Group]) -> list[list[FloatArray]]:
            replica = await keeper.ready()
            batch = pack(groups)
            values = await self._work(replica, Work.LOGPROBS, "logprobs", call, batch)
            return _by_group(values, batch, groups)

        return logprobs

    def release_idle(self, step: int) -> None:
        """Scoring and reference have done their work of this step: keep them warm or release them."""
        for keeper in (self.scoring, self.reward_model, self.reference):
            if keeper is not None:
                keeper.idle(step)

    # -- learner

    async def evaluate(self, call: Call, batch: PackedBatch) -> FloatArray:
        """Old logprobs `[tokens]`: the policy before the first update of the step."""
        return await self._work(await self.learner.ready(), Work.EVALUATE, "evaluate", call, batch)

    async def learn(self, call: Call, batch: PackedBatch) -> Mapping[str, float]:
        """The optimiser steps of one training step."""
        replica = await self.learner.ready()
        # Fewer where dropped samples leave fewer groups.
        mini_batches = min(self.spec.mini_batches, batch.denominators.groups)
        return await self._work(replica, Work.LEARN, "learn", call, batch, mini_batches)

    async def publish(self, call: Call) -> PublishedWeights:
        """Write the learner's weights to the store, as those of `call`'s step."""
        return await self._work(await self.learner.ready(), Work.PUBLISH, "publish", call)

    async def checkpoint(self, call: Call, folder: str) -> str:
        """Save the model in Hugging Face format."""
        return await self._work(await self.learner.ready(), Work.CHECKPOINT, "checkpoint", call, folder)

    async def _work(self, replica: Replica, work: Work, method: str, call: Call, *arguments: object):  # type: ignore[no-untyped-def]
        return await replica.call(
            method,
            call,
            *arguments,
            timeout_s=self.spec.timeouts.call_s,
            waiting_for=f"{work} of step {call.step}",
            work=work,
        )

    # -- ledger

    async def close_step(self, record: StepRecord, experience: Experience) -> None:
        """Write the step to the ledger."""
        for group, scores in zip(experience.groups, experience.scores, strict=True):
            self.ledger.add_group(record.step, group, scores)
        for pool in self.pools:
            for replica in pool.replicas():
                replica.cut()
        self.ledger.add_step(record)
        self.ledger.flush(record.step)


def _by_group(values: FloatArray, batch: PackedBatch, groups: Sequence[Group]) -> list[list[FloatArray]]:
    """Cut `values` [tokens] into response parts, for the groups and rollouts in their order."""
    responses = np.split(values[batch.response_mask], np.cumsum(batch.response_lengths)[:-1])
    names = [
        rollout.key for group in sorted(groups, key=lambda group: group.prompt.prompt_id) for rollout in group.rollouts
    ]
    found = dict(zip(names, responses, strict=True))
    return [[found[rollout.key] for rollout in group.rollouts] for group in groups]
