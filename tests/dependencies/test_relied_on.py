"""Behaviour of dependencies that they do not promise, as far as we rely on it."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import ray
import torch
from contracts import package_folder
from ray.exceptions import RayTaskError

from rlhfless.fleet.causes import innermost
from rlhfless.fleet.ray_session import _known_by_loopback
from rlhfless.functions.generation.engine_log import _ERROR, _PREFIX
from rlhfless.functions.learner.optimizer import MOMENTS
from rlhfless.functions.out_of_memory import engine_fault
from rlhfless.functions.ranks.group import _of_network
from rlhfless.spec.errors import UserError


def texts_in(file: Path, node_kind: type[ast.AST]) -> Iterator[str]:
    """The texts inside of nodes of a file, with `0` for what is filled in."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, node_kind):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.JoinedStr):
                yield "".join(str(piece.value) if isinstance(piece, ast.Constant) else "0" for piece in part.values)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("v1/core/kv_cache_utils.py", "No available memory for the cache blocks"),
        ("v1/core/kv_cache_utils.py", "GiB KV cache is needed"),
        ("v1/worker/utils.py", "Free memory on device"),
    ],
)
def test_vllm_says_that_memory_lacks_in_words_that_we_know(module: str, says: str) -> None:
    """functions/out_of_memory.py tells a lack of memory by them."""
    said = [text for text in texts_in(package_folder("vllm") / module, ast.Raise) if says in text]
    assert said, (
        f"vllm/{module} raises nothing with {says!r}, by which functions/out_of_memory.py knows a lack of memory"
    )
    assert all(engine_fault(f"ValueError: {text}", {}) for text in said)


def test_vllm_begins_a_logged_error_with_what_we_leave_out() -> None:
    """functions/generation/engine_log.py finds the errors in the lines of all processes."""
    logger = package_folder("vllm") / "logger.py"
    line_format, date_format = _formats(logger)
    record = logging.LogRecord("vllm", logging.ERROR, "core.py", 1510, "RuntimeError: it failed", None, None)
    record.vllm_process_name, record.fileinfo = "EngineCore", "core.py"
    line = logging.Formatter(line_format, date_format).format(record)
    assert line.startswith("(EngineCore pid=")
    assert _ERROR.match(_PREFIX.sub("", line)), f"engine_log._PREFIX does not know {line!r}"


def _formats(logger: Path) -> tuple[str, str]:
    """vLLM's formats of lines and of dates, without the prefix that a user may set."""
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse(logger.read_text()).body
        if isinstance(node, ast.Assign)
    }
    line = assigned["_FORMAT"]
    assert isinstance(line, ast.JoinedStr)
    return "".join(piece.value for piece in line.values if isinstance(piece, ast.Constant)), ast.literal_eval(
        assigned["_DATE_FORMAT"]
    )


def test_ray_ends_the_text_of_a_failed_task_with_its_error() -> None:
    """rlhfless/fleet/causes.py reads the cause of a failed start from it."""
    trace = "Traceback (most recent call last):\n  File 'a.py', line 1\nrlhfless.spec.errors.UserError: no such model"
    cause = innermost([str(RayTaskError("__init__", trace, UserError("no such model")))])
    assert (cause.name, cause.message) == ("rlhfless.spec.errors.UserError", "no such model")


def test_ray_can_be_told_to_know_its_node_by_loopback() -> None:
    """rlhfless/fleet/ray_session.py keeps a private Ray off the network so."""
    with _known_by_loopback():
        assert ray.util.get_node_ip_address() == "127.0.0.1"


def test_torch_names_the_state_of_adamw_as_checkpoints_do() -> None:
    """functions/learner/optimizer.py makes the state itself, so that a lack of memory shows at once."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    assert set(optimizer.state[parameter]) == {"step", *MOMENTS}


def test_an_error_of_torchs_network_is_told_from_others() -> None:
    """functions/ranks/group.py blames the rank that failed, and not the ones that waited for it."""
    with pytest.raises(RuntimeError) as raised:
        torch.distributed.TCPStore("127.0.0.1", 1, 2, is_master=False, timeout=timedelta(seconds=1))
    assert _of_network(raised.value)
    assert not _of_network(ValueError("connection"))
