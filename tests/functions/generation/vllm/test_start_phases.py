"""The parts of an engine's start are what vLLM says of them, and no others."""

import logging
from types import SimpleNamespace

import pytest

from rlhfless.functions.generation.vllm import start_times
from rlhfless.functions.generation.vllm.start_times import of_worker, phases


def test_a_worker_reports_what_the_log_and_the_configuration_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_times, "_heard", start_times._Heard())
    log = logging.getLogger("vllm.v1.worker.some_runner")
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    log.setLevel(logging.INFO)
    start_times.listen()
    log.info("Loading weights took %.2f seconds", 2.25)
    log.info("Loading drafter model took %.2f seconds", 9.0)
    log.info("Graph capturing finished in %.0f secs, took %.2f GiB", 7.5, 1.0)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(compilation_time=30.0, encoder_compilation_time=1.0), model="m"
    )
    assert of_worker(config)[0] == {"weights_cache": 2.25, "graphs": 7.5, "compile": 31.0}


def test_phases_are_of_the_slowest_worker_and_add_up_to_the_build() -> None:
    workers = [({"weights_cache": 2.0, "graphs": 7.0}, 40), ({"weights_cache": 3.0, "compile": 10.0}, 20)]
    assert phases(25.0, workers, 100) == {"weights_disk": 3.0, "graphs": 7.0, "compile": 10.0, "build": 5.0}
    assert phases(25.0, [({"weights_cache": 2.0}, 49)], 100) == {"weights_cache": 2.0, "build": 23.0}
    assert phases(25.0, [({}, 0)], 0) == {"build": 25.0}
