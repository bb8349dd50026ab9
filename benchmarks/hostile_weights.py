"""Wrong weights on purpose, in a real learner and a real engine: which check catches what, and what it costs.

    python benchmarks/hostile_weights.py [--dtypes bfloat16,float32] [--rates 5e-4,1e-6] [--honest 200]

For each dtype and for tied and untied output heads, one engine and one learner (4 layers, logits of size 10). Each
round the learner takes an optimiser step and publishes, and the engine loads: honestly, or with one thing wrong. The
table says which check stops it, and by how much probe and read-back see it. A wrong version that passes, and an honest
one that does not, make the exit code 1.

stale         the version before is published under the new version's name
tensor        one matrix stays at the version before
scaled        the output head is 1.02 times what was published
skipped       one of the matrices that the engine fuses is not loaded
stale head    the tied head's packed copy is not renewed (CPU, tied)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from where import machine

if TYPE_CHECKING:
    import torch

    from rlhfless.functions.generation.vllm.core import Core
    from rlhfless.records import PublishedWeights

PROBE_TOKENS = 128
VOCABULARY = 512
MATRIX = "model.layers.2.mlp.down_proj.weight"
FUSED = "model.layers.1.self_attn.q_proj.weight"
SCALE = 1.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rates", default="5e-4,1e-6")
    parser.add_argument("--heads", default="tied,untied")
    parser.add_argument("--honest", type=int, default=200, help="honest loads per dtype and head")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row instead of the table")
    parser.add_argument("--child", nargs=2, metavar=("DTYPE", "HEAD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        dtype, head = options.child
        _child(dtype, head, [float(rate) for rate in options.rates.split(",")], options.honest)
        return 0
    if not options.json:
        print(machine())
        print(f"{'dtype':9} {'head':7} {'rate':>6} {'wrong':11} {'caught by':10} {'read back':>17} {'probe mean':>11}")
    missed = 0
    for dtype in options.dtypes.split(","):
        for head in options.heads.split(","):
            command = [sys.executable, __file__, "--child", dtype, head, "--rates", options.rates]
            done = subprocess.run(
                [*command, "--honest", str(options.honest)], env=_environment(dtype), stdout=subprocess.PIPE, check=True
            )
            # vLLM prints to standard output, too.
            for line in (line for line in done.stdout.decode().splitlines() if line.startswith("{")):
                missed += _is_wrong(json.loads(line))
                row = {"dtype": dtype, "head": head} | json.loads(line)
                print(json.dumps(row) if options.json else _shown(dtype, head, row), flush=True)
    return int(missed > 0)


def _is_wrong(row: dict[str, Any]) -> bool:
    """An honest load that is stopped, or a wrong one that is not."""
    return bool(row["alarms"]) if row["wrong"] == "honest" else not row["caught"]


def _shown(dtype: str, head: str, row: dict[str, Any]) -> str:
    """One line of the table."""
    name = f"{dtype:9} {head:7} {row['rate']:6.0e}"
    if row["wrong"] == "honest":
        return (
            f"{name} {row['loads']} honest loads: {row['alarms']} false alarms; largest probe difference "
            f"{row['largest']:.2g}, mean {row['mean']:.2g}; {row['load_ms']:.1f} ms a load, {row['plain_ms']:.1f} "
            f"without read-back (ratio {row['load_ms'] / row['plain_ms']:.2f}); {row['read_back']} of {row['tensors']} "
            "tensors read back"
        )
    return (
        f"{name} {row['wrong']:11} {row['caught'] or 'NOTHING':10} {row['differ']:7d} of {row['compared']:6d} "
        f"{row['mean']:11.2g}"
    )


# -- one dtype and head, in a process that is set up as an engine's


def _settings(folder: Path, dtype: str) -> Any:
    from rlhfless.functions.generation.engine import EngineSettings
    from rlhfless.spec import EngineSpec, TimeoutsSpec
    from rlhfless.weights.address import StoreAddress

    return EngineSettings(
        model=str(folder / "model"),
        tokenizer=str(folder / "model"),
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=2 * PROBE_TOKENS,
        seed=0,
        trust_remote_code=False,
        device="cpu",
        store=StoreAddress("file", str(folder / "store")),
        engine=EngineSpec(kv_cache_gib=0.0625, max_sequences=8),
        timeouts=TimeoutsSpec(),
    )


def _environment(dtype: str) -> dict[str, str]:
    from rlhfless.functions.generation.vllm.arguments import engine_environment

    return engine_environment(_settings(Path("unused"), dtype), os.environ | {"OMP_NUM_THREADS": "1"})


def _child(dtype: str, head: str, rates: list[float], honest: int) -> None:
    with tempfile.TemporaryDirectory(prefix="rlhfless-hostile-") as name:
        folder = Path(name)
        _build(folder / "model", tied=head == "tied")
        bench = Bench(folder, dtype)
        for rate in rates:
            for row in bench.rows(rate, honest // len(rates), tied=head == "tied"):
                print(json.dumps(row), flush=True)


def _build(folder: Path, *, tied: bool) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=320,
        max_position_embeddings=2 * PROBE_TOKENS,
        tie_word_embeddings=tied,
        initializer_range=0.3 if tied else 0.15,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)


class Bench:
    """A learner and an engine that share a store."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from rlhfless.functions.generation.vllm.core import Core  # before all that might bring Numba

        self.core: Core = Core(_settings(folder, dtype))
        import numpy as np

        from rlhfless.weights.store import FolderStore

        self.folder, self.dtype = folder, dtype
        self.store = FolderStore(folder / "store")
        self.tokens = tuple(np.random.default_rng(0).integers(3, VOCABULARY, PROBE_TOKENS).tolist())
        self.step = 0
        self.batch = _batch()
        self.rank: Any = None
        self.old: dict[str, torch.Tensor] = {}

    def rows(self, rate: float, honest: int, *, tied: bool) -> Iterator[dict[str, Any]]:
        """The table of one learning rate."""
        self._start_learner(rate)
        self.core.load(self._published())
        yield self._honest(rate, honest)
        wrongs = {"stale": self._stale, "tensor": self._tensor, "scaled": self._scaled, "skipped": self._skipped}
        if tied:
            wrongs["stale head"] = self._stale_head
        for name, wrong in wrongs.items():
            yield {"rate": rate, "wrong": name} | self._tried(wrong)
            self.core._usable = True  # a product's engine would be replaced
            self.core.load(self._published())

    def _start_learner(self, rate: float) -> None:
        from rlhfless.functions.base import RankPlace
        from rlhfless.functions.learner.rank import LearnerRank
        from rlhfless.spec import AdamWSpec, GRPOSpec, LearnerSpec, ModelSpec

        # The engine of this process has formed the group of one already.
        with mock.patch("torch.distributed.init_process_group"):
            self.rank = LearnerRank(
                RankPlace(),
                ModelSpec(path=str(self.folder / "model"), dtype=self.dtype),  # type: ignore[arg-type]
                LearnerSpec(threads=1),
                AdamWSpec(learning_rate=rate),
                GRPOSpec(),
                1.0,
            )

    def _published(self, tensors: dict[str, torch.Tensor] | None = None, *, read_back: bool = True) -> PublishedWeights:
        """What the learner says of its weights, with the file of `tensors` if they are given."""
        from rlhfless.functions.training.checkpoint import drain
        from rlhfless.records import Probe, PublishedWeights

        stored = self.store.put("bench", 1, self.step, self.rank.weights() if tensors is None else tensors)
        live, samples = self.rank.published(self.tokens if read_back else ())
        drain(live)
        probe = Probe(self.tokens, self.rank.probe_logprobs(self.tokens), samples)
        for older in self.store.versions()[:-1]:
            self.store.delete(older)
        return PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, probe)

    def _learn(self) -> None:
        from rlhfless.algorithms.passes import Passes

        self.old = self.rank.weights()
        self.rank.learn(self.batch, Passes())
        self.step += 1

    def _honest(self, rate: float, count: int) -> dict[str, Any]:
        """`count` honest steps, each with all checks."""
        from rlhfless.weights.check import WeightCheckFailed, largest_difference, mean_difference

        alarms, largest, mean, checked_s, plain_s = 0, 0.0, 0.0, [], []
        for _ in range(count):
            self._learn()
            plain, published = self._published(read_back=False), self._published()
            plain_s.append(_timed(partial(self.core.load, plain)))
            try:
                checked_s.append(_timed(partial(self.core.load, published)))
                self._check_probe(published)
            except WeightCheckFailed as failed:
                print(failed, file=sys.stderr)
                alarms += 1
                self.core._usable = True
            said = self.core.logprobs(self.tokens)
            largest = max(largest, largest_difference(said, published.probe.logprobs))
            mean = max(mean, mean_difference(said, published.probe.logprobs))
        final = self.core.load(self._published())
        figures = {"loads": count, "alarms": alarms, "largest": largest, "mean": mean}
        times = {"load_ms": 1e3 * _median(checked_s), "plain_ms": 1e3 * _median(plain_s)}
        coverage = {"read_back": final.read_back, "tensors": final.tensors}
        return {"rate": rate, "wrong": "honest"} | coverage | figures | times

    def _check_probe(self, published: PublishedWeights) -> None:
        from rlhfless.weights.check import PROBE_TOLERANCE, check_probe

        tolerance = PROBE_TOLERANCE[self.dtype]  # type: ignore[index]
        check_probe(published.version, published.probe, self.core.logprobs(self.tokens), tolerance)

    def _tried(self, wrong: Callable[[], PublishedWeights]) -> dict[str, Any]:
        """One learner step, one wrong load: what catches it, and what each check sees."""
        from rlhfless.weights.check import WeightCheckFailed, mean_difference

        self._learn()
        caught = ""
        published = self._published()
        try:
            published = wrong()
            self._check_probe(published)
        except WeightCheckFailed as failed:
            caught = failed.check
        except Exception as error:
            caught = type(error).__name__
        self.core._usable = True
        compared: dict[str, tuple[int, int]] = {}
        with suppress(Exception):
            (compared,) = self.core._engine.engine_core.collective_rpc(
                "rlhfless_read_back", args=(dict(published.probe.samples),)
            )
        mean = mean_difference(self.core.logprobs(self.tokens), published.probe.logprobs)
        totals = [sum(pair[i] for pair in compared.values()) for i in (0, 1)]
        return {"caught": caught, "compared": totals[0], "differ": totals[1], "mean": mean}

    # -- the faults

    def _loaded(self, published: PublishedWeights) -> PublishedWeights:
        self.core.load(published)
        return published

    def _stale(self) -> PublishedWeights:
        return self._loaded(self._published(self.old))

    def _tensor(self) -> PublishedWeights:
        with self._changed(lambda name, tensor: self.old[name] if name == MATRIX else tensor):
            return self._loaded(self._published())

    def _scaled(self) -> PublishedWeights:
        with self._changed(
            lambda name, tensor: tensor * SCALE if name in ("lm_head.weight", self._tied_head()) else tensor
        ):
            return self._loaded(self._published())

    def _tied_head(self) -> str:
        return "model.embed_tokens.weight" if "lm_head.weight" not in self.old else ""

    def _skipped(self) -> PublishedWeights:
        with self._changed(lambda name, tensor: None if name == FUSED else tensor):
            return self._loaded(self._published())

    def _stale_head(self) -> PublishedWeights:
        """As vLLM's own reload leaves it on a CPU that packs weights; here also on one that does not."""
        import torch

        from rlhfless.functions.generation.vllm import weight_engine

        stale = self._model().lm_head.weight.data.clone()
        repack = weight_engine.repack_shared_weights

        def keep_old(model: Any) -> None:
            model.lm_head.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, stale, bias)

        weight_engine.repack_shared_weights = keep_old
        try:
            return self._loaded(self._published())
        finally:
            weight_engine.repack_shared_weights = repack

    def _model(self) -> Any:
        core: Any = self.core._engine.engine_core
        return core.engine_core.model_executor.driver_worker.worker.model_runner.model

    @contextmanager
    def _changed(self, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
        """Within the block the engine's model loads something else than what it is given."""
        model = self._model()
        load_weights = model.load_weights

        def other(tensors: Iterator[tuple[str, torch.Tensor]]) -> Any:
            changed = ((name, change(name, tensor)) for name, tensor in tensors)
            return load_weights((name, tensor) for name, tensor in changed if tensor is not None)

        model.load_weights = other
        try:
            yield
        finally:
            model.load_weights = load_weights


def _batch() -> Any:
    """8 groups of 4 samples of 24 tokens, with advantages."""
    import numpy as np

    from rlhfless.algorithms.batch import pack
    from rlhfless.records import FinishReason, Group, Prompt, Rollout

    generator = np.random.default_rng(1)

    def rollout(prompt_id: str, index: int) -> Rollout:
        tokens = generator.integers(3, VOCABULARY, 24)
        logprobs = -4 - generator.random(24, dtype=np.float32)
        return Rollout(prompt_id, index, 0, tokens, logprobs, "", FinishReason.STOP, (), "a", 0.0, 1.0)

    prompts = [Prompt(f"p{n}", tuple(generator.integers(3, VOCABULARY, 8).tolist()), "") for n in range(8)]
    packed = pack([Group.of(p, tuple(rollout(p.prompt_id, i) for i in range(4))) for p in prompts])
    return packed.with_columns(advantages=packed.spread(generator.standard_normal(packed.sequences)))


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


if __name__ == "__main__":
    sys.exit(main())
