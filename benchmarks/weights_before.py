"""Publishing and loading by this checkout against an earlier commit, and against a plain copy of the same bytes.

    python benchmarks/weights_before.py [--before 7d2e44a] [--layers 20] [--pairs 7] [--what publish,load] [--smoke]

Each side is a process of its own on its own checkout (a git worktree in a temporary folder for the earlier one), with
the same model in float32; 20 layers are 1.08 GB. The sides take turns (A B, B A, ...), so that both meet the same state
of the machine; each pair gives a ratio, and the median of the ratios counts, of wall time and of the processor time of
all threads. Beside each round the same bytes are copied (`Tensor.clone`, one thread).

publish   what a learner's rank does: gather, samples for the read-back, digest, write, rename, old versions dropped
load      what an engine does: map, check of the digest, vLLM's loaders with packing for its kernels

7d2e44a is the commit before only the rank that writes copied bytes, and before each byte was hashed once on a node.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from smoke import parsed
from where import machine

HERE = Path(__file__).resolve().parents[1]

BEFORE = "7d2e44a"

WARM_UP = 4
"""Pairs that do not count: from the fourth publication on, there is a dropped version to write over."""

PROBE_TOKENS = tuple(range(2, 130))


def build(folder: Path, layers: int, width: int) -> None:
    """A model on disk, with a tokenizer that an engine accepts."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32 * width,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<eos>": 0, "<unk>": 1}, "<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


# -- one side, in a process of its own


def publisher(model: str, folder: Path) -> tuple[Callable[[int], object], int]:
    """A learner's only rank as its actor runs it, without Ray."""
    import torch

    from rlhfless.functions.learner import actor as actors
    from rlhfless.functions.learner.rank import LearnerRank
    from rlhfless.spec import AdamWSpec, GRPOSpec, LearnerSpec, ModelSpec

    given = (ModelSpec(path=model), LearnerSpec(), AdamWSpec(), GRPOSpec(), 1.0)
    rank: Any = LearnerRank(*given, rank=0, world_size=1, init_method=f"file://{folder}/rendezvous", timeout_s=60)
    rank.probe_logprobs = lambda _: ()  # a forward pass, which is no part of this
    # Earlier commits have StoreHome in the module of the settings.
    places = (actors, importlib.import_module(actors.LearnerSettings.__module__))
    home = next(place.StoreHome for place in places if hasattr(place, "StoreHome"))(str(folder / "store"))
    actor: Any = actors.LearnerActor.__new__(actors.LearnerActor)
    actor._settings = SimpleNamespace(probe_token_ids=PROBE_TOKENS, read_back=True, planned={}, store=home)
    actor._number, actor._published, actor._rank, actor._store = 0, [], rank, home.open("")
    first = next(rank._model.parameters()).detach().to_local()

    def publish(number: int) -> None:
        first[0, 0] = number + 1
        actor.publish("bench", 1, number, False)
        actor.probe(False)

    return torch.no_grad()(publish), sum(parameter.nbytes for parameter in rank._model.parameters())


def loader(model: str, folder: Path) -> tuple[Callable[[int], object], int]:
    """An engine, which loads two versions in turn."""
    from rlhfless.functions.generation.vllm.core import Core  # before all that might bring Numba

    core = Core(_settings(model, folder))
    from safetensors.torch import load_file

    from rlhfless.records import Probe, PublishedWeights
    from rlhfless.weights.store import FolderStore

    tensors, store = load_file(f"{model}/model.safetensors"), FolderStore(folder / "store")
    versions = []
    for number in range(2):
        tensors["model.norm.weight"][0] = 1.0 + number / 8
        stored = store.put("bench", 1, number, tensors)
        versions.append(
            PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, Probe((), ()))
        )
    return lambda number: core.load(versions[number % 2]), stored.size_bytes


def _settings(model: str, folder: Path) -> Any:
    from rlhfless.functions.generation.engine import EngineSettings
    from rlhfless.spec import EngineSpec, TimeoutsSpec
    from rlhfless.weights.address import StoreAddress

    return EngineSettings(
        model=model,
        tokenizer=model,
        dtype="float32",
        max_model_len=256,
        seed=0,
        trust_remote_code=False,
        device="cpu",
        store=StoreAddress("folder", str(folder / "store")),  # type: ignore[arg-type]  # an earlier commit's word
        engine=EngineSpec(kv_cache_gib=0.0625, max_sequences=8),
        timeouts=TimeoutsSpec(),
    )


