"""Record which experts computed each generated token, in a worker of vLLM's older runner.

vLLM records routes in its newer runner alone (`enable_return_routed_experts`), which CPUs lack. Here the routers'
capture function, which that flag uses too, keeps the experts of each pass; after the pass, rows are kept of each
request's generated tokens, by their positions. A token is computed once, when it was sampled, or, with drafts, also
before: the route of a rejected draft is overwritten. A token that is computed again, after a preemption or with new
weights in flight, keeps its first route, that of the weights that sampled the next token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from rlhfless.records.routes import Rows, stored, write_routes

UNCLAIMED = 4096
"""Requests whose routes are kept after they ended without being asked for, such as cancelled ones."""


def routed_layers(model: torch.nn.Module) -> dict[int, Any]:
    """Return the routers of a model by layer. Raises ValueError for one that reports no routes."""
    routers = {module.layer_id: module.router for module in model.modules() if isinstance(module, MoERunner)}
    odd = [type(router).__name__ for router in routers.values() if not isinstance(router, BaseRouter)]
    if odd or not routers:
        what = f"routers of type {odd[0]} report" if odd else "the model has no routers that report"
        raise ValueError(f"algorithm.router_replay is engine, but {what} no routes; set it to recorded or off")
    return routers


@dataclass(slots=True)
class _Kept:
    """The routes of one request's generated tokens."""

    first: int
    """Position of the first generated token."""
    rows: Rows
    settled: Any = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """[rows]: computed after the token was sampled, not as a draft."""

    def put(self, positions: Any, routes: Rows, sampled: int) -> None:
        """Keep the routes of `positions`; those below `sampled` are of tokens that were sampled."""
        places = positions - self.first
        generated = places >= 0
        places, routes = places[generated], routes[generated]
        if not len(places):
            return
        if (size := int(places.max()) + 1) > len(self.rows):
            more = max(size, 2 * len(self.rows), 64) - len(self.rows)
            self.rows = np.concatenate([self.rows, np.full((more, *self.rows.shape[1:]), -1, dtype=np.int16)])
            self.settled = np.concatenate([self.settled, np.zeros(more, dtype=np.bool_)])
        new = ~self.settled[places]
        self.rows[places[new]] = routes[new]
        self.settled[places] |= places + self.first < sampled


class RouteRecorder:
    """Records the routes of one worker. Every worker of an engine records the same."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        routers = routed_layers(runner.model)
        first = next(iter(routers.values()))
        self._experts, self._k = int(first.global_num_experts), int(first.top_k)
        self._pass: dict[int, torch.Tensor] = {}
        """The experts `[tokens, k]` of the last pass, by layer."""
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._layers = sorted(routers)
        for layer, router in routers.items():
            router.set_capture_fn(partial(self._pass.__setitem__, layer))
        self._execute: Callable[..., Any] = runner.execute_model
        runner.execute_model = self._executed

    def _executed(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        self._pass.clear()
        result = self._execute(scheduled, *arguments, **options)
        if self._pass and scheduled.total_num_scheduled_tokens:
            self._keep(scheduled)
        while len(self._kept) > UNCLAIMED + self._runner.input_batch.num_reqs:
            self._kept.popitem(last=False)
        return result

    def _keep(self, scheduled: Any) -> None:
        total = scheduled.total_num_scheduled_tokens
        routes = np.stack([self._pass[layer][:total].cpu().numpy() for layer in self._layers], 1).astype(np.int16)
        positions = self._runner.positions[:total].cpu().numpy()
        start = 0
        for request_id in self._runner.input_batch.req_ids:
            end = start + scheduled.num_scheduled_tokens[request_id]
            state = self._runner.requests[request_id]
            if positions[end - 1] >= state.num_prompt_tokens:
                if request_id not in self._kept:
                    empty = np.zeros((0, len(self._layers), self._k), dtype=np.int16)
                    self._kept[request_id] = _Kept(state.num_prompt_tokens, empty)
                self._kept[request_id].put(positions[start:end], routes[start:end], state.num_tokens)
            start = end

    def write(self, request_id: str, tokens: int, path: str) -> int:
        """Write the routes of a request's first `tokens` generated tokens, and forget it. Return the number of rows.

        The last token of a response was never computed, and has no row.
        """
        kept = self._kept.pop(request_id, None)
        rows = None if kept is None else kept.rows[: max(tokens - 1, 0)]
        if rows is None or not len(rows):
            return 0
        write_routes(Path(path), stored(rows, self._experts))
        return len(rows)
