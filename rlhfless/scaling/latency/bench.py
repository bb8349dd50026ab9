"""A measurement of a server by its user: the file of `vllm bench serve --save-result`. Pure but for reading it.

`vllm bench serve` measures any OpenAI-compatible server: vLLM, SGLang, TensorRT-LLM. Its mean seconds per token, as a
multiple of what a plan takes the same engine to need under the same load, scales that engine on these devices.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rlhfless.scaling.latency.devices import device_of
from rlhfless.scaling.latency.engines import EngineName, served, steady_token_s
from rlhfless.scaling.latency.shape import ModelShape
from rlhfless.spec.errors import InputError, Problem

FORM = re.compile(r"(?P<engine>[a-z-]+):(?P<devices>[1-9]\d*)x(?P<kind>[a-z0-9-]+):(?P<path>.+)")

OPTION = "--bench"

HINT = "such as vllm:2xh100:results.json, with the file of `vllm bench serve --save-result --max-concurrency N`"

NEEDED = ("mean_tpot_ms", "max_concurrency", "completed", "total_input_tokens", "total_output_tokens")


@dataclass(frozen=True, slots=True)
class Bench:
    """A measured server."""

    engine: EngineName
    kind: str
    devices: int
    """Tensor parallel."""
    token_s: float
    in_flight: int
    input_tokens: float
    """Of a request, at the mean."""
    output_tokens: float

    @classmethod
    def of(cls, text: str) -> Bench:
        """The measurement that `ENGINE:NxKIND:FILE` names. Raises InputError, UnknownDevice."""
        found = FORM.fullmatch(text)
        if found is None or found["engine"] not in get_args(EngineName):
            engines = ", ".join(get_args(EngineName))
            raise _refused(f"{text!r} is no ENGINE:NxKIND:FILE; engines are {engines}")
        path = found["path"]
        try:
            values = json.loads(Path(path).read_text("utf-8"))
            tpot_ms, in_flight, completed, tokens_in, tokens_out = (float(values[name]) for name in NEEDED)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _refused(f"{path!r} has no such measurement: {type(error).__name__}: {error}") from error
        if min(tpot_ms, in_flight, completed, tokens_out) <= 0:
            raise _refused(f"{path!r} measured nothing: {', '.join(NEEDED)} must be above 0")
        engine: Any = found["engine"]
        kind = device_of(found["kind"]).kind
        sizes = tokens_in / completed, tokens_out / completed
        return cls(engine, kind, int(found["devices"]), tpot_ms / 1000, int(in_flight), *sizes)

    def factor(self, shape: ModelShape) -> float:
        """Measured seconds per token of a model of this shape, as a multiple of the plan's. Raises UnknownShape."""
        model = served(self.engine, shape, device_of(self.kind), self.devices)
        return self.token_s / steady_token_s(model, self.in_flight, self.input_tokens, self.output_tokens)


def _refused(what: str) -> InputError:
    return InputError(OPTION, [Problem("", what, HINT)])
