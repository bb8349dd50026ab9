"""Write the routes of finished responses to files, from vLLM's own output or from RouteRecorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlhfless.functions.generation.engine import EngineSettings, SampleRequest
from rlhfless.records import RouteSpan
from rlhfless.records.routes import stored, write_routes


class RouteOutput:
    """The files of one engine."""

    def __init__(self, engine: Any, settings: EngineSettings) -> None:
        self._engine = engine
        self._folder = Path(settings.routes_folder) if settings.routes_folder else None
        self._layers: list[int] | None = None
        """The layers with routers among those of vLLM's own output; None if RouteRecorder writes."""
        if self._folder is not None and settings.device != "cpu":
            self._layers = engine.collective_rpc("rlhfless_routed_layers")[0]
            self._experts = int(engine.model_config.get_num_experts())

    def parameters(self, request: SampleRequest) -> dict[str, Any]:
        """Return sampling parameters: routes of the prompt are not returned."""
        wanted = self._layers is not None and request.routes
        return {"routed_experts_prompt_start": len(request.token_ids)} if wanted else {}

    def written(self, internal: str, request: SampleRequest, completion: Any) -> tuple[RouteSpan, ...]:
        """Write the routes of a response, and return where they are; empty if it has none."""
        tokens = len(completion.token_ids)
        if self._folder is None or not request.routes or not tokens:
            return ()
        path = self._folder / request.routes
        if self._layers is None:
            count = self._engine.collective_rpc("rlhfless_write_routes", args=(internal, tokens, str(path)))[0]
        else:
            routed = completion.routed_experts
            count = 0 if routed is None else min(len(routed), tokens - 1)
            if count:
                write_routes(path, stored(np.asarray(routed[:count, self._layers], dtype=np.int16), self._experts))
        return (RouteSpan(request.routes, 0, count),) if count else ()
