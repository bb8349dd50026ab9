"""Assignment of samples to slots: the effects of Assign, Move and Lost, and the rules for refusing a policy's answer.
Pure.

The live loop and the simulator keep the same two arrays, `home` and `finished`, and check and change them only through
this module. A sample that has ended belongs to no slot. Every other sample belongs to one slot or is unassigned, which
happens when a step starts and when its actor is lost.

An answer is executed action by action. A refused action raises PolicyFault and changes nothing; earlier actions remain
in effect.

| action | is refused if | otherwise |
|---|---|---|
| any | it names a slot that is not for a generation actor, a sample that the step does not have, or a sample twice | |
| Assign | a sample has ended, belongs to a slot, or waits for its environment | the samples belong to the slot |
| Move | a sample belongs to another slot than the source, or to none | the unfinished samples belong to the target |
| Release | samples belong to the slot | the fleet drains the replica |

Ended samples in a Move are silently skipped, because a sample may end after the policy saw it: while the policy
decides, or while an earlier action of the same answer waits for the end of an iteration. This cannot happen for an
Assign, because no actor generates unassigned samples.

Lost is an event, not an action: all samples of the slot become unassigned, and the policy receives them.

A sample that has left its actor to wait for its environment is *parked*: it belongs to no slot until the event
Answered. The policy may assign it then; otherwise it returns to its slot, or another with an actor.

After an answer to StepBegan or Lost every other unfinished sample must belong to a slot. After any answer, every slot
to which it gave samples must have a replica that is running or starting. A Start for a future time does not count,
because it is meant for a later step.

Each fleet responds to a fault in its own way. The simulator stops. The live loop logs and counts the fault, and
distributes samples that are unassigned, or at a slot without a replica, evenly among the existing actors. If there is
no actor and none is starting, the samples are a loss of the fleet and not a fault of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.scaling.policy import UNASSIGNED, Action, Assign, Flags, Ints, Move


class PolicyFault(Exception):
    """Raised if a policy requests an impossible action, or leaves samples unassigned. The message gives the details."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The samples of one step by slot. The arrays belong to the caller and are changed in place."""

    home: Ints
    """`[samples]`: the slot that each belongs to, or UNASSIGNED."""
    finished: Flags
    """`[samples]`: whether each has ended. The caller sets this, together with `home` to UNASSIGNED."""
    parked: Flags
    """`[samples]`: whether each waits for its environment, without a slot. Set by `park` and `unpark`."""
    slots: int
    """Generation has the slots 0 to `slots` - 1."""

    @property
    def unassigned(self) -> Ints:
        """Return the unfinished samples that belong to no slot and are not parked, ascending."""
        return np.flatnonzero((self.home == UNASSIGNED) & ~self.finished & ~self.parked)

    def of(self, slot: int) -> Ints:
        """Return the samples that belong to a slot, ascending."""
        return np.flatnonzero(self.home == slot)

    def counts(self, begun: Flags) -> tuple[Ints, Ints]:
        """Return the numbers of samples that have begun, and of the others, by slot `[slots]`.

        `begun`: `[samples]`."""
        cells = np.bincount(2 * (self.home - UNASSIGNED) + begun, minlength=2 * (self.slots + 1)).reshape(-1, 2)
        return cells[1:, 1], cells[1:, 0]

    @property
    def occupied(self) -> list[int]:
        """The slots that have samples, ascending."""
        occupied: list[int] = np.flatnonzero(np.bincount(self.home - UNASSIGNED)[1:]).tolist()
        return occupied

    # -- checks: the samples of each action, once it is certain that it can be executed

    def checked_assign(self, assign: Assign) -> Ints:
        """Return the samples of an Assign, in order. Raises PolicyFault."""
        self._check_slot(assign.slot)
        samples = self._named(assign.samples)
        taken = (self.home[samples] != UNASSIGNED) | self.finished[samples] | self.parked[samples]
        if taken.any():
            raise PolicyFault(
                f"sample {samples[taken][0]}, given to slot {assign.slot}, has ended, has a slot (Move it), or waits "
                "for its environment (wait for Answered)"
            )
        return samples

    def checked_move(self, move: Move) -> Ints:
        """Return the samples of a Move that are at its source, in order. Raises PolicyFault."""
        self._check_slot(move.source)
        self._check_slot(move.target)
        samples = self._named(move.samples)
        away = self.home[samples] != move.source
        elsewhere = samples[away & ~self.finished[samples]]
        if elsewhere.size:
            raise PolicyFault(
                f"sample {elsewhere[0]} is to move from slot {move.source}, and does not belong there; Move what "
                "belongs to the source"
            )
        at_source: Ints = samples[~away]
        return at_source

    def check_release(self, slot: int) -> None:
        """Raise PolicyFault if samples belong to the slot."""
        left = np.count_nonzero(self.home == slot)
        if left:
            raise PolicyFault(f"slot {slot} is released with {left} samples; Move them first")

    # -- changes

    def give(self, samples: Ints, slot: int) -> None:
        """Assign unfinished samples to a slot."""
        self.home[samples] = slot

    def lose(self, slot: int) -> Ints:
        """Unassign all samples of a slot, and return them in ascending order."""
        lost = self.of(slot)
        self.home[lost] = UNASSIGNED
        return lost

    def park(self, samples: Ints) -> None:
        """Take samples that wait for their environment out of their slots."""
        self.home[samples], self.parked[samples] = UNASSIGNED, True

    def unpark(self, samples: Ints) -> Ints:
        """Unassign the parked ones of these samples, and return them: their environment has answered."""
        back: Ints = samples[self.parked[samples]]
        self.parked[back] = False
        return back

    # -- state after an answer

    def check_assigned(self) -> None:
        """Raise PolicyFault if a sample is unassigned."""
        left = self.unassigned
        if left.size:
            raise PolicyFault(f"the policy leaves {left.size} samples without a slot, such as {left[0]}")

    def check_served(self, answer: Sequence[Action], expected: Callable[[int], bool]) -> None:
        """Raise PolicyFault if the answer gave samples to a slot without a running or starting (`expected`) replica."""
        given: set[int] = set()
        for action in answer:
            match action:
                case Assign(slot=slot) | Move(target=slot):
                    given.add(slot)
        for slot in sorted(given):
            if not expected(slot) and (waiting := np.count_nonzero(self.home == slot)):
                raise PolicyFault(
                    f"{waiting} samples are left, and no actor serves or will serve at slot {slot}; Start one there, "
                    "or give them to another slot"
                )

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise PolicyFault(f"slot {slot} generates no samples; generation has the slots 0 to {self.slots - 1}")

    def _named(self, samples: Ints) -> Ints:
        """Return the samples named by an action. Raises PolicyFault for unknown or duplicate ones."""
        samples = np.asarray(samples, dtype=np.int64)
        chosen = np.zeros(self.home.size, dtype=np.bool_)
        unknown = (samples < 0) | (samples >= chosen.size)
        if unknown.any():
            raise PolicyFault(f"there is no sample {samples[unknown][0]}; the step has {chosen.size}")
        chosen[samples] = True
        if np.count_nonzero(chosen) < samples.size:
            raise PolicyFault("an action names a sample twice; name each once")
        return samples


PIECES = 8
"""Number of pieces in which prompts are handed over: generation starts with the first. Each piece is a call of two
actors."""


def pieces(prompts: Sequence[Hashable], tokens: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Return the sample numbers of each piece of prompts, from each sample's prompt [samples] and its tokens [samples].

    There are at least PIECES pieces if there are enough prompts. No piece exceeds `most_tokens` unless it is a single
    prompt. The samples of a prompt stay together.
    """
    by_prompt: dict[Hashable, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(number)
    sizes = {prompt: tokens[numbers[0]] for prompt, numbers in by_prompt.items()}
    limit = min(most_tokens, -(-sum(sizes.values()) // PIECES))
    parts: list[list[int]] = []
    left = 0
    for prompt, numbers in by_prompt.items():
        if not parts or sizes[prompt] > left:
            parts.append([])
            left = limit
        parts[-1] += numbers
        left -= sizes[prompt]
    return parts
