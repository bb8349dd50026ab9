"""A tiny model with adapters, and a real engine that serves them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fakes.tiny_models import PROBE_TOKENS, TinyModel
from rlhfless.functions.generation.engine import SampleRequest
from rlhfless.functions.generation.vllm.adapter import VllmEngine
from rlhfless.records import BaseWeights, Probe, PublishedWeights
from rlhfless.weights.adapters import tied_to_base
from rlhfless.weights.check import PROBE_TOLERANCE, check_probe, largest_difference
from rlhfless.weights.samples import weight_sample
from rlhfless.weights.store import FolderStore

TOLERANCE = PROBE_TOLERANCE["float32"]
RANK, ALPHA = 4, 8
BASE = "0a" * 16


@dataclass
class Adapted:
    engine: VllmEngine
    model: TinyModel
    store: FolderStore

    def tensors(self, seed: int, scale: float = 0.1, targets: Iterable[str] = ("_proj",)) -> dict[str, torch.Tensor]:
        """Return an adapter by PEFT's names; with `scale` 0, one that changes nothing."""
        random = torch.Generator().manual_seed(seed)
        found = {}
        for name, module in self.model.model.named_modules():
            if isinstance(module, torch.nn.Linear) and any(each in name for each in targets):
                prefix = f"base_model.model.{name}"
                found[f"{prefix}.lora_A.weight"] = torch.randn(RANK, module.in_features, generator=random)
                found[f"{prefix}.lora_B.weight"] = scale * torch.randn(module.out_features, RANK, generator=random)
        return found

    def merged(self, tensors: dict[str, torch.Tensor]) -> TinyModel:
        model = copy.deepcopy(self.model.model)
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name, down in tensors.items():
                if "lora_A" in name:
                    path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    up = tensors[name.replace("lora_A", "lora_B")]
                    weights[f"{path}.weight"] += ALPHA / RANK * up @ down
        return TinyModel(self.model.folder, model)

    def publish(
        self, step: int, tensors: dict[str, torch.Tensor], run_id: str = "run", base: str = BASE, **changes: Any
    ) -> PublishedWeights:
        """Write an adapter to the store, and announce it as the learner does."""
        whole = tensors | tied_to_base(base, ALPHA)
        stored = self.store.put(run_id, 0, step, whole)
        samples = {name: weight_sample(value, PROBE_TOKENS, value.dtype) for name, value in whole.items()}
        of_base = {
            name: weight_sample(value, PROBE_TOKENS, value.dtype) for name, value in self.model.tensors().items()
        }
        probe = Probe(PROBE_TOKENS, self.merged(tensors).logprobs(PROBE_TOKENS), samples)
        of = BaseWeights(base, of_base)
        published = PublishedWeights(stored.version, stored.location, stored.size_bytes, stored.tensors, probe, of)
        return replace(published, **changes)

    async def load(self, published: PublishedWeights, **options: Any) -> None:
        """Load a version with all checks."""
        report = await self.engine.load(published, **options)
        assert report is not None
        assert report.read_back == report.tensors == published.tensors
        logprobs = await self.engine.logprobs(PROBE_TOKENS)
        check_probe(published.version, published.probe, logprobs, TOLERANCE)


def request(name: str, **changes: Any) -> SampleRequest:
    return replace(SampleRequest(name, (5, 6, 7, 8), seed=11, max_tokens=24, temperature=1.0), **changes)


def off(model: TinyModel, sampled: Any, prompt: tuple[int, ...] = (5, 6, 7, 8)) -> float:
    """Return how far a response's logprobs are from the model's."""
    expected = model.logprobs(prompt + sampled.token_ids)[len(prompt) - 1 :]
    return largest_difference(expected, sampled.logprobs)
