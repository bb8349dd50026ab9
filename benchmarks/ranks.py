"""What the ranks of a learner or a critic hold, beside the memory plan: while a model is loaded, and in a step.

    python benchmarks/ranks.py [--functions learner,critic] [--ranks 1,2,4] [--smoke]

A random model of about 100 M parameters in float32; each rank is a process on CPU cores and works on sequences of its
own. Measured is anonymous memory above what the process held before it loaded: without the libraries, and without the
pages of the weight file, which the kernel may drop. `step`: the most that a rank held (the kernel's own peak of the
process, less the pages of files), beside the plan's phase `learn`. `loading`: the most that all ranks together held
while they loaded (RssAnon of /proc, sampled from outside every 2 ms), beside the model in float32 and one rank's shard.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from smoke import parsed
from transformers import Qwen3Config, Qwen3ForCausalLM
from where import machine

from rlhfless.algorithms.batch import PackedBatch, pack
from rlhfless.algorithms.passes import Passes
from rlhfless.functions.critic.rank import CriticRank
from rlhfless.functions.learner.rank import LearnerRank
from rlhfless.functions.policy import PolicyNetwork
from rlhfless.records import FinishReason, Group, Prompt, Rollout
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.scaling.memory import LOGITS_CHUNK_ELEMENTS, Sharded, learn_phases, value_phases
from rlhfless.spec import AdamWSpec, CriticSpec, GRPOSpec, LearnerSpec, ModelSpec, PPOSpec

WIDTH = 128
"""Tokens of a sequence."""

VOCABULARY = 32_000

MICRO_BATCHES = 2
"""Of each rank in a step: the second meets the gradients of the first, as the plan counts it."""

TEMPERATURE = 0.8
"""The logits are scaled, as the plan counts it."""

SAMPLE_S = 0.002

LONGEST_S = 1800.0

MIB = 2**20

PHASES = ("before", "loading", "loaded", "step")

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}
"""Freed memory goes back at once, so that what is held is what is in use."""


def random_model(folder: Path, layers: int) -> tuple[str, ModelShape]:
    """12 layers have about 100 M parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=640,
        num_hidden_layers=layers,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        intermediate_size=2560,
        max_position_embeddings=2 * WIDTH,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM
    model(config).save_pretrained(folder)
    return str(folder), ModelShape.of_config(config.to_dict())


def batch_of(sequences: int) -> PackedBatch:
    """Prompts of one token with a response of WIDTH tokens."""
    generator = np.random.default_rng(0)
    groups = []
    for number in range(sequences):
        tokens = generator.integers(3, VOCABULARY, WIDTH)
        logprobs = np.full(WIDTH, -np.log(VOCABULARY), dtype=np.float32)
        rollout = Rollout(f"{number:04}", 0, 0, tokens, logprobs, "", FinishReason.STOP, (), "benchmark", 0.0, 0.0)
        groups.append(Group.of(Prompt(f"{number:04}", (3 + number,), ""), (rollout,)))
    batch = pack(groups)
    return batch.with_columns(advantages=batch.spread(generator.standard_normal(batch.sequences).astype(np.float32)))


def learner_settings(**learner: Any) -> tuple[Any, ...]:
    """What the constructor of its rank takes after the model."""
    return LearnerSpec(**learner), AdamWSpec(), GRPOSpec(), TEMPERATURE


def critic_settings(**critic: Any) -> tuple[Any, ...]:
    """What the constructor of its rank takes after the model."""
    return CriticSpec(**critic), AdamWSpec(), PPOSpec()


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "learner": (LearnerRank, learner_settings),
    "critic": (CriticRank, critic_settings),
}


def planned_bytes(function: str, shape: ModelShape, tokens: int, ranks: int) -> int:
    """The plan's figure of the phase `learn`."""
    if function == "critic":
        return value_phases(shape, tokens, Sharded(ranks))[0].size_bytes
    return learn_phases(shape, tokens, Sharded(ranks), LOGITS_CHUNK_ELEMENTS)[0].size_bytes


