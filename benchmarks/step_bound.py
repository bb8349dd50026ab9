"""A lower bound of the time and the cost of a step, which no policy of the simulator can beat. Pure.

Every actor, service and learner is taken to be warm, or as near to it as its devices allow; nothing waits for a
decision, and no machine is billed beyond its use. What is left cannot be avoided:

    time   weights to load, the longest response alone (or all tokens at the rate of the whole fleet, if that takes
           longer), its group's scoring or reference, learning; where all devices are shared, a wake on either side
    cost   the actors' seconds (below), the wakes and loads of the fewest actors that can end in time, the services'
           and the learner's work; for owned devices all devices over all the time, less what their release earns

**Actor seconds.** A decode iteration of a batch takes a(B) + g (context), and a(B) is at least any line
alpha + beta B below it. So tokens cost beta each, their context g, and only the number of iterations is open. It is at
least the longest response; all tokens by the most sequences at once; all KV (own tokens of each sample) by the memory;
and under a limit D more, because a large batch is slow: sample i has l iterations within D, each of which takes alpha
plus the s = beta + g context of all its batch. If an iteration is charged to its samples in proportion to their s,
sample i pays sum s / S over its iterations, where S is the sum over its batch, and all these S add up to D - alpha l at
most. By Cauchy and Schwarz that is at least

    (sum of sqrt(s))^2 / (D - alpha l).

Sums over the tokens of a sample are replaced by integrals below them. Where the fleet has several kinds of devices each
part of the work is priced by the best kind for it, without the last of these bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rlhfless.records import FunctionRole
from rlhfless.scaling.latency.fitted import LinearEngine
from rlhfless.scaling.prices import SECONDS_PER_HOUR, PriceBook
from rlhfless.sim.engine import EngineShape, PricedModel
from rlhfless.sim.experiment.figures import DeviceSupply
from rlhfless.sim.samples import RolloutBatch
from rlhfless.sim.setup import ActorShape, Setup, SlotSetup

Floats = npt.NDArray[np.float64]

LINES = 4
"""Lines below a(B) that are tried: its convex hull may have hundreds, and a few spread over it bound nearly as well."""

FINE = 1.01
"""Ratio of two step times next to each other in `trade_off`."""

LONGEST = 12.0
"""Largest step time in it, by the least; a limit beyond it saves hardly anything."""

PRECISION = 1e-9
"""Relative rounding of sums."""


@dataclass(frozen=True)
class BoundWork:
    """The work of one step's generation, whatever draws it. The first token of a response comes with its prefill."""

    iterations: Floats  # [samples]: decode iterations of each
    prompt: Floats  # [samples]
    behind: Floats  # [samples]: tokens of its prompt that other prompts share, and that another actor can have sent
    group: npt.NDArray[np.int64]  # [samples]
    prefill_tokens: float
    """Each group's prompt and each shared prefix once, and of each sample the part of its prompt that fills no
    block."""
    prefill_pairs: float
    """Pairs of a prefilled token and a token that it attends to."""

    @classmethod
    def of(cls, batch: RolloutBatch, block_tokens: int) -> BoundWork:
        prompt = batch.prompt_tokens[batch.group].astype(np.float64)
        shared = np.floor((prompt - 1) / block_tokens) * block_tokens
        own = prompt - shared
        tree = batch.tree
        behind = tree.shared_tokens[batch.group].astype(np.float64)
        once, begins = np.zeros(batch.groups + len(tree)), np.zeros(batch.groups + len(tree))
        begins[batch.group], once[batch.group] = np.minimum(behind, shared), shared
        begins[batch.groups :], once[batch.groups :] = tree.tokens - tree.own_tokens, tree.tokens
        pairs = float((own * (shared + own / 2)).sum() + ((once**2 - begins**2) / 2).sum())
        iterations = np.maximum(batch.response_tokens - 1, 0).astype(np.float64)
        return cls(iterations, prompt, behind, batch.group, float(own.sum() + (once - begins).sum()), pairs)

    @cached_property
    def context(self) -> Floats:
        """[samples]: sum of the contexts that its iterations read."""
        return np.asarray(self.iterations * self.prompt + self.iterations * (self.iterations + 1) / 2)

    @property
    def own_kv(self) -> float:
        """Sum over all iterations of the tokens whose KV no sibling shares."""
        return float((self.iterations * (self.iterations + 1) / 2).sum())


