"""Check rewards before a run, and try the user's own on made-up responses.

A reward must give a number for whatever a policy writes. The trial runs in worker processes as in a run, and
`scoring.on_failure` and `scoring.max_failed` decide as in a run. HTTP rewards are not called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from rlhfless.prepare.data_rows import Row
from rlhfless.prepare.faults import Faults
from rlhfless.prepare.judges import judge_faults
from rlhfless.prepare.model import require_name
from rlhfless.prepare.model_weights import Head, weight_problems
from rlhfless.records import FinishReason, Prompt
from rlhfless.rewards import Failed, Outcome, RewardError, RewardSample, checker
from rlhfless.rewards.confinement import protection
from rlhfless.rewards.mathematics import MathReward
from rlhfless.rewards.protocol import RowFaults, column_problems, within_range
from rlhfless.rewards.workers import Workers
from rlhfless.spec import (
    CodeSpec,
    FormatSpec,
    HttpSpec,
    JudgeSpec,
    LengthPenaltySpec,
    MathSpec,
    PythonRewardSpec,
    RewardModelSpec,
    RewardSpec,
    RunSpec,
    ScoringSpec,
)
from rlhfless.spec.data import skip_hint
from rlhfless.spec.errors import InputError, Problem
from rlhfless.util.errors import class_and_line


def reward_problems(spec: RunSpec, prompts: Sequence[Prompt]) -> list[Problem]:
    """Report why rewards could not score samples of these prompts."""
    problems = []
    for index, reward in enumerate(spec.rewards):
        own = [prompt for prompt in prompts if reward.scores(prompt.source)]
        models = _model_faults(reward) if isinstance(reward, RewardModelSpec) else []
        if isinstance(reward, JudgeSpec) and reward.path is not None:
            models = judge_faults(reward, own)
        for what in (*_row_faults(reward, own, spec.scoring.http_hosts), *models):
            bad = {prompt.prompt_id for prompt, _ in what.faults} if isinstance(what, RowFaults) else ()
            hint = skip_hint(spec.data, len(bad), len(own)).removeprefix("; or ")
            problems.append(Problem(f"rewards.{index}", f"reward {reward.label!r}: {what}", hint))
    return problems


def unscorable(spec: RunSpec, prompts: Sequence[Prompt], faults: Faults, notes: Faults) -> list[Prompt]:  # noqa: ARG001
    """Add prompts that a reward cannot score to `faults`, where bad rows are skipped; a `Finish`. Elsewhere
    `reward_problems` reports them."""
    for reward in spec.rewards if spec.data.on_bad_row == "skip" else ():
        left = [prompt for prompt in prompts if reward.scores(prompt.source)]
        # A check names one kind of fault at a time: what comes after it is looked for in the other rows.
        while bad := _bad_rows(_row_faults(reward, left, spec.scoring.http_hosts)):
            for place, (prompt, why) in bad.items():
                kind, hint = f"reward {reward.label!r} cannot score it", "correct the rows, or the keys of the reward"
                faults.add(kind, Row(place, prompt.columns), why, hint)
            left = [prompt for prompt in left if prompt.where not in bad]
    return list(prompts)


def _bad_rows(problems: Sequence[str]) -> dict[str, tuple[Prompt, str]]:
    """Return the faulty rows by place, with the first fault of each."""
    rows: dict[str, tuple[Prompt, str]] = {}
    for what in problems:
        for prompt, why in what.faults if isinstance(what, RowFaults) else ():
            rows.setdefault(prompt.where, (prompt, why))
    return rows


def reward_warnings(spec: RunSpec, prompts: Sequence[Prompt]) -> list[str]:
    """Warn about doubtful rewards."""
    warnings = []
    for index, reward in enumerate(spec.rewards):
        if isinstance(reward, LengthPenaltySpec) and reward.free_tokens >= spec.generation.max_tokens:
            what = f"no response is longer than free_tokens ({reward.free_tokens}), so it is always 0"
            warnings.append(f"rewards.{index}: {what}")
        if isinstance(reward, MathSpec):
            own = [prompt for prompt in prompts if reward.scores(prompt.source)]
            warnings += [f"rewards.{index}: {what}" for what in MathReward(reward).warnings(own)]
        if isinstance(reward, FormatSpec):
            own = [prompt for prompt in prompts if reward.scores(prompt.source)]
            warnings += [f"rewards.{index}: {what}" for what in _opening_warnings(reward, own)]
        if isinstance(reward, CodeSpec):
            warnings += [f"rewards.{index}: {what}" for what in protection().warnings()]
    return warnings


def _opening_warnings(reward: FormatSpec, prompts: Sequence[Prompt]) -> list[str]:
    """Warn where prompts and `opened` disagree about who writes the first tag: the reward is always 0 there."""
    tag = f"<{reward.tags[0]}>"
    odd = [prompt for prompt in prompts if prompt.text.rstrip().endswith(tag) != reward.opened]
    if not odd:
        return []
    where = f"{len(odd)} of {len(prompts)} prompts, first {odd[0].where or odd[0].prompt_id}"
    if reward.opened:
        return [f"`opened` is true, but {where}, do not end with `{tag}`: no response can have the format there"]
    return [f"{where}, end with `{tag}`, so responses start inside of it and have no format: set `opened: true`"]


def columns_read(rewards: Sequence[RewardSpec]) -> frozenset[str] | None:
    """Return the columns that rewards read; None if a reward gets all. By convention, a reward's key for a column ends
    in `_field`."""
    if any(isinstance(reward, PythonRewardSpec | HttpSpec) for reward in rewards):
        return None
    named = [value for reward in rewards for key, value in reward if key.endswith("_field") and value is not None]
    named += [reward.columns for reward in rewards if isinstance(reward, JudgeSpec)]
    return frozenset(name for value in named for name in ((value,) if isinstance(value, str) else value))


def _row_faults(reward: RewardSpec, prompts: Sequence[Prompt], hosts: tuple[str, ...] | None) -> list[str]:
    if isinstance(reward, RewardModelSpec):
        return _prompt_faults(reward, prompts)
    try:
        return checker(reward, hosts).problems(prompts)
    except RewardError as error:
        return [error.what]


def _prompt_faults(reward: RewardModelSpec, prompts: Sequence[Prompt]) -> list[str]:
    if reward.prompt_field is None:
        return []
    kinds = (str, list) if reward.chat_template else (str,)
    needed = "a text or a list of messages is needed" if reward.chat_template else "a text is needed"
    faults = column_problems(reward.prompt_field, prompts, lambda value: isinstance(value, kinds), needed)
    hint = "Without `prompt_field` the prompt is scored as the policy saw it"
    return [RowFaults(f"{fault.rstrip(' .')}. {hint}", fault.faults) for fault in faults]


def _model_faults(reward: RewardModelSpec) -> list[str]:
    from transformers import AutoConfig

    try:
        require_name(reward.path, "")
    except InputError as error:
        return [f"{problem.what}; {problem.hint}" for problem in error.problems]
    try:
        config = AutoConfig.from_pretrained(reward.path, trust_remote_code=reward.trust_remote_code)
    except Exception as error:  # transformers raises many kinds of error, including network errors
        return [f"cannot read the configuration of {reward.path!r}: {class_and_line(error)}"]
    if config.num_labels != 1:
        return [f"{reward.path!r} has {config.num_labels} labels; a reward model has one, its score"]
    head: Head = "AutoModelForSequenceClassification"
    problems = weight_problems("", reward.path, head, trust_remote_code=reward.trust_remote_code)
    return [f"{reward.path!r}: {problem}" for problem in problems]


MOST_PROMPTS = 16
"""Prompts that are tried, evenly spread over the data set."""

MOST_SIBLINGS = 16
"""Samples per prompt for a batch reward, which may compare siblings; others get one."""

TRIAL_S = 30.0
"""Timeout of a reward's trial; samples not scored by then are not judged."""