def serve(arguments: argparse.Namespace) -> None:
    """A round for each line of stdin; answers wall and processor seconds, of the work and of the plain copy."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        work, size_bytes = {"publish": publisher, "load": loader}[arguments.what](arguments.model, Path(folder))
        import torch  # an engine's environment comes before it

        parts = [torch.zeros(part, dtype=torch.uint8) for part in _parts(size_bytes)]
        print(json.dumps(size_bytes), file=answers, flush=True)
        for number, _ in enumerate(sys.stdin):
            seconds = _timed(lambda number=number: work(number))
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            copied = _timed(lambda: [part.clone() for part in parts])
            torch.set_num_threads(threads)
            print(json.dumps([*seconds, *copied]), file=answers, flush=True)


def _parts(size_bytes: int) -> list[int]:
    """Tensors of 16 MiB, and the rest."""
    whole, rest = divmod(size_bytes, 1 << 24)
    return [1 << 24] * whole + [rest]


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    wall_s, processor_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - processor_s


# -- the pairs


class Side:
    """A process on a checkout."""

    def __init__(self, checkout: Path, what: str, model: str, folder: str) -> None:
        command = [sys.executable, __file__, "--serves", "--what", what, "--model", model, "--folder", folder]
        paths = os.pathsep.join([str(checkout), str(HERE / "benchmarks")])
        environment = dict(os.environ)
        if what == "load":
            from rlhfless.functions.generation.vllm.arguments import engine_environment

            environment = engine_environment(_settings(model, Path(folder)), environment)
        environment |= {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the side ended with code {self.process.wait()}")
        return json.loads(line)

    def round(self) -> list[float]:
        """Wall and processor seconds of one round, and of the copy."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer: list[float] = self.answer()
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def compared(what: str, before: Path, model: str, arguments: argparse.Namespace) -> None:
    """Rounds of both sides in turn, and the line that says what they show."""
    sides = [Side(checkout, what, model, arguments.folder) for checkout in (before, HERE)]
    size_bytes = [side.answer() for side in sides][1]
    rounds: list[list[list[float]]] = [[], []]
    for number in range(arguments.pairs + WARM_UP):
        for which in (0, 1) if number % 2 else (1, 0):
            seconds = sides[which].round()
            print(what, number, ("before", "after")[which], seconds, file=sys.stderr, flush=True)
            if number >= WARM_UP:
                rounds[which].append(seconds)
    for side in sides:
        side.end()
    faster = [statistics.median(a[i] / b[i] for a, b in zip(*rounds, strict=True)) for i in (0, 1)]
    shares = [statistics.median(each[2] / each[0] for each in side) for side in rounds]
    rates = [size_bytes / statistics.median(each[0] for each in side) / 1e9 for side in rounds]
    copy = size_bytes / statistics.median(each[2] for side in rounds for each in side) / 1e9
    print(
        f"{what:8} {size_bytes / 1e9:.2f} GB  before {rates[0]:5.2f} GB/s, after {rates[1]:5.2f}, plain copy "
        f"{copy:5.2f}; faster {faster[0]:.2f} (processor time {faster[1]:.2f}); of a plain copy {shares[0]:.2f} before,"
        f" {shares[1]:.2f} after",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, help="commit to compare with")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--what", default="publish,load")
    parser.add_argument("--folder", default="/dev/shm", help="where the stores are made")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--serves", action="store_true", help=argparse.SUPPRESS)
    arguments = parsed(parser, layers=2, width=256, pairs=1, what="publish", before="HEAD")
    if arguments.serves:
        serve(arguments)
        return
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}, {arguments.folder}")
    with tempfile.TemporaryDirectory() as name:
        before, model = Path(name) / "before", Path(name) / "model"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", "-q", str(before), arguments.before], check=True)
        try:
            build(model, arguments.layers, arguments.width)
            for what in arguments.what.split(","):
                compared(what, before, str(model), arguments)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)


if __name__ == "__main__":
    main()