@dataclass(frozen=True, slots=True)
class ActorKind:
    """The actors on one kind of device."""

    actors: int
    usd_per_s: float
    """Saving of a second in which an actor does not hold its devices."""
    lines: tuple[tuple[float, float], ...]
    """alpha and beta of lines below a(B)."""
    one_s: float
    """a(1)."""
    context_s: float
    prefill_token_s: float
    prefill_pair_s: float
    max_sequences: int
    kv_tokens: int
    up_s: float
    """Least seconds that an actor holds its devices in a step before it draws: a forced wake, and the weights."""

    @classmethod
    def of_engine(
        cls, shape: EngineShape, prices: PricedModel, actors: int, usd_per_s: float, up_s: float
    ) -> ActorKind:
        """Of so many actors with this engine. An engine with several ways to decode is no faster than the fastest one
        for each batch, with the context of the way that reads it fastest."""
        table = prices.costs.iteration_s[:, 1:].min(axis=0)
        line = LinearEngine.of(prices.model)
        return cls(
            actors,
            usd_per_s,
            lines_below(table),
            float(table[0]),
            float(prices.costs.context_s.min()),
            line.prefill_token_s,
            line.prefill_context_s,
            shape.max_sequences,
            shape.kv_blocks * shape.block_tokens,
            up_s,
        )

    def prefill_s(self, work: BoundWork) -> float:
        return self.prefill_token_s * work.prefill_tokens + self.prefill_pair_s * work.prefill_pairs

    def alone_s(self, work: BoundWork) -> Floats:
        """[samples]: seconds of each response if it has an actor to itself."""
        pairs = (work.prompt**2 - work.behind**2) / 2
        prefill_s = (work.prompt - work.behind) * self.prefill_token_s + self.prefill_pair_s * pairs
        return np.asarray(prefill_s + work.iterations * self.one_s + self.context_s * work.context)

    def seconds(self, work: BoundWork, within_s: Floats) -> Floats:
        """[limits]: least actor seconds of all the work, if each response ends within `within_s` [limits] from when
        its actor can work; infinite if that is too short."""
        most = min(self.max_sequences, work.iterations.size)
        tokens = float(work.iterations.sum())
        least = max(float(work.iterations.max()), tokens / most, work.own_kv / self.kv_tokens)
        found = np.full(within_s.shape, -math.inf)
        for alpha_s, beta_s in self.lines:
            iterations = np.maximum(least, self._crowded(work, within_s, alpha_s, beta_s))
            found = np.maximum(found, alpha_s * iterations + beta_s * tokens)
        too_short = within_s < self.alone_s(work).max() * (1 - PRECISION)
        known = found + self.context_s * float(work.context.sum()) + self.prefill_s(work)
        return np.asarray(np.where(too_short, math.inf, known))

    def _crowded(self, work: BoundWork, within_s: Floats, alpha_s: float, beta_s: float) -> Floats:
        """[limits]: iterations by the inequality of Cauchy and Schwarz."""
        low = beta_s + self.context_s * work.prompt
        high = low + self.context_s * work.iterations
        if self.context_s > 0:
            roots = (high**1.5 - low**1.5) / (1.5 * self.context_s)
        else:
            roots = work.iterations * np.sqrt(low)
        left = within_s[:, None] - alpha_s * work.iterations
        shares = np.divide(roots**2, left, out=np.zeros_like(left), where=left > 0)
        return np.asarray(shares.sum(axis=1))