def work(function: str, model: str, rendezvous: str, rank: int, ranks: int, rows: int, phase: Any, most: Any) -> None:
    """One rank; it says in `phase` what it does, and in `most` what it held in its steps."""
    batch = batch_of(MICRO_BATCHES * rows * ranks)
    assert batch.advantages is not None
    batch = batch.with_columns(values=np.zeros_like(batch.advantages), returns=batch.advantages)

    rank_class, settings = FUNCTIONS[function]

    class Told(rank_class):  # type: ignore[misc,valid-type]  # of whichever function
        def _load(self, device: torch.device) -> PolicyNetwork:
            phase.value = PHASES.index("before")
            time.sleep(20 * SAMPLE_S)
            phase.value = PHASES.index("loading")
            policy: PolicyNetwork = super()._load(device)
            dist.barrier()
            time.sleep(20 * SAMPLE_S)
            phase.value = PHASES.index("loaded")
            return policy

    learner = Told(
        ModelSpec(path=model),
        *settings(ranks=ranks, threads=1, micro_batch_tokens=rows * WIDTH, share_prefixes=False),
        rank=rank,
        world_size=ranks,
        init_method=rendezvous,
        timeout_s=LONGEST_S,
    )
    phase.value = PHASES.index("step")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak begins anew
    for _ in range(2):
        learner.learn(batch, Passes())
    status = status_of(os.getpid())
    most.value = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
    learner.close()


def status_of(pid: int) -> dict[str, int]:
    """The kernel's figures of a process's memory, in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if line[2:] == ["kB"]}


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs; 0 once it has ended."""
    try:
        return status_of(pid).get("RssAnon", 0)
    except OSError:
        return 0


def samples(processes: list[Any], phases: list[Any]) -> Iterator[list[tuple[str, int]]]:
    """Phase and anonymous memory of each rank, until they end."""
    ends_s = time.monotonic() + LONGEST_S
    while any(process.is_alive() for process in processes):
        yield [(PHASES[phase.value] if phase.value >= 0 else "", anonymous_bytes(process.pid))
               for process, phase in zip(processes, phases, strict=True)]  # fmt: skip
        if time.monotonic() > ends_s:
            raise TimeoutError(f"the ranks did not end within {LONGEST_S:.0f} s")
        time.sleep(SAMPLE_S)
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"ranks ended with {failed}")


def measured(function: str, model: str, shape: ModelShape, ranks: int, rows: int) -> dict[str, Any]:
    """The ranks of one learner."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        phases = [context.Value("i", -1, lock=False) for _ in range(ranks)]
        peaks = [context.Value("q", 0, lock=False) for _ in range(ranks)]
        common = (function, model, f"file://{folder}/rendezvous")
        given = [(*common, rank, ranks, rows, phases[rank], peaks[rank]) for rank in range(ranks)]
        processes = [context.Process(target=work, args=arguments) for arguments in given]
        for process in processes:
            process.start()
        before, loading = [0] * ranks, 0
        try:
            for sample in samples(processes, phases):
                for rank, (phase, size) in enumerate(sample):
                    if phase == "before":
                        before[rank] = size
                if all(phase == "loading" for phase, _ in sample):
                    loading = max(loading, sum(size for _, size in sample) - sum(before))
        finally:
            for process in processes:
                process.kill()
    most = [peak.value - held for peak, held in zip(peaks, before, strict=True)]
    plan = planned_bytes(function, shape, rows * WIDTH, ranks)
    whole = 4 * shape.parameters
    return {
        "step_mib": [round(size / MIB) for size in most],
        "plan_mib": round(plan / MIB),
        "plan_ratio": round(plan / max(most), 3),
        "loading_mib": round(loading / MIB),
        "model_and_shard_mib": round((whole + whole / ranks) / MIB),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", default=",".join(FUNCTIONS))
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rows", type=int, default=4, help=f"sequences of {WIDTH} tokens of a micro-batch")
    parser.add_argument("--layers", type=int, default=12)
    arguments = parsed(parser, ranks="2", rows=1, layers=1)
    os.environ |= ALLOCATOR | {"OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as folder:
        model, shape = random_model(Path(folder), arguments.layers)
        result: dict[str, Any] = {"machine": machine(), "parameters": shape.parameters}
        for function, ranks in itertools.product(arguments.functions.split(","), arguments.ranks.split(",")):
            of = f"{function}, {ranks} rank(s)"
            result[of] = measured(function, model, shape, int(ranks), arguments.rows)
            print(f"{of}: {result[of]}", file=sys.stderr, flush=True)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
