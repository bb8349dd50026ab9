"""Prefill actors (docs/prefill.md): the pieces of prompts that they compute, and the break-even with a single pool.
Pure.

An actor's prompts are handed over in PIECES pieces, those with the longest responses first. A prefill actor computes a
piece, first come, first served; then the generation actor reads its KV, and generates nothing meanwhile.

In a single pool, each of N engines computes its share of the prompts, and then generates from them:

    T = (G / N) prefill(p) + decode(G n / N sequences)

With separate prefill, P engines compute all prompts in K pieces, those with the longest responses first, and D = N - P
engines generate from each piece as it arrives: after k (G / K P) prefill(p) plus the transfer of its KV. Each generates
G n / D sequences, limited to its concurrency at a time. G prompts of p tokens have n responses each, of K lengths.

With equal lengths, and if an engine admits all sequences at once, a single pool is never slower: the last piece arrives
after (G / P) prefill(p), which is more than (G / N), and its whole response follows, in a larger batch. Separate
prefill wins through the tail of unequal lengths: the longest responses start after the first piece instead of after all
prompts of an engine. It needs engines whose iterations cost nearly the same in a larger batch, prompts whose time is
significant compared with the responses', and forecasts that identify the longest responses. Here they are assumed
perfect, so the gain is an upper bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from rlhfless.planning.memory_plan import Question
from rlhfless.prediction.simulated import Lengths
from rlhfless.scaling.assignment import PIECES
from rlhfless.scaling.engine_model import EngineModel, decode_s
from rlhfless.scaling.fleet_constants import KV_BYTES_PER_S, MOVE_S, kv_token_s
from rlhfless.scaling.latency.fitted import prior_of
from rlhfless.scaling.latency.roofline import RUNTIME_S
from rlhfless.scaling.placement import CPU_KIND
from rlhfless.sim.scenarios.timing import Packed

LEAST_GAIN = 0.05
"""Minimum relative gain of separate prefill: in a single pool, actors can be released individually, and nothing is
moved."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The samples of a step."""

    prompts: int
    samples: int
    """Samples per prompt."""
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    """[PIECES]: response lengths of equal parts of the samples, longest first."""

    @classmethod
    def of(
        cls, prompts: int, samples: int, prompt_tokens: float, median_tokens: float, spread: float, max_tokens: int
    ) -> StepShape:
        """Return the shape for lognormal response lengths with this median and standard deviation of the logarithm."""
        normal = NormalDist(math.log(max(median_tokens, 1.0)), spread) if spread else None
        middles = [(PIECES - part - 0.5) / PIECES for part in range(PIECES)]
        lengths = [math.exp(normal.inv_cdf(q)) if normal else median_tokens for q in middles]
        whole = tuple(max(min(round(length), max_tokens), 1) for length in lengths)
        return cls(prompts, samples, max(round(prompt_tokens), 1), whole)


@dataclass(frozen=True, slots=True)
class AlikeEngines:
    """The identical engines of a run."""

    model: EngineModel
    count: int
    max_sequences: int
    kv_token_s: float
    """Seconds to move the KV of one token; infinite without a connector."""
    move_s: float
    """Overhead of a transfer's calls, in seconds."""


@dataclass(frozen=True, slots=True)
class PoolComparison:
    """Generation times in a single pool and with separate prefill."""

    together_s: float
    apart_s: float
    """With the best number of prefill engines; infinite with a single engine, or without a connector."""
    prefill: int
    """The best number of prefill engines."""

    @property
    def pays(self) -> bool:
        """Return whether separate prefill is faster."""
        return self.apart_s < (1 - LEAST_GAIN) * self.together_s


def compare(step: StepShape, engines: AlikeEngines) -> PoolComparison:
    """Return both times, for the same number of engines."""
    together_s = one_pool_s(step, engines)
    splits = [(apart_s(step, engines, prefill), prefill) for prefill in range(1, engines.count)]
    best_s, prefill = min(splits, default=(math.inf, 0))
    return PoolComparison(together_s, best_s, prefill if math.isfinite(best_s) else 0)


def one_pool_s(step: StepShape, engines: AlikeEngines) -> float:
    """Return the seconds until the engine with the most prompts has generated all of its samples."""
    prompts = math.ceil(step.prompts / engines.count)
    prefilled_s = prompts * engines.model.prefill_s(step.prompt_tokens)
    return drawn_s([(prefilled_s, *part) for part in _parts(step, prompts)], step.prompt_tokens, engines)