def lines_below(table_s: Floats) -> tuple[tuple[float, float], ...]:
    """Lines (alpha, beta) with alpha + beta B <= a(B) and neither negative: edges of the convex hull of the table,
    `table_s[B - 1]` being a(B), and the level line through its least value."""
    hull: list[int] = []
    for index, value in enumerate(table_s.tolist()):
        while len(hull) > 1:
            before, last = hull[-2], hull[-1]
            if (table_s[last] - table_s[before]) * (index - before) < (value - table_s[before]) * (last - before):
                break
            hull.pop()
        hull.append(index)
    edges = [(float(table_s.min()), 0.0)]
    for low, high in pairwise(hull):
        beta = float(table_s[high] - table_s[low]) / (high - low)
        alpha = float(table_s[low]) - beta * (low + 1)
        if alpha >= 0 and beta >= 0:
            edges.append((alpha, beta))
    chosen = np.unique(np.linspace(0, len(edges) - 1, LINES + 1).round().astype(int))
    return tuple(edges[index] for index in chosen.tolist())


class FleetBound:
    """The bound of one fleet, for any batch."""

    def __init__(self, setup: Setup, prices: PriceBook, supply: DeviceSupply) -> None:
        self._setup = setup
        self._overlaps = setup.max_staleness > 0
        self._prices = prices
        by_shape: dict[tuple[object, object], list[ActorShape]] = {}
        for actor in setup.actors:
            by_shape.setdefault((actor.prices, actor.slot_setup.allocation.devices[0].kind), []).append(actor)
        learner = {device.name for device in setup.learner.slot_setup.allocation.devices}
        self.in_turn = not self._overlaps and all(
            learner.intersection(device.name for device in actor.slot_setup.allocation.devices)
            for actor in setup.actors
        )
        """Whether no actor can be awake while the learner is: both wake in every step."""
        load_s = setup.transport.load_s
        self._kinds = [
            ActorKind.of_engine(
                alike[0].engine,
                alike[0].prices,
                len(alike),
                self._usd_per_s(alike[0].slot_setup),
                load_s + (_soonest_s(alike[0].slot_setup) if self.in_turn else 0.0),
            )
            for alike in by_shape.values()
        ]
        self._up_s = min(kind.up_s for kind in self._kinds)
        self.kept_usd_per_s = math.fsum(
            count * prices.device(kind).released_usd_per_hour / SECONDS_PER_HOUR
            for kind, count in (*supply.count.items(), *supply.spare.items())
        )
        """Cost of a second of the run with all devices released: 0 unless some are owned."""

    def of(self, batch: RolloutBatch) -> StepBound:
        """The bound of one step."""
        work = BoundWork.of(batch, self._setup.actors[0].engine.block_tokens)
        learner = self._setup.learner
        tokens = float(self._forward_tokens(batch, work).sum())
        learn_s = (
            learner.fixed_s
            + (learner.evaluate_token_s + learner.epochs * learner.learn_token_s) * tokens
            + learner.publish_s
        )
        learn_s += _soonest_s(learner.slot_setup) if self.in_turn else 0.0
        served_s, served_usd, after_s = self._services(batch, work)
        return StepBound(
            fleet=self,
            kinds=self._kinds,
            work=work,
            up_s=self._up_s,
            after_s=after_s,
            served_s=served_s,
            learn_s=learn_s,
            other_usd=served_usd + learn_s * self._usd_per_s(learner.slot_setup),
            overlaps=self._overlaps,
        )

    def _services(self, batch: RolloutBatch, work: BoundWork) -> tuple[float, float, Floats]:
        """Least time from the step's begin until all services are done; their cost; and [samples] the time of a
        service on the sample's own group, the longest of all services."""
        tokens = self._forward_tokens(batch, work)
        first_s = float(self._group_ends(work, batch.groups).min())
        served_s, usd, own_s = 0.0, 0.0, np.zeros(batch.groups)
        for service in self._setup.services:
            each_s = service.group_s + service.token_s * tokens
            shared = self.in_turn and service.role is FunctionRole.COLUMN
            total_s = float(each_s.sum())
            usd += (total_s + (_soonest_s(service.slot_setup) if shared else 0.0)) * self._usd_per_s(service.slot_setup)
            served_s = max(served_s, first_s + total_s)
            own_s = np.maximum(own_s, each_s)
        return served_s, usd, np.asarray(own_s[batch.group])

    def _forward_tokens(self, batch: RolloutBatch, work: BoundWork) -> Floats:
        """[groups]: the fewest tokens of each that a forward pass computes."""
        tokens = work.prompt + work.iterations + 1
        sequences: Floats = np.bincount(batch.group, tokens, minlength=batch.groups).astype(np.float64)
        if self._setup.prefixes.forward is None:
            return sequences
        alone = np.bincount(batch.group, work.iterations, minlength=batch.groups)
        return np.asarray(alone + batch.prompt_tokens - batch.tree.shared_tokens, dtype=np.float64)

    def _group_ends(self, work: BoundWork, groups: int) -> Floats:
        ends: Floats = np.zeros(groups)
        np.maximum.at(ends, work.group, self._up_s + alone_s(self._kinds, work))
        return ends

    def _usd_per_s(self, slot_setup: SlotSetup) -> float:
        """Saving of a second in which the slot's devices are not held."""
        each = (share * self._prices.device(d.kind).saved_usd_per_hour for d, share in slot_setup.allocation.shared)
        return math.fsum(each) / SECONDS_PER_HOUR


