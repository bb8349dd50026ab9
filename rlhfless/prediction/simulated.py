"""Prediction of a run's time and cost on given devices before it starts: its spec as a scenario of the simulator.

The simulator runs the run's own policy under its own contract. Latencies come from the devices' data sheets or, on the
devices of an earlier run of the same model, from a fit to that run. If response lengths are assumed, the band covers
half and twice the expected lengths; if they are known, the spread over seeds. With an earlier run on these devices, the
band is that of its steps (rlhfless.prediction.scatter).
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rlhfless.planning.inputs import text_config
from rlhfless.planning.memory_plan import Question
from rlhfless.planning.objects import PlannedCost
from rlhfless.records.ledger import added
from rlhfless.records.traces import Trace
from rlhfless.scaling.accounting import Interval, length, union
from rlhfless.scaling.engine_model import per_pass
from rlhfless.scaling.latency.attention import UnknownShape
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import FrozenBase, learner_states_bytes, published_bytes
from rlhfless.scaling.placement import CPU_KIND, NODE_DEVICES
from rlhfless.sim.experiment.compare import NO_HEARTBEATS_S, compare
from rlhfless.sim.experiment.figures import Totals
from rlhfless.sim.experiment.run import RunResult
from rlhfless.sim.experiment.shared import Arrangement, arrangements
from rlhfless.sim.replay.latency_file import LatencyFile, write_latency
from rlhfless.sim.scenarios.scenario import Scenario
from rlhfless.sim.scenarios.timing import FORWARD_OPERATIONS, learn_operations
from rlhfless.spec import JudgeSpec, RunSpec, ScheduleSpec, SyncSpec, TeacherSpec
from rlhfless.spec.base import count_of
from rlhfless.spec.learner import evaluated_share


@dataclass(frozen=True, slots=True)
class Drawn:
    """The number of samples in a step."""

    prompts: int
    samples: int
    """Samples per prompt."""
    learned_share: float
    """Fraction of the samples that the learner learns from."""

    @classmethod
    def of(cls, spec: RunSpec, signal: float | None) -> Drawn:
        """Return the samples of a step of the spec. `signal` is the share of groups with a signal, if known."""
        prompts, samples, needs = spec.prompts_per_step, spec.samples_per_prompt, spec.algorithm.needs
        share = 1.0 if signal is None else max(signal, 1 / prompts)  # a step learns at least one group
        if needs.redraws:
            drawn = min(math.ceil(prompts / share), prompts * (1 + needs.redraws))
            return cls(drawn, samples, min(share, prompts / drawn))
        return cls(prompts, samples, share if needs.signal_only else 1.0)

    @property
    def learned_samples(self) -> float:
        return self.prompts * self.samples * self.learned_share


def signal_of(trace: Trace | None) -> float | None:
    """Return the share of a run's groups with a signal, or None if not recorded."""
    shares = [record.metrics.get("groups_without_signal") for record in trace.steps] if trace is not None else []
    known = [share for share in shares if share is not None]
    return 1 - fmean(known) if known else None


STEPS, STEPS_QUICK = 6, 3
"""Number of simulated steps. The first is excluded because it includes the starts."""

SEEDS = 3

ASSUMED_SHARE = 0.25
"""Median response of an assumed workload, as a share of `generation.max_tokens`: limits are set so that few responses
reach them. The band covers an eighth to a half."""

SPREAD = 0.7
"""Standard deviation of the log of assumed lengths: between the short answers (0.45) and the long reasoning (1.0) of
the bundled scenarios."""

PERSISTENCE = 0.6
"""Share of the variance explained by the prompt; the bundled scenarios have 0.5 to 0.85."""

SHEET_FACTOR, SHEET_FACTOR_CPU = 2.0, 4.0
"""Factor that widens the band if latencies come from data sheets: on this project's CPU machine a small model was 3.5
times as fast as predicted from its sheet. An assumption for GPUs until some were measured."""

MEASURED_FACTOR = 1.25
"""The same factor for measured latencies if no run's steps show how far such a prediction is off. An assumption."""

PROMPT_TOKENS = 256
"""Median prompt length if unknown."""

