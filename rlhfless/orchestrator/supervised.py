"""A run that learns from given responses: its steps, and the evaluation on held-out examples.

A step takes the next examples, adds reference logprobs if the loss needs them, and learns. Nothing is generated, scored
or published. The examples of a step depend only on the seed and its number, so a repeated step, after a fault or in a
resumed run, has the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.algorithms.supervised import Objective, evaluate, objective_of, pack_examples
from rlhfless.fleet.pool import ReplicaPool
from rlhfless.functions.calls import Call
from rlhfless.orchestrator.base_run import BaseRun
from rlhfless.orchestrator.ledger import StepAttempt
from rlhfless.orchestrator.step_metrics import own_seconds
from rlhfless.records import FloatArray, StepRecord, Work
from rlhfless.records.rollouts import Example
from rlhfless.scaling.accounting import Phase
from rlhfless.util.clock import unix_s


@dataclass(kw_only=True)
class SupervisedRun(BaseRun):
    """A supervised run in progress. `order` and `held_out` have examples."""

    under_way: dict[int, StepAttempt] = field(default_factory=dict)
    """The steps in progress, by number."""
    _objective: Objective = field(init=False)
    _outputs: dict[str, list[FloatArray]] = field(default_factory=dict)
    """Reference logprobs of each example's sequences, by prompt id. They never change, and are computed once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._objective = objective_of(self.spec.type, self.spec.dpo, self.spec.learner.dtype)

    def begin(self, step: int) -> StepAttempt:
        """Start an attempt of a step."""
        begun = self.under_way[step] = self.clock.begin(step, fleet_is_up=self.trainers.all_there)
        return begun

    def examples(self, step: int) -> list[Example]:
        return cast(list[Example], self.order.batch(step - 1, self.spec.prompts_per_step))

    async def batch_of(self, call: Call, examples: Sequence[Example]) -> PackedBatch:
        """Pack examples into a batch, with all per-token outputs that the loss needs."""
        batch = pack_examples(examples)
        for pool in (*self.helpers, *self.trainers.pools):
            if not pool.kind.output:
                continue
            new = [example for example in examples if example.prompt_id not in self._outputs]
            if new:
                await self._compute(pool, call, new)
            parts = [values for example in examples for values in self._outputs[example.prompt_id]]
            batch = batch.with_columns(**{pool.kind.output: batch.placed(np.concatenate(parts))})
            if pool in self.trainers.pools:
                continue
            if not pool.bounds.idle or len(self._outputs) == len(self.order) + len(self.held_out):
                pool.release(0)  # its work is done for this step, or for the whole run
        return batch

    async def _compute(self, pool: ReplicaPool, call: Call, examples: Sequence[Example]) -> None:
        batch = pack_examples(examples)
        values = await self.serve(pool, Work.LOGPROBS, "compute", call, batch)
        parts = iter(np.split(values[batch.response_mask], np.cumsum(batch.response_lengths)[:-1]))
        for example in examples:
            self._outputs[example.prompt_id] = [next(parts) for _ in example.sequences]

    async def evaluate(self, call: Call, batch: PackedBatch) -> Mapping[str, float]:
        """Return the metrics of examples with the learner's current weights."""
        outputs = await self.work(self._the_learner, Work.EVALUATE, "evaluate", call, batch)
        return evaluate(self._objective, batch, outputs)

    def response_tokens(self, examples: Sequence[Example]) -> list[int]:
        """Return the number of tokens of each response, including the end-of-sequence token that a policy learns."""
        beside = int(self.spec.type == "reward_model")  # the extra token at which the score is read
        return [len(tokens) - len(each.token_ids) - beside for each in examples for tokens in each.sequences]

    def close_step(self, record: StepRecord, response_tokens: Sequence[int]) -> None:
        """Record the end of a step, and emit its metrics."""
        self._close(record, {"response_tokens": response_tokens})
        self.under_way.pop(record.step, None)


async def rollout(run: SupervisedRun, begun: StepAttempt) -> PackedBatch:
    """Return the batch of a step. Raises ReplicaLost or CallTimeout from the reference function."""
    return await run.batch_of(run.call(begun.step), run.examples(begun.step))


async def train(run: SupervisedRun, begun: StepAttempt, batch: PackedBatch) -> StepRecord:
    """Learn from the examples of a step. Raises ReplicaLost or CallTimeout."""
    learned = await run.trainers.learn(run.learner, run.call(begun.step), batch)
    times = run.ledger.step_times(begun, unix_s())
    examples = run.examples(begun.step)
    responses = run.response_tokens(examples)
    metrics = {
        "step_s": times.wall_s,
        "reference_s": times.phases_s[Phase.REFERENCE],
        **own_seconds(times),
        "learn_s": times.phases_s[Phase.LEARN],
        "overhead_s": times.overhead_s,
        "recovery_s": times.recovery_s,
        "prompt_tokens_mean": float(np.mean([len(example.token_ids) for example in examples])),
        "response_tokens_mean": float(np.mean(responses)),
        "response_tokens_max": float(max(responses)),
        "cost_usd": run.ledger.cost_usd(run.pools.values()),
        **learned,
    }
    record = StepRecord(begun.step, begun.start_s, unix_s(), metrics)
    run.close_step(record, responses)
    return record


async def evaluate_held_out(run: SupervisedRun, step: int) -> Mapping[str, float]:
    """Return the loss and its metrics on the held-out examples; there must be at least one."""
    run.clock.interrupt()
    call = run.call(step)
    return await run.evaluate(call, await run.batch_of(call, cast(Sequence[Example], run.held_out)))