@dataclass(frozen=True)
class StepBound:
    """The bound of one step."""

    fleet: FleetBound
    kinds: Sequence[ActorKind]
    work: BoundWork
    up_s: float
    """From the step's begin until an actor can draw."""
    after_s: Floats
    """[samples]: of a service on the sample's group."""
    served_s: float
    """From the step's begin until all services are done."""
    learn_s: float
    other_usd: float
    """Cost of all but generation."""
    overlaps: bool
    """Whether steps overlap, so that only the learner's part is the step's own."""

    @cached_property
    def least_s(self) -> float:
        """No policy ends the step sooner, whatever it costs."""
        if self.overlaps:
            return self.learn_s
        alone = float((alone_s(self.kinds, self.work) + self.after_s).max())
        return max(self.up_s + max(alone, self._drawn_s()), self.served_s) + self.learn_s

    def least_usd(self, time_s: Floats) -> Floats:
        """[limits]: no policy whose step takes up to `time_s` [limits] pays less for it, but for what owned devices
        cost anyway (`FleetBound.kept_usd_per_s`); infinite below `least_s`."""
        within_s = time_s - self.learn_s - self.up_s - float(self.after_s.min())
        if self.overlaps:
            within_s = np.full_like(time_s, math.inf)
        if len(self.kinds) > 1:
            usd = np.full_like(time_s, self._cheapest_parts_usd())
        else:
            usd = least_usd(self.kinds[0], self.work, within_s)
        return np.asarray(np.where(time_s < self.least_s * (1 - PRECISION), math.inf, usd + self.other_usd))

    def _drawn_s(self) -> float:
        """The whole fleet draws all tokens no sooner."""
        if len(self.kinds) > 1:
            return max(_together_s(kind, self.kinds, self.work) for kind in self.kinds)
        return least_drawing_s(self.kinds[0], self.work)

    def _cheapest_parts_usd(self) -> float:
        parts = [np.array(_parts(kind, self.work)) * kind.usd_per_s for kind in self.kinds]
        ups = min(kind.up_s * kind.usd_per_s for kind in self.kinds)
        return float(np.min(parts, axis=0).sum()) + ups


def least_drawing_s(kind: ActorKind, work: BoundWork) -> float:
    """All actors together draw all tokens no sooner, from when they can work."""

    def enough(within_s: float) -> bool:
        return float(kind.seconds(work, np.array([within_s]))[0]) <= kind.actors * within_s

    low = float(kind.alone_s(work).max())
    high = max(float(kind.seconds(work, np.array([math.inf]))[0]), low)
    if enough(low):
        return low
    for _ in range(40):  # the seconds fall as the limit rises
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


def least_usd(kind: ActorKind, work: BoundWork, within_s: Floats) -> Floats:
    """[limits]: least cost of all actors, if each response ends within `within_s` from when its actor can work."""
    seconds = kind.seconds(work, within_s)
    if kind.usd_per_s == 0:  # its devices are paid for in any case
        return np.where(np.isfinite(seconds), 0.0, math.inf)
    with np.errstate(invalid="ignore"):
        actors = np.where(np.isfinite(seconds), np.maximum(np.ceil(seconds / within_s - PRECISION), 1), 1)
    return np.asarray(kind.usd_per_s * (seconds + actors * kind.up_s))


