"""The routers of a mixture of experts: replay routes in them, record routes, and count what they choose.

A router scores all experts for a token and takes the best k. Replay gives it other *indices*; the scores of these come
from its live weights, so its gradient is that of the experts that computed (R3, arXiv 2510.11370). A token whose route
is missing, out of range or names an expert twice takes the router's own.

Every router of transformers takes its experts by one `topk` of scores `[tokens, experts]`: of probabilities, of
logits before their softmax (gpt-oss), or of biased sigmoids whose groups were limited before (GLM, DeepSeek). It is
intercepted between the start of a layer's block and that of its experts. A pass that is computed anew for the backward
pass meets the same routes, by layer and not by order.

Not supported: routers compiled by `learner.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from rlhfless.algorithms.batch import PackedBatch
from rlhfless.functions.expert_parallel import count_of_experts, expert_blocks
from rlhfless.records import IntArray
from rlhfless.records.routes import Rows
from rlhfless.spec.errors import InputError, Problem

TOPKS = (torch.topk, torch.Tensor.topk)


class RouteSource(Protocol):
    """Where a batch's routes are."""

    def rows(self, files: Sequence[str], file: IntArray, row: IntArray) -> Rows:
        """Return the routes of tokens, each `row` of `files[file]`."""
        ...


@dataclass(slots=True)
class RoutedPass:
    """The routes of one forward pass, by position of the flattened tokens."""

    counted: torch.Tensor  # [positions], bool: generated tokens, which the metrics are about
    rows: torch.Tensor | None = None  # [positions, layers, k]; None: nothing is replayed
    valid: torch.Tensor | None = None  # [positions, layers], bool
    recorded: torch.Tensor | None = None  # [positions, layers, k], filled by the pass


