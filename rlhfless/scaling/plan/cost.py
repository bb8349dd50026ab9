"""The time of one actor for any group of a list, in closed form.

A list holds samples from short to long; a group is a contiguous part [i, j) of it. The sequences of a group start
together and drain as they end. With a(B) in straight pieces (`curve.py`), bends c_h at the knots b_h, the iterations
of the group take

    a(B) summed = at_zero max(l) + slope_0 sum(l) + sum_h c_h (sum of all but the b_h longest l)

because B(t) summed over time is the sum of the lengths, and (B(t) - b)+ summed is the sum of all but the b longest.
Attention adds g (l p + l (l - 1) / 2) per sequence, and each prompt is prefilled once. All are differences of prefix
sums, so the time of any group is O(pieces), and the longest group under a time limit is one binary search.

Of prompts that begin alike (`PrefixTree`) a group prefills each shared prefix once, and of each prompt what comes after
its prefixes. The list charges a prefix to the first of each run of samples that have it, and a group that begins inside
a run pays for it again. That is exact where the users of a prefix are side by side, and an upper bound elsewhere.

A group may exceed what the engine runs at once (KV tokens, with each sequence's final length set aside, or its
limit of sequences). Then the longest sequences that fit go first, and each waiting sequence is admitted when another
ends. It adds its tokens at the rate of a full batch of similar sequences: a(B) / B seconds a token, with B the mean of
the numbers that fit from it upwards and downwards in the list. That is exact for waves of equal lengths.

Where other actors compute the prompts (`PrefillPool`), these are asked for from the long end of the list on: a group
[i, j) waits until those after j are computed, and the first of its own PIECES pieces. Then its sequences run as above,
but for each prompt the actor reads its KV instead of computing it. It ends no sooner than its last pieces would alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlhfless.prefixes.tree import PrefixTree
from rlhfless.scaling.engine_model import EngineModel
from rlhfless.scaling.plan import kernel
from rlhfless.scaling.plan.kernel import Times
from rlhfless.scaling.plan.options import DeviceOption
from rlhfless.scaling.plan.responses import Floats, Ints, Responses
from rlhfless.scaling.prefill_pool import PIECES, PrefillPool


class CapacityError(ValueError):
    """One response alone exceeds the KV cache of a device; the message names the device."""


class GroupTimes:
    """Times of all groups of one list on one kind of device.

    `order` [samples] are the samples from short to long.
    """

    def __init__(self, device: DeviceOption, step: Responses, order: Ints, prefill: PrefillPool | None = None) -> None:
        """`prefill`: the actors that compute the prompts; None: this one does."""
        tokens, prompt = step.tokens[order], step.prompt[order]
        context = step.prompt_tokens[prompt]
        reading_s = device.engine.context_s * tokens * (context + (tokens - 1) / 2)
        self._curve = device.curve
        self._lengths = _sums(tokens)
        own, shared = step.prompt_tokens - step.tree.shared_tokens, step.tree.own_tokens.astype(float)
        held_tokens, again_tokens = _charges(step.tree, own, shared, prompt)
        engine = device.engine if prefill is None else prefill.model
        charged_s, again_s = _charges(step.tree, *_prefills_s(engine, step), prompt)
        self._apart = prefill is not None
        self._wait = np.zeros(tokens.size + 1)
        if prefill is not None:
            computed_s = _sums(charged_s) / prefill.actors
            self._wait = prefill.move_s + computed_s[-1] - computed_s
            charged_s = np.diff(computed_s) / PIECES + prefill.kv_token_s * held_tokens
            again_s = prefill.kv_token_s * again_tokens
        self._rest = _sums(reading_s + charged_s)
        longest = np.maximum.accumulate(tokens) if step.longest is None else step.longest
        end_s, start_s = self._pieces(np.concatenate(([0.0], longest)))
        if (most := float((tokens + context).max())) > device.kv_capacity_tokens:
            raise CapacityError(
                f"{device.kind}: kv_capacity_tokens is {device.kv_capacity_tokens}, too little for a response that has "
                f"{most:.0f} tokens with its prompt; offer only devices with more memory, or cap the lengths"
            )
        floor, waiting_s = self._waves(device, _sums(tokens + held_tokens), float(context.max()))
        again_s = np.append(again_s, 0.0)
        self.table = Times(end_s, start_s, again_s, waiting_s, floor, np.array(device.curve.knots))

    def _pieces(self, running_longest: Floats) -> tuple[Floats, Floats]:
        """For a group whose size lies in piece m, the time is `end[m, j] - start[m, i]`."""
        curve, sums = self._curve, self._lengths
        end = curve.at_zero_s * running_longest + self._rest + curve.slopes_s[0] * sums + self._wait
        ends = [end]
        for knot, bend in zip(curve.knots[1:-1], np.diff(curve.slopes_s), strict=True):
            end = end.copy()
            end[knot:] += bend * sums[: max(sums.size - knot, 0)]
            ends.append(end)
        return np.stack(ends), np.stack([slope * sums + self._rest for slope in curve.slopes_s])

    def _waves(self, device: DeviceOption, kv_tokens: Floats, longest_prompt: float) -> tuple[Ints, Floats]:
        """For each end j of a group, `floor[j]` is the first of the samples that the engine runs at once; and sums of
        the seconds that each waiting sample takes."""
        # A group that begins among siblings holds their prompt too, so memory for one more prompt is kept free.
        free_tokens = device.kv_capacity_tokens - longest_prompt
        ends = np.arange(kv_tokens.size)
        by_memory = np.minimum(np.searchsorted(kv_tokens, kv_tokens - free_tokens, side="left"), ends - 1)
        floor = np.maximum(by_memory, np.maximum(ends - device.max_sequences, 0))
        upwards = np.searchsorted(floor, ends[:-1], side="right") - 1 - ends[:-1]
        at_once = np.maximum(upwards, (upwards + ends[1:] - floor[1:]) / 2)
        rate_s = self._curve.iteration_s(at_once) / at_once
        return floor, _sums(np.diff(self._lengths) * rate_s) + self._rest

    def time_s(self, begin: Ints, end: Ints) -> Floats:
        """Seconds for the groups [begin, end), element by element, with begin < end; shapes may be broadcast."""
        times = self.table
        fitting = np.maximum(begin, times.floor[end])
        piece = times.knots[1:-1].searchsorted(end - fitting, side="left")
        working = times.end_s[piece, end] - times.start_s[piece, fitting]
        return np.asarray(working + times.waiting_s[fitting] - times.waiting_s[begin] + times.again_s[begin])

    def one_s(self, begin: int, end: int) -> float:
        """`time_s` of one group that is not empty."""
        return kernel.one_s(self.table, begin, end)

    def with_last_piece_s(self, begins: Ints, end: int, seconds: Floats) -> Floats:
        """`seconds` [groups] of the groups that end where the one before begins, the first one at `end`; with prompts
        computed apart, of each no less than its last pieces take once they have come."""
        if not self._apart or not begins.size:
            return seconds
        begins, ends = begins[:, None], np.concatenate(([end], begins[:-1]))[:, None]
        rest = begins - (begins - ends) * np.arange(1, PIECES) // PIECES
        first_s = (self._wait[rest] - self._wait[ends]) / PIECES  # a piece of the group, and not one of the rest
        return np.asarray(np.maximum(seconds, (self.time_s(begins, rest) + first_s).max(axis=1)))


def _prefills_s(engine: EngineModel, step: Responses) -> tuple[Floats, Floats]:
    """Seconds to prefill of each prompt what comes after its shared prefixes, [prompts]; and of each shared prefix what
    comes after the one before it, [prefixes]. As differences of whole prefills: an engine does the parts of many
    prompts in one iteration, so no part pays for an iteration of its own."""
    tree = step.tree
    sizes, where = np.unique(np.concatenate([step.prompt_tokens, tree.tokens]), return_inverse=True)
    whole_s = np.array([engine.prefill_s(int(size)) if size else 0.0 for size in sizes])[where]
    prompts_s, prefixes_s = np.split(whole_s, [step.prompt_tokens.size])
    before_s = np.append(prefixes_s, 0.0)
    return prompts_s - before_s[tree.leaf], prefixes_s - before_s[tree.parent]


def _charges(tree: PrefixTree, own: Floats, shared: Floats, prompt: Ints) -> tuple[Floats, Floats]:
    """What each sample of a list adds to its group, [samples], and what the first one of a group adds beside that,
    [samples]: of `own`, [prompts], and `shared`, [prefixes]."""
    shared, levels = np.append(shared, 0.0), tree.levels[:, prompt]
    charged, whole = np.where(_first_of_run(prompt), own[prompt], 0.0), own[prompt]
    for level in levels:
        charged += np.where(_first_of_run(level), shared[level], 0.0)
        whole = whole + shared[level]
    return charged, whole - charged


def _sums(values: Floats) -> Floats:
    """[samples + 1]: sums of the first 0, 1, 2, ... values."""
    return np.concatenate(([0.0], np.cumsum(values)))


def _first_of_run(number: Ints) -> NDArray[np.bool_]:
    return np.concatenate(([True], number[1:] != number[:-1]))
