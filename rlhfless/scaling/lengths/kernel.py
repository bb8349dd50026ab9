"""The loops of `levels` and `predictor`, compiled. Those modules describe them, and are their only callers."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlhfless.scaling.compiled import compiled, part
from rlhfless.scaling.lengths.samples import Array, BoolArray, Ints, Samples


class Mills(NamedTuple):
    """The inverse Mills ratio at evenly spaced points."""

    lowest: float
    cell: float
    values: Array


class Shape(NamedTuple):
    """A distribution by its cumulative hazard, in units of its own spread. Both [points], ascending."""

    x: Array
    hazard: Array


@compiled
def gather(
    there: BoolArray,
    tokens: Array,
    ended: BoolArray,
    truncated: BoolArray,
    sample: Ints,
    kind: Ints,
    entries: Samples,
    drawn: Array,
) -> tuple[int, int]:
    """Collects the unfinished samples of a step [prompts, samples] in `sample` and `kind` [samples]: siblings that
    follow each other and have drawn as many tokens are of one kind. Returns how many samples and kinds there are.

    `entries` is the evidence that there is for the prompts of these, `drawn` [kinds] what each kind has: first come the
    kinds, and in the last places two for each prompt, what has ended and what was cut off.
    """
    prompts, siblings = there.shape
    samples = kinds = 0
    last = entries.prompt.size - 2 * prompts
    for prompt in range(prompts):
        before = -1.0
        for entry in range(last + 2 * prompt, last + 2 * prompt + 2):
            entries.number[entry] = entries.log_tokens[entry] = 0.0
        for sibling in range(siblings):
            if there[prompt, sibling] and not ended[prompt, sibling]:
                if tokens[prompt, sibling] != before:
                    before = drawn[kinds] = tokens[prompt, sibling]
                    entries.prompt[kinds], entries.number[kinds] = prompt, 0.0
                    entries.log_tokens[kinds] = math.log(before + 1.0)
                    kinds += 1
                entries.number[kinds - 1] += before > 0
                sample[samples], kind[samples] = sibling, kinds - 1
                samples += 1
        if before >= 0:
            for sibling in range(siblings):
                if ended[prompt, sibling]:
                    entry = last + 2 * prompt + truncated[prompt, sibling]
                    entries.number[entry] += 1.0
                    log_tokens = math.log(max(tokens[prompt, sibling], 1.0))
                    entries.log_tokens[entry] += (log_tokens - entries.log_tokens[entry]) / entries.number[entry]
    return samples, kinds


@compiled
def climb(
    prior_mean: Array,
    believed: Array,
    spread: Array,
    samples: Samples,
    mills: Mills,
    steps: int,
    mean: Array,
    precision: Array,
    pull: Array,
) -> None:
    """`mean` and `precision` [prompts] of the levels after the samples; `believed` is the precision of the prior, and
    `pull` [prompts] room to work. At first comes the peak of the prior and the finished samples."""
    for step in range(-1, steps + 1):
        for prompt in range(mean.size):
            precision[prompt], pull[prompt] = believed[prompt], 0.0
        for entry in range(samples.prompt.size):
            count, prompt = samples.number[entry], samples.prompt[entry]
            if count > 0 and (step >= 0 or samples.finished[entry]):
                at = prior_mean[prompt] if step < 0 else mean[prompt]
                pulls, weighs = _evidence(at, spread[prompt], samples.log_tokens[entry], samples.finished[entry], mills)
                precision[prompt] += weighs * count
                pull[prompt] += pulls * count
        for prompt in range(mean.size):
            if step < 0:
                mean[prompt] = prior_mean[prompt] + pull[prompt] / precision[prompt]
            elif step < steps:
                back = (prior_mean[prompt] - mean[prompt]) * believed[prompt]
                mean[prompt] += (back + pull[prompt]) / precision[prompt]


@compiled
def leave_out(
    level_mean: Array,
    level_variance: Array,
    spread: Array,
    samples: Samples,
    mills: Mills,
    mean: Array,
    variance: Array,
) -> None:
    """`mean` and `variance` [entries]: of the level [prompts] without one sample of each entry."""
    for entry in range(mean.size):
        prompt = samples.prompt[entry]
        mean[entry], variance[entry] = level_mean[prompt], level_variance[prompt]
        if samples.number[entry] > 0:
            finished, scale = samples.finished[entry], spread[prompt]
            pulls, weighs = _evidence(level_mean[prompt], scale, samples.log_tokens[entry], finished, mills)
            precision = 1 / level_variance[prompt] - weighs
            mean[entry] -= pulls / precision
            variance[entry] = 1 / precision


@part
def _evidence(mean: float, spread: float, log_tokens: float, finished: bool, mills: Mills) -> tuple[float, float]:
    """First derivative, and minus the second, of one sample's log likelihood in its prompt's level."""
    z = (log_tokens - mean) / spread
    if finished:
        return z / spread, 1 / spread**2
    ratio = _mills(z, mills)
    return ratio / spread, min(max(ratio * (ratio - z), 0.0), 1.0) / spread**2


@compiled
def ratios(z: Array, mills: Mills, out: Array) -> None:
    """`out` [values]: the inverse Mills ratio."""
    for value in range(z.size):
        out[value] = _mills(z[value], mills)


@part
def _mills(z: float, mills: Mills) -> float:
    place = min(max((z - mills.lowest) / mills.cell, 0.0), mills.values.size - 1.5)
    cell = int(place)
    low = mills.values[cell]
    ratio: float = low + (place - cell) * (mills.values[cell + 1] - low)
    return ratio


@compiled
def left_tokens(
    mean: Array,
    scale: Array,
    known: BoolArray,
    tokens: Array,
    run: Shape,
    errors: Shape,
    levels: Array,
    most: float,
    out: Array,
) -> None:
    """`out` [kinds, Q]: quantiles of what is still to be drawn after `tokens` [kinds], at cumulative hazards `levels`
    [Q]; 1 at least, and no more than `most` with what is drawn. The shape of the whole length is that of the `errors`
    where the level is `known` [kinds], else that of the `run`."""
    for kind in range(mean.size):
        shape, drawn, at, behind = errors if known[kind] else run, tokens[kind], 0, 0.0
        if drawn > 0:
            x = (math.log(drawn) - mean[kind]) / scale[kind]
            at = _before(shape.x, x, 0)
            behind = _between(shape.x, shape.hazard, at, x)
        longest = max(most - drawn, 1.0)
        for level in range(levels.size):
            hazard = behind + levels[level]
            at = _before(shape.hazard, hazard, at)
            length = math.exp(mean[kind] + scale[kind] * _between(shape.hazard, shape.x, at, hazard))
            out[kind, level] = min(max(length - drawn, 1.0), longest)


@part
def _before(xs: Array, x: float, low: int) -> int:
    """The last point at or before x, or the last but one beyond the end. It is looked for from a point on that is not
    behind it: near that one first, then in the half of what is left."""
    step = 1
    while low + step < xs.size - 1 and xs[low + step] <= x:
        low += step
        step *= 2
    high = min(low + step, xs.size - 1)
    while high - low > 1:
        middle = (low + high) // 2
        if xs[middle] <= x:
            low = middle
        else:
            high = middle
    return low


@part
def _between(xs: Array, ys: Array, at: int, x: float) -> float:
    """By a straight line from a point to the next one; held to what is there at both ends."""
    share = (x - xs[at]) / max(xs[at + 1] - xs[at], 1e-300)
    y: float = ys[at] + min(max(share, 0.0), 1.0) * (ys[at + 1] - ys[at])
    return y