class Routers:
    """The routers of a model, in the order of its layers."""

    def __init__(self, experts: Sequence[torch.nn.Module], blocks: Sequence[torch.nn.Module], k: int) -> None:
        self.layers, self.k = len(experts), k
        self.experts = count_of_experts(experts[0])
        self.source: RouteSource | None = None
        """Where the routes of batches are; None: nothing is replayed."""
        self.recording = False
        """Whether passes record their routes."""
        self._pass: RoutedPass | None = None
        self._done: set[int] = set()
        """Layers that this pass has reached."""
        self._counts: _Counts | None = None
        for number, (block, module) in enumerate(zip(blocks, experts, strict=True)):
            steering = _Steering(self, number)
            block.register_forward_pre_hook(steering.begin)
            module.register_forward_pre_hook(steering.end)
            block.register_forward_hook(steering.end, always_call=True)

    @classmethod
    def of(cls, model: Any) -> Routers | None:
        """Return the routers of a model; None without experts that transformers computes in one module a layer."""
        pairs = expert_blocks(model)
        k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        return None if k is None or not pairs else cls([each for _, each in pairs], [block for block, _ in pairs], k)

    def require_reached(self, run: Callable[[], object], tokens: int, device: torch.device) -> None:
        """Raise InputError unless a pass of `tokens` tokens meets the choice of every layer once."""
        self.begin(RoutedPass(torch.zeros(tokens, dtype=torch.bool, device=device)))
        run()
        if len(self._done) != self.layers:
            what = f"the choice of experts is known in {len(self._done)} of {self.layers} layers of this model"
            raise InputError("the learner", [Problem("algorithm.router_replay", what, "set it to off")])
        self.begin(None)

    def begin(self, routed: RoutedPass | None) -> None:
        """Set the routes of the next pass, which are also those of its recomputation."""
        self._pass = routed
        self._done = set()

    def routed(self, batch: PackedBatch, place: IntArray, positions: int, device: torch.device) -> RoutedPass:
        """Return the routes of a pass over `batch`, whose fed tokens are at `place` [fed] of `positions`.

        Several tokens share a place if their prefix is computed once; the first one's route is taken.
        """
        fed = batch.positions < batch.lengths[batch.sequence_id] - 1
        counted = np.zeros(positions, dtype=np.bool_)
        counted[place[batch.response_mask[fed]]] = True
        routed = RoutedPass(torch.from_numpy(counted).to(device))
        shape = positions, self.layers, self.k
        if self.recording:
            routed.recorded = torch.full(shape, -1, dtype=torch.int16, device=device)
        if self.source is None or batch.route_file is None or batch.route_row is None:
            return routed
        known = batch.route_file[fed] > 0
        file, row = batch.route_file[fed][known] - 1, batch.route_row[fed][known] - 1
        rows = np.full(shape, -1, dtype=np.int16)
        rows[place[known][::-1]] = self.source.rows(batch.route_files, file, row)[::-1]
        routed.rows = torch.from_numpy(rows).to(device)
        routed.valid = torch.from_numpy(_usable(rows, self.experts)).to(device)
        if torch.is_grad_enabled():
            self._counted(device).missing += int((counted & (rows < 0).any((1, 2))).sum())
        return routed

    def chosen(self, layer: int, scores: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the experts of each token `[tokens, k]`, given the router's own choice among `scores`."""
        routed, first = self._pass, layer not in self._done
        self._done.add(layer)
        if routed is None:
            return own
        if len(routed.counted) != len(own):
            raise ValueError(f"a router got {len(own)} tokens in a pass of {len(routed.counted)}")
        chosen = own
        if routed.rows is not None and routed.valid is not None:
            rows, valid = routed.rows[:, layer].long(), routed.valid[:, layer]
            other = valid & (rows.sort(-1).values != own.sort(-1).values).any(-1)
            chosen = torch.where(other[:, None], rows.clamp(min=0), own)
            if first and torch.is_grad_enabled():
                self._counted(own.device).add_replayed(valid & routed.counted, other & routed.counted)
        if first and torch.is_grad_enabled():
            self._counted(own.device).add(layer, scores.detach(), chosen, routed.counted)
        if first and routed.recorded is not None:
            routed.recorded[:, layer] = chosen.to(torch.int16)
        return chosen

    def recorded(self) -> Rows:
        """Return the routes that the last pass recorded, `[positions, layers, k]`."""
        assert self._pass is not None
        assert self._pass.recorded is not None
        rows: Rows = self._pass.recorded.cpu().numpy()
        return rows

    def _counted(self, device: torch.device) -> _Counts:
        if self._counts is None:
            self._counts = _Counts(self.layers, self.experts, device)
        return self._counts

    def taken_metrics(self, device: torch.device, *, replayed: bool) -> dict[str, float]:
        """Return the metrics of all updates since the last call, over all ranks. *Collective.*"""
        counts = self._counted(device)
        self._counts = None
        return counts.metrics(replayed=replayed)


def _usable(rows: Rows, experts: int) -> npt.NDArray[np.bool_]:
    """Return which routes `[positions, layers]` name k different experts of the model."""
    ordered = np.sort(rows, axis=-1)
    different = np.all(np.diff(ordered, axis=-1) > 0, axis=-1)
    usable: npt.NDArray[np.bool_] = different & (ordered[..., 0] >= 0) & (ordered[..., -1] < experts)
    return usable


class _Counts:
    """What routers chose for generated tokens, summed on the device."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self._load = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        self._entropy, self._tokens, self._replayed, self._differing = torch.zeros(
            4, dtype=torch.float64, device=device
        ).unbind()
        self.missing = 0
        """Tokens without a route in some layer."""

    def add(self, layer: int, scores: torch.Tensor, chosen: torch.Tensor, counted: torch.Tensor) -> None:
        """Count the choice of a layer. `scores` [tokens, experts] are probabilities, logits, or weights."""
        weight = counted.double()
        self._load[layer].scatter_add_(0, chosen.flatten(), weight.repeat_interleave(chosen.shape[-1]))
        scores = scores.float()
        normalised = scores / scores.sum(-1, keepdim=True)
        shares = torch.where((scores < 0).any(), scores.softmax(-1), normalised)
        self._entropy += (torch.special.entr(shares).sum(-1) * counted).nansum()
        self._tokens += weight.sum()

    def add_replayed(self, usable: torch.Tensor, other: torch.Tensor) -> None:
        """Count the tokens `[tokens]` whose route could be replayed, and those whose router would choose others."""
        self._replayed += usable.sum()
        self._differing += other.sum()

    def metrics(self, *, replayed: bool) -> dict[str, float]:
        """*Collective.*"""
        missing = torch.tensor([self.missing], dtype=torch.float64, device=self._load.device)
        sums = torch.stack([self._entropy, self._tokens, self._replayed, self._differing])
        everything = torch.cat([sums, missing, self._load.flatten()])
        if dist.is_initialized():
            dist.all_reduce(everything)
        (entropy, tokens, routes, differing, lacking), load = (
            everything[:5].tolist(),
            everything[5:].view_as(self._load),
        )
        if not tokens:
            return {}
        mean = load.mean(-1).clamp(min=1e-12)
        metrics = {
            "router_entropy": entropy / tokens,
            "expert_load_max": float((load.amax(-1) / mean).mean()),
            "idle_experts": float((load == 0).double().mean()),
        }
        if replayed:
            metrics |= {
                "differing_routes": differing / max(routes, 1),
                "missing_routes": lacking * len(load) / tokens,
            }
        return metrics


class _Steering(TorchFunctionMode):
    """Intercepts the choice of one layer, between `begin` and `end`."""

    def __init__(self, routers: Routers, layer: int) -> None:
        super().__init__()
        self._routers, self._layer = routers, layer
        self._active = False

    def begin(self, *_: Any) -> None:
        """Begin, before the layer's block."""
        self.end()
        self._active = True
        self.__enter__()

    def end(self, *_: Any) -> None:
        """End, before the layer's experts, or with an error or an early stop of the block. Idempotent."""
        if self._active:
            self._active = False
            self.__exit__(None, None, None)

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in TOPKS:
            return result
        scores, own = args[0], result.indices
        if scores.ndim != 2 or scores.shape[-1] != self._routers.experts or own.shape[-1] != self._routers.k:
            return result  # the choice of groups of experts
        chosen = self._routers.chosen(self._layer, scores, own)
        return result if chosen is own else torch.return_types.topk((scores.gather(-1, chosen), chosen))
