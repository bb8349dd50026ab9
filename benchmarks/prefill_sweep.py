"""Prompts computed apart against one pool, in the simulator under the live policy, over lengths and fleets.

    python benchmarks/prefill_sweep.py [--seeds 2] [--steps 4] [--smoke]

Qwen2.5-7B on H100, an engine each, by their data sheet; KV moves by NIXL at its assumed rate. All prompts come again in
each step, so that `cost_aware`, which is told that only time counts, has forecasts after the first one. Each line has a
step's generation in one pool, its ratio to that with the best number of prefill actors of those tried (above 1: apart
is faster), and the same ratio by the plan's break-even, which knows all lengths and tries every number.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from smoke import parsed
from where import machine

from rlhfless.scaling.capabilities import KV_BYTES_PER_S, MOVE_S, kv_token_s
from rlhfless.scaling.plan.prefill_apart import AlikeEngines, StepShape, compare
from rlhfless.sim.experiment.compare import compare as simulated
from rlhfless.sim.scenarios import timing
from rlhfless.sim.scenarios.scenario import Scenario

KIND, SPREAD, LONGEST = "h100", 0.7, 4
"""Of the responses, the spread of the log; they are cut off at so many times their median."""

Fleet = tuple[int, int, int]

FLEETS: Sequence[Fleet] = ((8, 128, 8), (32, 128, 8), (32, 16, 2))
"""Devices, prompts of a step, samples of a prompt."""

PROMPTS: Sequence[int] = (256, 2048, 8192, 32768)
RESPONSES: Sequence[int] = (256, 1024, 4096)
"""Tokens: medians."""


def scenario_of(fleet: Fleet, prompt_tokens: int, response_tokens: int, arguments: argparse.Namespace) -> Scenario:
    """With an entry for each number of prefill actors; labels are the numbers."""
    devices, prompts, samples = fleet
    apart = sorted({0, 1, devices // 8, devices // 4, devices // 2, 3 * devices // 4})
    policy = {"name": "cost_aware", "contract": {"type": "weighted", "time_weight": 1.0}}
    values: dict[str, Any] = {
        "name": "prefill",
        "cluster": {
            "machines": [{"kind": KIND, "nodes": devices // 8, "devices_per_node": 8}],
            "kv_bytes_per_s": KV_BYTES_PER_S["nixl"].value,
        },
        "model": {"name": "qwen2.5-7b"},
        "workload": {
            "type": "lognormal",
            "lengths": {"median_tokens": response_tokens, "spread": SPREAD, "persistence": 0.6},
            "prompts": prompts,
            "median_prompt_tokens": prompt_tokens,
            "source": "a sweep",
        },
        "prompts_per_step": prompts,
        "samples_per_prompt": samples,
        "max_tokens": LONGEST * response_tokens,
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "policies": [policy | {"label": str(each), "placement": {"prefill_actors": each}} for each in apart],
    }
    return Scenario.model_validate(values)


def generation_s(scenario: Scenario) -> Iterator[tuple[int, float]]:
    """Prefill actors, and the mean seconds of a step's generation after the first one."""
    for label, runs in simulated(scenario).results.items():
        yield int(label), fmean(step.generation_s for run in runs for step in run.steps[1:])


def break_even(scenario: Scenario, prompt_tokens: int, response_tokens: int) -> float:
    """One pool to apart, by the plan."""
    devices, engine = scenario.cluster.machines[0].devices, scenario.engine
    step = StepShape.of(
        scenario.prompts_per_step,
        scenario.samples_per_prompt,
        prompt_tokens,
        response_tokens,
        SPREAD,
        scenario.max_tokens,
    )
    token_s = kv_token_s(timing.engine_shape(scenario), engine.tensor_parallel, scenario.cluster.kv_bytes_per_s)
    model = timing.engine_model(scenario, KIND)
    found = compare(step, AlikeEngines(model, devices, engine.max_sequences, token_s, MOVE_S.value))
    return found.together_s / found.apart_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parsed(parser, seeds=1, steps=2)
    some = slice(1 if arguments.smoke else None)
    print(machine())
    print("devices  prompts x samples  prompt  response  one pool  one / apart  prefill  by break-even")
    for fleet, prompt, response in product(FLEETS[some], PROMPTS[some], RESPONSES[some]):
        scenario = scenario_of(fleet, prompt, response, arguments)
        times = dict(generation_s(scenario))
        one_s = times.pop(0)
        best = min(times, key=lambda actors: times[actors])
        print("{:7}  {:7} x {:<7}".format(*fleet), f"{prompt:7}  {response:8}  {one_s:6.1f} s", end="")
        print(f"  {one_s / times[best]:11.3f}  {best:7}  {break_even(scenario, prompt, response):13.3f}", flush=True)


if __name__ == "__main__":
    main()
