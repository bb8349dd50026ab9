"""The oracle: continuous batching with one loop turn per iteration and sequence, written as plainly as possible."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rlhfless.scaling.engine_model import EngineModel
from rlhfless.sim.engine import EngineShape


@dataclass(frozen=True)
class LinearModel:
    """A latency model with one constant per term."""

    fixed_s: float = 0.00531
    sequence_s: float = 0.000213
    context_s: float = 1.7e-6
    prefill_fixed_s: float = 0.00217
    prefill_token_s: float = 0.000037

    def iteration_s(self, sequences: int) -> float:
        return self.fixed_s + self.sequence_s * sequences

    def prefill_s(self, tokens: int, context_tokens: int = 0) -> float:
        return self.prefill_fixed_s + self.prefill_token_s * tokens + 1e-9 * tokens * context_tokens


@dataclass(eq=False)
class Block:
    """One KV block of an engine."""

    key: tuple[object, int] | None = None
    """Its content: (a prompt or a shared prefix, number of the block in the sequence). None: not shared."""
    users: int = 0


@dataclass
class Sequence:
    sample: int
    group: int
    prompt: int
    target: int
    prefixes: tuple[tuple[object, int], ...] = ()
    """(name, tokens) of the prefixes that its prompt shares with other prompts, shortest first."""
    tokens: int = 0
    arrival_s: float = 0.0
    held: list[Block] = field(default_factory=list)
    admitted: int = 0
    """Its number in order of admission. A sequence that is admitted again gets a new number."""
    to_prefill: int = 0
    prefilled: int = 0
    opening: int = 0
    """Tokens before its first turn that are not of its prompt."""
    turns: deque[tuple[int, float, int]] = field(default_factory=deque)
    """(tokens that the environment writes, seconds until then, tokens at the next turn's end) after each turn left, the
    current one first; (0, seconds, 0) after the last."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When each of its turns came to the engine, and ended."""
    own_tokens: int = 0
    """Tokens of the context of its last turn, which its next one may find in the cache."""

    @property
    def context(self) -> int:
        return self.prompt + self.opening + self.tokens


@dataclass
class NaiveEngine:
    shape: EngineShape
    model: EngineModel
    now_s: float = 0.0
    slowdown: float = 1.0
    queue: deque[Sequence] = field(default_factory=deque)
    filling: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    admitted: int = 0
    finish_s: dict[int, float] = field(default_factory=dict)
    preemptions: int = 0
    prefilled: int = 0
    cached: int = 0
    evicted: int = 0
    cache: dict[tuple[object, int], Block] = field(default_factory=dict)
    known: set[tuple[object, int]] = field(default_factory=set)
    """Blocks that were in the cache when their last user released them."""
    free_queue: deque[Block] = field(default_factory=deque)
    """Free blocks, as vLLM keeps them: taken from the left, returned on the right."""

    def __post_init__(self) -> None:
        self.free_queue.extend(Block() for _ in range(self.shape.kv_blocks))

    def submit(self, sequence: Sequence, at_s: float) -> None:
        sequence.arrival_s = at_s
        self.queue.append(sequence)

    def advance(self, until_s: float, one: bool = False) -> None:
        """Run whole iterations that end at or before `until_s`; with `one`, at most one."""
        while True:
            if not self.filling and not self.running and self.queue:
                start_s = max(self.now_s, self.queue[0].arrival_s)
                if start_s > until_s:
                    return
                self.now_s = start_s
            self.make_room()
            self.admit()
            if not self.filling and not self.running:
                return
            chunks, decoding = self.composition()
            spent_s = self.seconds(chunks, decoding) * self.slowdown
            if self.now_s + spent_s > until_s:
                return
            self.now_s += spent_s
            self.iterate(chunks, decoding)
            if one:
                return

    def abort(self, samples: set[int], at_s: float) -> tuple[float, dict[int, int]]:
        """Abort samples as Engine.abort does; return the boundary time, and the tokens of the removed samples."""
        self.advance(at_s)
        if self.now_s < at_s and (self.filling or self.running):
            self.advance(math.inf, one=True)
        return max(self.now_s, at_s), self.take_out(samples)

    def take_out(self, samples: set[int]) -> dict[int, int]:
        taken = [s for s in (*self.queue, *self.filling, *self.running) if s.sample in samples]
        self.queue = deque(s for s in self.queue if s.sample not in samples)
        for s in sorted(self.running, key=lambda s: (s.target - s.tokens, s.sample)):
            if s.sample in samples:
                self.release(s)
        for s in self.filling:
            if s.sample in samples:
                self.release(s)
        self.filling = [s for s in self.filling if s.sample not in samples]
        self.running = [s for s in self.running if s.sample not in samples]
        return {s.sample: s.tokens for s in taken}

    @property
    def free(self) -> int:
        return len(self.free_queue)

    def keys(self, sequence: Sequence) -> list[tuple[object, int]]:
        """Return the keys of the whole blocks of its prompt. A prompt's last token is never found in a cache."""
        spans: list[tuple[object, int]] = [*sequence.prefixes, (sequence.group, sequence.prompt - 1)]
        spans.append((f"sample {sequence.sample}", sequence.own_tokens))
        found: list[tuple[object, int]] = []
        for name, tokens in spans:
            found += [(name, number) for number in range(len(found), tokens // self.shape.block_tokens)]
        return found

    def take(self) -> Block:
        block = self.free_queue.popleft()
        if block.key is not None and self.cache.get(block.key) is block:
            del self.cache[block.key]
        block.key, block.users = None, 1
        return block

    def hold(self, s: Sequence, count: int) -> int:
        """Give the sequence `count` blocks, and return how many of them were in the cache."""
        keys = self.keys(s)
        found = next((i for i, key in enumerate(keys) if key not in self.cache), len(keys))
        for i, key in enumerate(keys):
            if i >= found and key in self.known:
                self.evicted += self.shape.block_tokens
            self.known.discard(key)
        s.held = [self.cache[key] for key in keys[:found]]
        for block in s.held:
            if block.users == 0:
                self.free_queue.remove(block)
            block.users += 1
        for key in [*keys[found:], *[None] * (count - len(keys))]:
            block = self.take()
            block.key = key
            if key is not None:
                self.cache[key] = block
            s.held.append(block)
        return found

    def end_turn(self, s: Sequence) -> None:
        """Free the blocks of a sequence whose turn has ended, and queue its next turn, if any."""
        given, wait_s, end = s.turns.popleft() if s.turns else (0, 0.0, 0)
        s.spans.append((s.arrival_s, self.now_s))
        if not end:
            self.finish_s[s.sample] = self.now_s + wait_s
            self.release(s)
            return
        s.own_tokens = s.context - 1
        for block, key in zip(s.held, self.keys(s), strict=False):
            if block.key is None:
                block.key = key
                self.cache[key] = block
        self.release(s)
        s.tokens, s.target, s.arrival_s = s.tokens + given, end, self.now_s + wait_s
        self.queue = deque(sorted([*self.queue, s], key=lambda each: each.arrival_s))

    def release(self, s: Sequence) -> None:
        """Free the sequence's blocks, the last block first."""
        computed = (s.prefilled if s.to_prefill else s.context - 1) // self.shape.block_tokens
        for number in reversed(range(len(s.held))):
            block = s.held[number]
            block.users -= 1
            if block.users == 0:
                if block.key is not None and number < computed:
                    self.known.add(block.key)
                elif block.key is not None and self.cache.get(block.key) is block:
                    del self.cache[block.key]
                self.free_queue.append(block)
        s.held = []

    def needs_block(self, s: Sequence) -> bool:
        """Return whether its next decode iteration writes beyond its last block."""
        return self.shape.blocks(s.context) > len(s.held)

    def needed(self) -> int:
        return sum(self.needs_block(s) for s in self.running)

    def make_room(self) -> None:
        while self.needed() > self.free:
            among = self.filling or self.running
            victim = among.pop(max(range(len(among)), key=lambda i: among[i].admitted))
            self.release(victim)
            victim.to_prefill = 0
            self.queue.appendleft(victim)
            self.preemptions += 1

    def admit(self) -> None:
        while self.queue and len(self.filling) + len(self.running) < self.shape.max_sequences:
            head = self.queue[0]
            held = head.context
            shared = sum(key in self.cache and self.cache[key].users > 0 for key in self.keys(head))
            cost = self.shape.blocks(held) - shared
            if head.arrival_s > self.now_s or cost + self.needed() > self.free:
                return
            self.queue.popleft()
            self.admitted += 1
            head.admitted = self.admitted
            found = self.hold(head, self.shape.blocks(held))
            head.prefilled = found * self.shape.block_tokens
            self.cached += head.prefilled
            head.to_prefill = held - head.prefilled
            self.filling.append(head)

    def composition(self) -> tuple[list[tuple[Sequence, int]], bool]:
        """Return the chunks that the next iteration prefills, and whether it decodes."""
        if self.shape.chunk_tokens is None:
            return [(s, s.to_prefill) for s in self.filling], not self.filling
        budget = self.shape.chunk_tokens - len(self.running)
        chunks = []
        for s in self.filling:
            take = min(s.to_prefill, budget)
            budget -= take
            if take:
                chunks.append((s, take))
        return chunks, bool(self.running)

    def seconds(self, chunks: list[tuple[Sequence, int]], decoding: bool) -> float:
        spent_s = sum(self.model.prefill_s(take, s.prefilled) for s, take in chunks)
        if decoding:
            context = sum(s.context for s in self.running)
            spent_s += self.model.iteration_s(len(self.running)) + self.model.context_s * context
        return spent_s

    def iterate(self, chunks: list[tuple[Sequence, int]], decoding: bool) -> None:
        if decoding:
            for s in self.running:
                if self.needs_block(s):
                    s.held.append(self.take())
                s.tokens += 1
        for s, take in chunks:
            s.to_prefill -= take
            s.prefilled += take
            self.prefilled += take
        ready = [s for s, _ in chunks if s.to_prefill == 0]
        for s in ready:
            s.tokens += 1
        self.filling = [s for s in self.filling if s.to_prefill]
        at_once = [s for s in ready if s.tokens == s.target]
        ended = sorted((s for s in self.running if s.tokens == s.target), key=lambda s: s.sample)
        self.running = [s for s in self.running if s not in ended] + [s for s in ready if s not in at_once]
        for s in (*at_once, *ended):
            self.end_turn(s)
