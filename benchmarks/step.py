"""One GRPO step, 16 prompts x 8 samples x 64 tokens, against its bare parts and against TRL.

    python benchmarks/step.py [--rounds N] [--trl-steps N] [--smoke]

`bare` is the time of raw vLLM generation plus that of a plain torch forward and backward pass with an optimiser step,
on the same prompts and on the very tokens that our step drew. There is no weight sync in it, no scoring, no ledger:
it is a bound that no system with separate engines can reach. Generation is two bare AsyncLLMs, a core each, like our
two actors; the one default AsyncLLM over both cores, which users start with, is shown beside it. Steps alternate with
the bare parts in one run. `outside` is the time of a step in which no function did its work: calls, weight sync,
probe, planning and bookkeeping.

TRL's GRPOTrainer (HF generate) does the same step on the same model afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from bare import BareEngine, Batch, bare_engines, together
from setting import assets, live_run, median_ratio, spec_of, spread
from smoke import parsed
from transformers import AutoModelForCausalLM
from where import machine

from rlhfless.orchestrator.rollout_request import RolloutRequest
from rlhfless.orchestrator.step import rollout, train
from rlhfless.records import Rollout
from rlhfless.records.journal import Journal
from rlhfless.records.traces import read_trace

MAX_MODEL_LEN = 128
LEARNING_RATE = 1e-4


OVERHEAD = ("overhead", "overhead share", "journal", "journal share")


class Stopwatch:
    """Adds up the time that a run's journal takes of its driver."""

    def __init__(self, journal: Journal) -> None:
        self.spent_s = 0.0
        self._add = journal.add
        journal.add = self._timed  # type: ignore[method-assign]

    def _timed(self, step: int, rollouts: Sequence[Rollout]) -> None:
        began = time.perf_counter()
        self._add(step, rollouts)
        self.spent_s += time.perf_counter() - began


class PlainTorch:
    """Forward, backward and AdamW on a padded batch, as one writes it first."""

    def __init__(self, model: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)

    def step(self, sequences: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> float:
        """Seconds for one optimiser step on (prompt, response) pairs."""
        began = time.perf_counter()
        width = max(len(prompt) + len(response) for prompt, response in sequences)
        tokens = torch.zeros(len(sequences), width, dtype=torch.long)
        attention = torch.zeros(len(sequences), width, dtype=torch.long)
        mask = torch.zeros(len(sequences), width)
        for row, (prompt, response) in enumerate(sequences):
            length = len(prompt) + len(response)
            tokens[row, :length] = torch.tensor(prompt + response)
            attention[row, :length] = 1
            mask[row, len(prompt) : length] = 1
        logits = self._model(input_ids=tokens, attention_mask=attention, use_cache=False).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
        loss = -(logprobs * mask[:, 1:]).sum() / mask.sum()
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return time.perf_counter() - began


def batches_of(wanted: RolloutRequest, parts: int) -> list[Batch]:
    """The step's requests, siblings together, split between `parts` engines."""
    prompts = [[(item.prompt_token_ids, item.seed) for item in wanted.items(prompt)] for prompt in wanted.prompts]
    return [
        Batch(tuple(request for prompt in prompts[i::parts] for request in prompt), wanted.sampling.max_tokens)
        for i in range(parts)
    ]


def drawn_in(folder: Path, wanted: RolloutRequest) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, response) of all rollouts of a step, from its trace."""
    prompts = {prompt.prompt_id: prompt.token_ids for prompt in wanted.prompts}
    trace = read_trace(folder / "run" / "trace")
    rows = [row for row in trace.rollouts if row.step == wanted.call.step]
    return [(prompts[row.prompt_id], row.token_ids or ()) for row in rows]


NAMES = ("our step", "bare", "bare default", "vllm x2", "vllm default", "torch", *OVERHEAD)


async def measured(folder: Path, rounds: int, engines: list[BareEngine], default: BareEngine) -> dict[str, list[float]]:
    """Seconds of all parts, a value per round."""
    plain = PlainTorch(str(folder / "model"))
    figures: dict[str, list[float]] = {name: [] for name in NAMES}
    spec = spec_of(folder, logging={"console": "off", "record_tokens": True}, optimizer={"learning_rate": 1e-4})
    async with live_run(spec, folder) as run:
        journal = Stopwatch(run.journal)
        for step in range(1, rounds + 3):
            journal.spent_s = 0.0
            run.clock.interrupt()  # what came between is no part of the step
            context = run.begin(step)
            record = await train(run, context, await rollout(run, context))
            overhead_s = record.metrics["overhead_s"] + time.time() - record.end_s
            run.ledger.write(run.pools.values())  # a run does so while it draws the next step
            wall_s = time.time() - record.start_s
            learned_s = plain.step(drawn_in(folder, context.request))
            two_s, _ = together(engines, batches_of(context.request, 2))
            one_s, _ = together([default], batches_of(context.request, 1))
            row = {
                "our step": wall_s,
                "bare": two_s + learned_s,
                "bare default": one_s + learned_s,
                "vllm x2": two_s,
                "vllm default": one_s,
                "torch": learned_s,
                "overhead": overhead_s,
                "overhead share": overhead_s / wall_s,
                "journal": journal.spent_s,
                "journal share": journal.spent_s / wall_s,
            }
            if step > 2:  # two rounds warm all sides up
                for name, value in row.items():
                    figures[name].append(value)
    return figures


async def measure(folder: Path, rounds: int) -> list[float]:
    model = str(folder / "model")
    with bare_engines(model, MAX_MODEL_LEN, (0,), (1,), None) as (*engines, default):
        figures = await measured(folder, rounds, engines, default)
    for name in NAMES:
        print(f"{name:14} {'' if name.endswith('share') else 's'} {spread(figures[name])}")
    print(f"our step / bare parts, two pinned engines  {median_ratio(figures['our step'], figures['bare']):.3f}")
    print(
        f"our step / bare parts, one default engine  {median_ratio(figures['our step'], figures['bare default']):.3f}"
    )
    return figures["our step"]


def trl_step_s(folder: Path, steps: int) -> list[float]:
    """Seconds of TRL's steps, in a process of its own."""
    script = Path(__file__).with_name("trl_step.py")
    result = subprocess.run(
        [sys.executable, str(script), str(folder), str(steps)], capture_output=True, text=True, check=True
    )
    values: list[float] = json.loads(result.stdout.splitlines()[-1])
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--trl-steps", type=int, default=2)
    arguments = parsed(parser, rounds=1, trl_steps=1)
    with assets(prompts=2048) as folder:
        print(machine())
        ours = asyncio.run(measure(folder, arguments.rounds))
        if arguments.trl_steps and importlib.util.find_spec("trl") is None:
            print("TRL step       skipped: trl is not installed (extra `test`)")
        elif arguments.trl_steps:
            theirs = trl_step_s(folder, arguments.trl_steps)
            print(f"{'TRL step':14} s {spread(theirs)}")
            print(f"TRL / our step                             {sorted(theirs)[0] / sorted(ours)[len(ours) // 2]:.1f}")


if __name__ == "__main__":
    main()