LOWEST_MFU = 1e-4
"""Lowest MFU of a learner; any measured time beyond it counts as a fixed time per step."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response lengths assumed by a prediction."""

    median_tokens: float
    mean_tokens: float
    spread: float
    prompt_tokens: float
    source: str
    known: bool
    rows: int | None = None
    """Rows of the data; None if not read."""
    signal: float | None = None
    """Share of groups whose samples differ in their rewards; None if unknown."""
    drafted: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()
    """[places]: see Speculating; empty if no drafts are known."""
    drafter: str = "off"
    """`generation.speculation.method` of the run that drafted them."""

    def drafts(self, spec: RunSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return `drafted` and `accepted` for a run's own method, empty if unknown. `auto` drafts like `suffix`."""
        own, known = ("suffix" if one == "auto" else one for one in (spec.generation.speculation.method, self.drafter))
        return (self.drafted, self.accepted) if own == known else ((), ())

    @property
    def factors(self) -> tuple[float, ...]:
        """Return the multiples of the lengths that a prediction covers, the expected one first."""
        return (1.0,) if self.known else (1.0, 0.5, 2.0)

    def times(self, factor: float) -> Lengths:
        """Return the lengths scaled by a factor."""
        return replace(self, median_tokens=factor * self.median_tokens, mean_tokens=factor * self.mean_tokens)


def lengths_of(spec: RunSpec, trace: Trace | None) -> Lengths:
    """Return the lengths of an earlier run, or an assumption."""
    if trace is None or not trace.rollouts:
        median = max(ASSUMED_SHARE * spec.generation.max_tokens, 1.0)
        source = f"assumed: a median of {median:.0f} tokens, a quarter of generation.max_tokens"
        return Lengths(median, median * math.exp(SPREAD**2 / 2), SPREAD, PROMPT_TOKENS, source, known=False)
    tokens = np.array([row.response_tokens for row in trace.rollouts], float)
    prompts = np.array([row.prompt_tokens for row in trace.rollouts], float)
    calls = [call for call in trace.invocations if call.drafted]
    counts = (added(*(getattr(call, name) for call in calls)) for name in ("drafted", "accepted"))
    drafted, accepted = per_pass(sum(call.output_tokens for call in calls), *counts)
    return Lengths(
        float(np.median(tokens)),
        float(tokens.mean()),
        float(np.log(tokens).std()),
        float(np.median(prompts)),
        f"{len(tokens):,} responses of {trace.meta.run_id}",
        known=True,
        signal=signal_of(trace),
        drafted=drafted,
        accepted=accepted,
        drafter=trace.meta.spec["generation"]["speculation"]["method"] if accepted else "off",
    )


@dataclass(frozen=True, slots=True)
class Predicted:
    """A prediction and its inputs: means per step."""

    cost: PlannedCost
    busy_device_s: float
    response_tokens: float
    shares: Mapping[str, float]
    """By function: fraction of the time in which it works."""
    latency: str | None = None
    """Source of the engine latencies; None if nothing is generated."""

    def scaled(self, times: float, usd: float) -> Predicted:
        """Return the prediction with all durations multiplied by `times` and all costs by `usd`."""
        figures = {name: value for name, value in self.cost if isinstance(value, float)}
        values = {name: (usd if name.endswith("_usd") else times) * value for name, value in figures.items()}
        return replace(self, cost=self.cost.model_copy(update=values))


def predicted(
    asked: Question,
    config: dict[str, Any],
    lengths: Lengths,
    latency: LatencyFile | None,
    *,
    quick: bool = False,
) -> Predicted:
    """Return the time and cost of a run.

    `config` is the model's configuration; `latency` the model's measured latencies on these devices, if any. `quick`
    predicts at the expected lengths with one seed, so the band covers only the data sheets, and without heartbeats,
    which take five times as long as the rest. The policy's decisions between the events of a step saved 0 to 0.1 % of
    the steps of a 7B model on three kinds of devices, and up to 10 % of those of a 235B model with long responses.

    Raises InputError if the simulator cannot run it.
    """
    factors = (1.0,) if quick else lengths.factors
    with _scenarios(asked, config, lengths, latency, factors, quick=quick) as scenarios:
        by_factor = [compare(each).results[each.policies[0].shown] for each in scenarios]
    totals = [[Totals.of(run.steps[1:] or run.steps) for run in results] for results in by_factor]
    factor = sheet_factor(asked.sheet.kind) if latency is None else MEASURED_FACTOR
    cost = banded(
        asked.spec.steps,
        [[of.time_s / of.steps for of in many] for many in totals],
        [[of.usd / of.steps for of in many] for many in totals],
        factor,
        band_text(lengths, factor),
    )
    source = f"the data sheet of {asked.sheet.kind}" if latency is None else f"measured: {', '.join(latency.traces)}"
    busy_s = fmean(of.busy_device_s / of.steps for of in totals[0])
    tokens = fmean(of.response_tokens / of.steps for of in totals[0])
    return Predicted(cost, busy_s, tokens, _shares(by_factor[0][0]), source)


@contextmanager
def _scenarios(
    asked: Question,
    config: dict[str, Any],
    lengths: Lengths,
    latency: LatencyFile | None,
    factors: Sequence[float],
    *,
    quick: bool,
) -> Iterator[list[Scenario]]:
    """Yield the run as a scenario for each factor of its lengths, to be simulated within the block."""
    with tempfile.TemporaryDirectory() as folder:
        measured: dict[str, Any] = {}
        if latency is not None:
            file = Path(folder) / "latency.yaml"
            write_latency(latency, file)
            measured = _measured(asked, latency, lengths, str(file))
        size = (STEPS_QUICK, 1) if quick else (STEPS, SEEDS)
        if quick:
            measured["heartbeat_s"] = NO_HEARTBEATS_S
        drafts = _drafts(asked.spec, lengths) if latency is None else {}  # a fit includes drafts already
        measured["engine"] = _engine(asked) | drafts | measured.get("engine", {})
        yield [_scenario(asked, config, lengths, factor, measured, *size) for factor in factors]


def arranged(
    asked: Question, config: dict[str, Any], lengths: Lengths, latency: LatencyFile | None, runs: int
) -> tuple[Scenario, list[Arrangement]]:
    """Return the ways to place several such runs, with the schedule `sync`, on the devices, and their scenario.

    Raises InputError if the simulator cannot run them.
    """
    with _scenarios(asked, config, lengths, latency, (1.0,), quick=True) as (scenario,):
        in_step = scenario.model_copy(update={"schedule": SyncSpec()})
        return in_step, arrangements(in_step, [runs])[runs]


def sheet_factor(kind: str) -> float:
    """Return the factor that widens the band on devices without measurements."""
    return SHEET_FACTOR_CPU if kind == CPU_KIND else SHEET_FACTOR


def band_text(lengths: Lengths, factor: float) -> str:
    """Describe what the band of `banded` covers."""
    of_lengths = "" if lengths.known else "half and twice the assumed lengths, and "
    rests_on = "measured latencies" if factor == MEASURED_FACTOR else "data sheets"
    return f"{of_lengths}a factor of {factor:g} either way for {rests_on}"


def banded(
    steps: int,
    step_s: Sequence[Sequence[float]],
    step_usd: Sequence[Sequence[float]],
    factor: float,
    band: str,
) -> PlannedCost:
    """Return the cost of a run: means of the first figures, and the range of all figures widened by `factor`."""
    mean_s, mean_usd = fmean(step_s[0]), fmean(step_usd[0])
    all_s, all_usd = list(chain(*step_s)), list(chain(*step_usd))
    return PlannedCost(
        steps=steps,
        step_s=mean_s,
        wall_s=steps * mean_s,
        wall_low_s=steps * min(all_s) / factor,
        wall_high_s=steps * max(all_s) * factor,
        cost_usd=steps * mean_usd,
        cost_low_usd=steps * min(all_usd) / factor,
        cost_high_usd=steps * max(all_usd) * factor,
        band=band,
    )


def _shares(result: RunResult) -> dict[str, float]:
    """Return, by function, the fraction of the time after the first step in which it works."""
    trace = result.trace
    assert trace is not None, "the run of the first seed is traced"
    records = trace.steps[1:] or trace.steps
    since_s, until_s = records[0].start_s, records[-1].end_s
    spans: dict[str, list[Interval]] = defaultdict(list)
    for call in trace.invocations:
        if call.end_s > since_s and call.start_s < until_s:
            spans[call.function].append((max(call.start_s, since_s), min(call.end_s, until_s)))
    return {function: length(union(of)) / (until_s - since_s) for function, of in sorted(spans.items())}


def _measured(asked: Question, latency: LatencyFile, lengths: Lengths, file: str) -> dict[str, Any]:
    """Return the keys of a scenario that an earlier run on these devices has measured."""
    return {
        "engine": {"latency": {"type": "fitted", "path": file}},
        "fleet": {"type": "measured", "path": file},
        "learner": _measured_learner(asked, latency, lengths),
        "scoring": {"sample_s": latency.group_s / asked.spec.samples_per_prompt},
    }


def _measured_learner(asked: Question, latency: LatencyFile, lengths: Lengths) -> dict[str, Any]:
    """Return the learner's utilisation, clamped to its valid range, and the remaining seconds per step."""
    spec = asked.spec
    tokens = Drawn.of(spec, lengths.signal).learned_samples * (lengths.mean_tokens + lengths.prompt_tokens)
    learn_s = latency.learn.at(tokens * spec.epochs)
    flops_per_s = asked.learner_sheet.flops_per_s.value * asked.learner_count
    operations = learn_operations(spec.learner.recomputes, spec.model.lora is not None)
    peak_s = operations * asked.shape.active * tokens * spec.epochs / flops_per_s
    mfu = min(max(peak_s / learn_s, LOWEST_MFU), 1.0) if learn_s > 0 else 1.0
    evaluated = evaluated_share(spec.mini_batches, spec.epochs, spec.algorithm.needs.old_logprobs)
    simulated_s = peak_s / mfu * (1 + FORWARD_OPERATIONS / operations * evaluated / spec.epochs)
    evaluate_s = latency.evaluate.at(tokens) * evaluated if latency.evaluate is not None else 0.0
    fixed_s = max(learn_s + evaluate_s - simulated_s, 0.0) + latency.driver_s
    rate = mfu * asked.learner_sheet.flops_per_s.value
    return {"mfu": mfu, "expert_flops_per_s": rate, "expert_tokens": 0, "fixed_s": fixed_s}


def _scenario(
    asked: Question,
    config: dict[str, Any],
    lengths: Lengths,
    factor: float,
    measured: dict[str, Any],
    steps: int,
    seeds: int,
) -> Scenario:
    spec = asked.spec
    learner = {"learner_devices": spec.placement.learner_devices} if spec.placement.mode == "disaggregated" else {}
    policy, drawn = spec.scaling.policy.type, Drawn.of(spec, lengths.signal)
    values: dict[str, Any] = {
        "name": spec.name,
        "cluster": _cluster(asked),
        "model": {"config": config},
        "engine": measured["engine"],
        "workload": _workload(spec, lengths, factor),
        "prompts_per_step": drawn.prompts,
        "samples_per_prompt": drawn.samples,
        "max_tokens": spec.generation.max_tokens,
        "steps": steps,
        "seeds": seeds,
        "schedule": _schedule(spec),
        "placement": {"mode": spec.placement.mode} | learner,
        "learner": {
            "mini_batches": spec.mini_batches,
            "epochs": spec.epochs,
            "old_logprobs": spec.algorithm.needs.old_logprobs,
            "reference": spec.learner_is_reference,
            "adapters": spec.model.lora is not None,
            "version_bytes": published_bytes(asked.shape, spec) if spec.publishes_adapters else None,
            "learned_share": drawn.learned_share,
            "state_bytes_per_parameter": _state_bytes(asked),
            "micro_batch_tokens": spec.learner.pass_tokens,
            "gradient_checkpointing": spec.learner.recomputes,
            **_expert_rate(asked),
        }
        | measured.get("learner", {}),
        # On CPU cores scoring shares the cores of the other functions.
        "scoring": {"cores": 1 if asked.learner_sheet.kind == CPU_KIND else spec.scoring.workers}
        | measured.get("scoring", {}),
        "contract": spec.scaling.contract.model_dump(mode="json"),
        "policies": [{"name": policy if ":" not in policy else "cost_aware"}],
    }
    values |= {key: measured[key] for key in ("fleet", "heartbeat_s") if key in measured}
    if spec.learner.share_prefixes and "mfu" not in measured.get("learner", {}):  # else already included
        values["prefixes"] = {"levels": []}
    if not spec.scores_samples:
        values["scoring"] = None
    if spec.needs_reference and not spec.learner_is_reference:
        values["reference"] = {"devices": count_of(spec.reference.ranks)}
    if taught := [each for each in spec.teachers if each.path is not None]:  # the time of a server is not known
        values["teachers"] = [_teacher(each) for each in taught]
    if spec.judges:
        values["judges"] = [_judge(each) for each in spec.judges]
    if spec.critic is not None:
        values["critic"] = {"epochs": spec.epochs_of("critic"), "devices": spec.critic.world_size}
    if spec.scaling.generation.fixed:
        values["policies"] = [{"name": "static", "settings": {"actors": spec.scaling.generation.most_actors}}]
    return Scenario.model_validate(values)


WHOLE_EXPERTS_FLOPS_PER_S = 28e12
"""Operations per second and device of a learner whose ranks each gather all experts of a layer: 2.9 % of an H100's
peak, for 30B-A3B on eight of them (prime-rl BENCHMARKS, 2026-02, with the optimizer's states on the host)."""


def _expert_rate(asked: Question) -> dict[str, float]:
    """Return the rate of a learner whose ranks do not divide the experts; empty for others, and on CPU cores."""
    learner, shape = asked.spec.learner, asked.shape
    ranks, on_cpu = learner.world_size, asked.learner_sheet.kind == CPU_KIND
    divided = learner.experts_over(ranks, shape.divisible_experts) > 1
    if not shape.experts or divided or ranks == 1 or on_cpu:
        return {}
    return {"expert_flops_per_s": WHOLE_EXPERTS_FLOPS_PER_S}


def _teacher(teacher: TeacherSpec) -> dict[str, Any]:
    path = None if teacher.is_self else teacher.path
    return {"name": teacher.name, "devices": count_of(teacher.ranks), **_sizes(path)}


def _judge(judge: JudgeSpec) -> dict[str, Any]:
    tokens = 1 if judge.verdict == "yes_no" else judge.max_tokens
    values = {"name": judge.label, "devices": judge.tensor_parallel_size, "answer_tokens": tokens}
    return values | _sizes(judge.path)


def _sizes(path: str | None) -> dict[str, Any]:
    """Return the sizes of a scenario's further model; those of the policy if its own cannot be read."""
    if path is None:
        return {}
    try:
        config = text_config(path)
        ModelShape.of_config(config)
    except (UnknownShape, ValueError, OSError):
        return {}  # the memory plan says so
    return {"model": {"config": dict(config)}}


def _schedule(spec: RunSpec) -> ScheduleSpec:
    """Return the schedule of a scenario.

    It is `sync` if functions share devices: overlap gains nothing there, because their work adds up.
    """
    in_turn = spec.schedule.steps_ahead and spec.placement.mode == "colocated"
    return SyncSpec() if in_turn else spec.schedule


def _state_bytes(asked: Question) -> float:
    averaged = asked.spec.learner.average_decay is not None
    adapter = FrozenBase.of(asked.shape, asked.spec.model)
    parts = learner_states_bytes(asked.shape, averaged=averaged, adapter=adapter)
    return sum(part.size_bytes for part in parts) / asked.shape.parameters


def _cluster(asked: Question) -> dict[str, Any]:
    machines = [_machines(asked.sheet.kind, asked.count)]
    if asked.spec.placement.learner_kind is not None:  # a scenario has the learner on its first machines
        machines.insert(0, _machines(asked.learner_sheet.kind, asked.learner_count))
    return {"machines": machines, "prices": asked.spec.scaling.prices}


def _machines(kind: str, count: int) -> dict[str, Any]:
    per_node = min(count, NODE_DEVICES)
    return {"kind": kind, "nodes": math.ceil(count / per_node), "devices_per_node": per_node}


def _engine(asked: Question) -> dict[str, Any]:
    engine, quantization = asked.spec.generation.engine, asked.spec.generation.quantization
    # The rate of 8-bit integer products, and of CPUs, is unknown, so the 16-bit rate is used.
    fast = quantization == "fp8" and asked.sheet.fp8_flops_per_s is not None
    return {
        "weight_bits": 16 if quantization == "off" else 8,
        "product_bits": 8 if fast else 16,
        "tensor_parallel": engine.devices_per_actor,
        "max_sequences": engine.sequence_limit,
        "memory_fraction": engine.gpu_memory_fraction,
    }


def _drafts(spec: RunSpec, lengths: Lengths) -> dict[str, Any]:
    """Return the drafts measured in an earlier run, up to this run's depth; none if unknown."""
    speculation, (drafted, accepted) = spec.generation.speculation, lengths.drafts(spec)
    places = min(speculation.most, len(accepted))
    if not places:
        return {}
    return {
        "speculation": {
            "drafted": drafted[:places],
            "accepted": accepted[:places],
            "depth": "auto" if speculation.measured else places,
            "source": lengths.source,
        }
    }


def _workload(spec: RunSpec, lengths: Lengths, factor: float) -> dict[str, Any]:
    return {
        "type": "lognormal",
        "lengths": {
            "median_tokens": max(factor * lengths.median_tokens, 1.0),
            "spread": lengths.spread,
            "persistence": PERSISTENCE,
        },
        "prompts": 4 * Drawn.of(spec, lengths.signal).prompts,
        "median_prompt_tokens": lengths.prompt_tokens,
        "source": lengths.source,
    }