def apart_s(step: StepShape, engines: AlikeEngines, prefill: int) -> float:
    """Return the seconds with `prefill` of the engines dedicated to prompts."""
    if not math.isfinite(engines.kv_token_s):
        return math.inf
    prompts = math.ceil(step.prompts / (engines.count - prefill))
    prefilled_s = step.prompts * engines.model.prefill_s(step.prompt_tokens) / prefill / PIECES
    moved_s = prompts / PIECES * step.prompt_tokens * engines.kv_token_s
    arrivals = [
        ((piece + 1) * prefilled_s + engines.move_s + moved_s, *part)
        for piece, part in enumerate(_parts(step, prompts))
    ]
    # An engine reads the KV of the other pieces while it generates from the first.
    return drawn_s(arrivals, step.prompt_tokens, engines) + (PIECES - 1) * moved_s


def _parts(step: StepShape, prompts: int) -> list[tuple[int, int]]:
    """Return (sequences, tokens of each) of each part of the prompts.

    With fewer prompts than PIECES some parts are empty, but never the longest, which a step waits for.
    """
    ends = [math.ceil(prompts * part / PIECES) for part in range(PIECES + 1)]
    sizes = [end - begin for begin, end in pairwise(ends)]
    return [(size * step.samples, tokens) for size, tokens in zip(sizes, step.response_tokens, strict=True)]


def drawn_s(arrivals: Sequence[tuple[float, int, int]], prompt_tokens: int, engines: AlikeEngines) -> float:
    """Return the seconds until an engine has generated all responses.

    `arrivals` are (time, sequences, tokens of each), in order of time. Between two events, arrivals or ends, the batch
    is constant.
    """
    waiting, running = deque(part for part in arrivals if part[1]), list[tuple[int, int, int]]()
    model, now_s = engines.model, 0.0
    while waiting or running:
        batch = sum(sequences for sequences, _, _ in running)
        if waiting and (waiting[0][0] <= now_s or not running) and batch < engines.max_sequences:
            at_s, sequences, tokens = waiting.popleft()
            now_s, admitted = max(now_s, at_s), min(sequences, engines.max_sequences - batch)
            running.append((admitted, 0, tokens))
            if sequences > admitted:
                waiting.appendleft((at_s, sequences - admitted, tokens))
            continue
        context = sum(sequences * (prompt_tokens + drawn) for sequences, drawn, _ in running)
        iterations = min(tokens - drawn for _, drawn, tokens in running)
        if waiting and waiting[0][0] > now_s:
            each_s = model.iteration_s(batch) + model.context_s * context
            iterations = min(iterations, math.ceil((waiting[0][0] - now_s) / each_s)) if each_s else iterations
        now_s += decode_s(model, batch, context, iterations)
        drawn_on = ((sequences, drawn + iterations, tokens) for sequences, drawn, tokens in running)
        running = [part for part in drawn_on if part[1] < part[2]]
    return now_s


@dataclass(frozen=True, slots=True)
class PlannedPrefill:
    """Generation of a step in a single pool and with separate prefill, on the same number of engines."""

    engines: int
    prefill_actors: int
    """The best number of prefill actors."""
    together_s: float
    apart_s: float
    pays: bool
    connector: str
    """The KV connector assumed."""

    @property
    def text(self) -> str:
        """Return the comparison as one line of a plan."""
        verdict = "pays" if self.pays else "does not pay"
        return (
            f"prompts on prefill actors ({self.prefill_actors} of {self.engines} actors, kv_connector "
            f"{self.connector}): generation of {self.apart_s:.3g} s against {self.together_s:.3g} s in one pool, "
            f"{verdict}"
        )


def planned_prefill(asked: Question, lengths: Lengths, model: EngineModel | None = None) -> PlannedPrefill | None:
    """Return the comparison for a run's own engines, or None with at most one engine.

    `model` is a measured engine; the default is that of the device's data sheet.
    """
    spec, kind = asked.spec, asked.sheet.kind
    if spec.supervised:
        return None
    count = spec.scaling.generation.most_actors + spec.scaling.prefill.max_actors
    engine = spec.generation.engine
    connector = spec.scaling.prefill.connector or ("folder" if kind == CPU_KIND else "nixl")
    step = StepShape.of(
        spec.prompts_per_step,
        spec.samples_per_prompt,
        lengths.prompt_tokens,
        lengths.median_tokens,
        lengths.spread,
        spec.generation.max_tokens,
    )
    engines = AlikeEngines(
        model or _expected(asked),
        count,
        engine.sequence_limit,
        kv_token_s(asked.shape, engine.devices_per_actor, KV_BYTES_PER_S[connector].value),
        MOVE_S.value,
    )
    found = compare(step, engines)
    if not found.prefill:
        return None
    return PlannedPrefill(count, found.prefill, found.together_s, found.apart_s, found.pays, connector)


def _expected(asked: Question) -> EngineModel:
    """Return an engine by its device's data sheet, as used by predictions on GPUs and by runs on CPU cores."""
    kind = asked.sheet.kind
    prior = prior_of(kind, asked.shape, asked.spec.generation.engine.devices_per_actor)
    return prior if kind == CPU_KIND else Packed.of(prior, RUNTIME_S)