def alone_s(kinds: Sequence[ActorKind], work: BoundWork) -> Floats:
    """[samples]: the least seconds of each response, with an actor to itself and the best of each kind's figures."""
    best = [
        min(getattr(kind, name) for kind in kinds)
        for name in ("one_s", "context_s", "prefill_token_s", "prefill_pair_s")
    ]
    prefill_s = (work.prompt - work.behind) * best[2] + best[3] * (work.prompt**2 - work.behind**2) / 2
    return np.asarray(prefill_s + work.iterations * best[0] + best[1] * work.context)


def _parts(kind: ActorKind, work: BoundWork) -> tuple[float, float, float]:
    """Least actor seconds of the tokens, of their context, and of prefill, each on its own."""
    most = min(kind.max_sequences, work.iterations.size)
    token_s = max(beta_s + alpha_s / most for alpha_s, beta_s in kind.lines)
    return (
        token_s * float(work.iterations.sum()),
        kind.context_s * float(work.context.sum()),
        kind.prefill_s(work),
    )


def _together_s(kind: ActorKind, kinds: Sequence[ActorKind], work: BoundWork) -> float:
    """Seconds of all actors of all kinds, each as fast, by this kind, as it is in the part that suits it best."""
    mine = np.array(_parts(kind, work))
    rate = 0.0
    for other in kinds:
        theirs = np.array(_parts(other, work))
        faster = np.divide(mine, theirs, out=np.zeros(3), where=theirs > 0)
        rate += other.actors * float(faster.max())
    return float(mine.sum()) / rate if rate else 0.0


def _soonest_s(slot_setup: SlotSetup) -> float:
    """Least seconds until a replica that does not hold its devices is up."""
    return min(slot_setup.start_s, slot_setup.wake_s)


@dataclass(frozen=True)
class TradeOff:
    """Time against cost of several steps together: no policy is below it.

    Each step's least cost is known for cells of its time. Between steps the least of time + weight x cost is found by
    Lagrange's multiplier, which bounds every division of a limit among them from below.
    """

    times_s: tuple[Floats, ...]
    """By step [cells]: the least time of each cell."""
    usd: tuple[Floats, ...]
    """By step [cells]: the least cost of each cell."""

    @classmethod
    def of(cls, bounds: Sequence[StepBound]) -> TradeOff:
        times: list[Floats] = []
        costs: list[Floats] = []
        for bound in bounds:
            count = math.ceil(math.log(LONGEST) / math.log(FINE))
            edges = np.asarray(bound.least_s * FINE ** np.arange(count + 1), np.float64)
            times.append(edges)
            upper = np.append(edges[1:], math.inf)
            costs.append(bound.least_usd(upper) + edges * bound.fleet.kept_usd_per_s)
        return cls(tuple(times), tuple(costs))

    def least_usd(self, limit_s: float) -> float:
        """No policy that ends these steps within `limit_s` together pays less; infinite if none can."""
        return self._least(self.usd, self.times_s, limit_s)

    def least_s(self, budget_usd: float) -> float:
        """No policy that pays up to `budget_usd` for these steps together is sooner; infinite if none can."""
        return self._least(self.times_s, self.usd, budget_usd)

    def _least(self, goal: Sequence[Floats], held: Sequence[Floats], limit: float) -> float:
        """The largest, over weights w, of sum(min(goal + w held)) - w limit, by golden section: it is concave in w."""
        if math.fsum(float(each.min()) for each in held) > limit * (1 + PRECISION):
            return math.inf

        def dual(log_weight: float) -> float:
            weight = math.exp(log_weight)
            pairs = zip(goal, held, strict=True)
            return math.fsum(float((mine + weight * other).min()) for mine, other in pairs) - weight * limit

        scale = math.log(sum(float(each.min()) for each in goal) / max(limit, 1e-300))
        low, high, ratio = scale - 12.0, scale + 12.0, (math.sqrt(5) - 1) / 2
        for _ in range(60):
            first, second = high - ratio * (high - low), low + ratio * (high - low)
            low, high = (first, high) if dual(first) < dual(second) else (low, second)
        return max(dual((low + high) / 2), math.fsum(float(each.min()) for each in goal))
