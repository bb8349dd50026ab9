"""The batches of a scenario's run, and the generator of synthetic batches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from rlhfless.prefixes.tree import PrefixTree
from rlhfless.prefixes.trie import NONE
from rlhfless.records.traces import trace_folder
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.sim.scenarios.work import (
    AzureWorkload,
    BimodalWorkload,
    EpisodesWorkload,
    LognormalSpec,
    LognormalWorkload,
    PrefixLevel,
    RecordedWorkload,
)
from rlhfless.sim.workloads.episodes import EpisodeShape
from rlhfless.sim.workloads.recorded import batches_of, read_azure, read_mooncake, read_runtime
from rlhfless.sim.workloads.synthetic import BimodalLengths, LengthShape, LognormalLengths, SyntheticWorkload
from rlhfless.spec.errors import InputError, Problem


def batches(scenario: Scenario, seed: int) -> list[RolloutBatch]:
    """Return the batches of all steps.

    Raises InputError if there are too few; WorkloadError, TraceError for a bad file.
    """
    drawn = _drawn(scenario, seed)
    levels = () if scenario.prefixes is None else scenario.prefixes.levels
    return [behind_prefixes(batch, levels) for batch in drawn] if levels else drawn


def behind_prefixes(batch: RolloutBatch, levels: Sequence[PrefixLevel]) -> RolloutBatch:
    """Return the batch with prefixes before its prompts.

    The number at the end of a prompt's name is its number, so that it has the same prefix in each epoch; prompts
    without a number get their position.
    """
    numbers = [_number(name, turn) for turn, name in enumerate(batch.prompt_ids)]
    known: dict[tuple[int, ...], int] = {}
    tokens: list[int] = []
    parent: list[int] = []
    leaf = []
    for number in numbers:
        kinds: tuple[int, ...] = ()
        above = NONE
        for level in levels:
            kinds = (*kinds, number % level.kinds)
            if kinds not in known:
                known[kinds] = len(tokens)
                tokens.append(level.tokens + (0 if above == NONE else tokens[above]))
                parent.append(above)
            above = known[kinds]
        leaf.append(above)
    tree = PrefixTree(*(np.array(column, dtype=np.int64) for column in (tokens, parent, leaf)))
    return dataclasses.replace(batch, prompt_tokens=batch.prompt_tokens + tree.shared_tokens, prefixes=tree)


def _number(name: str, turn: int) -> int:
    digits = re.search(r"[0-9]+$", name)
    return int(digits[0]) if digits else turn


def _drawn(scenario: Scenario, seed: int) -> list[RolloutBatch]:
    workload = scenario.workload
    if isinstance(workload, LognormalWorkload | BimodalWorkload):
        return list(synthetic(scenario, workload, seed).batches(scenario.steps))
    if isinstance(workload, EpisodesWorkload):
        fewest = workload.turns.fewest
        shape = EpisodeShape(workload.turn_tokens, workload.answer_tokens, workload.wait_s, fewest)
        counted = synthetic(scenario, workload, seed).batches(scenario.steps)
        return [shape.with_turns(batch, scenario.max_tokens, seed) for batch in counted]
    if isinstance(workload, RecordedWorkload):
        return _enough(scenario, read_runtime(trace_folder(workload.path)))
    requests = read_azure(workload.path) if isinstance(workload, AzureWorkload) else read_mooncake(workload.path)
    if len(requests) < scenario.prompts_per_step:
        return _enough(scenario, [])
    drawn = batches_of(
        requests,
        prompts_per_step=scenario.prompts_per_step,
        samples_per_prompt=scenario.samples_per_prompt,
        seed=seed,
    )
    # Each seed starts elsewhere in the file, so that runs differ by more than the order of siblings.
    first = int(np.random.default_rng(seed).integers(len(drawn)))
    turned = [dataclasses.replace(batch, step=i + 1) for i, batch in enumerate(drawn[first:] + drawn[:first])]
    capped = [
        dataclasses.replace(batch, response_tokens=np.minimum(batch.response_tokens, scenario.max_tokens))
        for batch in turned
    ]
    return _enough(scenario, capped)


def synthetic(
    scenario: Scenario, workload: LognormalWorkload | BimodalWorkload | EpisodesWorkload, seed: int
) -> SyntheticWorkload:
    """Return the generator of a synthetic workload; for episodes, of their numbers of turns.

    Raises InputError if an epoch is smaller than a step.
    """
    try:
        return SyntheticWorkload(
            _shape(workload),
            workload.prompts,
            scenario.prompts_per_step,
            scenario.samples_per_prompt,
            workload.median_prompt_tokens,
            workload.turns.most if isinstance(workload, EpisodesWorkload) else scenario.max_tokens,
            workload.drift_per_step,
            seed,
        )
    except ValueError as error:
        hint = "raise workload.prompts or lower prompts_per_step"
        raise InputError(scenario.name, [Problem("workload.prompts", str(error), hint)]) from error


def _shape(workload: LognormalWorkload | BimodalWorkload | EpisodesWorkload) -> LengthShape:
    def lognormal(spec: LognormalSpec) -> LognormalLengths:
        return LognormalLengths(**spec.model_dump())

    if isinstance(workload, EpisodesWorkload):
        return LognormalLengths(workload.turns.median, workload.turns.spread, workload.turns.persistence)
    if isinstance(workload, LognormalWorkload):
        return lognormal(workload.lengths)
    return BimodalLengths(lognormal(workload.short), lognormal(workload.long), workload.long_share)


def _enough(scenario: Scenario, drawn: list[RolloutBatch]) -> list[RolloutBatch]:
    if len(drawn) < scenario.steps:
        what = f"the workload has {len(drawn)} steps of {scenario.prompts_per_step} prompts, and steps is "
        problem = Problem("steps", f"{what}{scenario.steps}", "lower steps or prompts_per_step")
        raise InputError(scenario.name, [problem])
    kept = drawn[: scenario.steps]
    if isinstance(scenario.workload, RecordedWorkload) and kept[0].groups != scenario.prompts_per_step:
        what = f"{scenario.prompts_per_step}, but the recorded run has {kept[0].groups}"
        raise InputError(scenario.name, [Problem("prompts_per_step", what, f"set it to {kept[0].groups}")])
    return kept