def trial_calls(spec: RunSpec, prompts: Sequence[Prompt]) -> tuple[list[Problem], list[str]]:
    """Call the user's own rewards; return problems that would stop the run's first step, and warnings."""
    problems, warnings = [], []
    for index, reward in enumerate(spec.rewards):
        own = [prompt for prompt in prompts if reward.scores(prompt.source)]
        if not isinstance(reward, PythonRewardSpec) or not own:
            continue
        where, name = f"rewards.{index}", f"reward {reward.label!r}"
        samples = _samples(own, min(spec.samples_per_prompt, MOST_SIBLINGS) if reward.batch else 1)
        try:
            outcomes = asyncio.run(_outcomes(reward, samples))
        except RewardError as error:
            problems.append(Problem(where, f"{name}: {error.what}"))
            continue
        if what := _failures(samples, outcomes):
            if _stops(spec.scoring, outcomes):
                problems.append(Problem(where, f"{name}: {what}", _hint(spec.scoring)))
            else:
                warnings.append(f"{where}: {name}: {what}")
        if len(outcomes) < len(samples):
            late = f"{len(samples) - len(outcomes)} of {len(samples)} trial calls did not end within {TRIAL_S:g} s"
            warnings.append(f"{where}: {name}: {late}")
    return problems, warnings


def _samples(prompts: Sequence[Prompt], siblings: int) -> list[RewardSample]:
    chosen = np.unique(np.linspace(0, len(prompts) - 1, min(len(prompts), MOST_PROMPTS)).astype(int))
    return [
        RewardSample(
            prompt.text,
            text,
            len(text.split()),
            FinishReason.STOP,
            prompt.columns,
            prompt.prompt_id,
            number,
            where=prompt.where,
        )
        for prompt in (prompts[index] for index in chosen)
        for number in range(siblings)
        if (text := f"The answer is {number}.")
    ]


async def _outcomes(reward: PythonRewardSpec, samples: Sequence[RewardSample]) -> Mapping[int, Outcome]:
    """Return the outcomes known in time, by sample. Raises RewardError."""
    outcomes: dict[int, Outcome] = {}
    workers = Workers([reward], 1)
    try:
        await workers.start()
        async with asyncio.timeout(TRIAL_S):
            await workers.score(0, samples, outcomes.__setitem__)
    except TimeoutError:
        pass
    finally:
        workers.close()
    return {index: within_range(reward.label, reward.weight, outcome) for index, outcome in outcomes.items()}


def _failures(samples: Sequence[RewardSample], outcomes: Mapping[int, Outcome]) -> str:
    failed = {index: outcome for index, outcome in sorted(outcomes.items()) if isinstance(outcome, Failed)}
    if not failed:
        return ""
    first = next(iter(failed))
    return (
        f"{len(failed)} of {len(outcomes)} trial calls on made responses failed; the first: {samples[first]}: "
        f"{failed[first].cause}"
    )


def _stops(scoring: ScoringSpec, outcomes: Mapping[int, Outcome]) -> bool:
    """Whether a step with these failures would stop the run."""
    failed = sum(isinstance(outcome, Failed) for outcome in outcomes.values())
    return scoring.on_failure == "fail" or failed > scoring.max_failed * len(outcomes)


def _hint(scoring: ScoringSpec) -> str:
    hint = "return a finite number for every response, including unreadable ones"
    if scoring.on_failure == "fail":
        return hint
    return f"{hint}; or set scoring.max_failed to 1, and failures are only warned of here"
