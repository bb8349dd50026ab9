"""Arguments, environment, version check and frames: all that needs no process."""

import asyncio
import dataclasses
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rlhfless
from rlhfless.functions.devices import FLASHINFER
from rlhfless.functions.generation.engine import EngineSettings
from rlhfless.functions.generation.vllm import arguments
from rlhfless.functions.generation.vllm import arguments as arguments_module
from rlhfless.functions.generation.vllm.arguments import (
    DRAFTERS,
    engine_arguments,
    engine_environment,
    has_core_process,
)
from rlhfless.spec import EngineSpec, RunSpec, SpeculationSpec, TimeoutsSpec
from rlhfless.spec.fleet import KvConnector
from rlhfless.util import processes
from rlhfless.weights.address import StoreAddress


def _settings(device: str = "cpu", path: str = "some/model", **engine: object) -> EngineSettings:
    run = RunSpec.model_validate(
        {
            "model": {"path": path, "dtype": "bfloat16", "max_context_tokens": 512},
            "prompts": {"path": "prompts.jsonl"},
            "rewards": [{"type": "exact_match"}],
            "generation": {"engine": engine},
            "seed": 7,
        }
    )
    return EngineSettings.of(run, device, StoreAddress("file", "store"), max_model_len=512)  # type: ignore[arg-type]


def _with_connector(connector: KvConnector, device: str = "cpu") -> EngineSettings:
    return dataclasses.replace(_settings(device), kv_connector=connector)


def test_cpu_arguments() -> None:
    arguments = engine_arguments(_settings(max_sequences=64))
    assert arguments["model"] == arguments["tokenizer"] == "some/model"
    assert arguments["dtype"] == "bfloat16"
    assert arguments["max_model_len"] == 512
    assert arguments["seed"] == 7
    assert arguments["max_num_seqs"] == 64
    assert arguments["enforce_eager"] is True
    assert arguments["block_size"] == 32
    assert arguments["kv_cache_memory_bytes"] == 2**30
    assert "gpu_memory_utilization" not in arguments


def test_cuda_arguments() -> None:
    arguments = engine_arguments(_settings("cuda", gpu_memory_fraction=0.5, tensor_parallel_size=2))
    assert arguments["gpu_memory_utilization"] == 0.5
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["enforce_eager"] is False
    assert "block_size" not in arguments


def test_an_engine_beside_others_gets_its_kv_from_the_plan_and_measures_nothing() -> None:
    settings = dataclasses.replace(_settings("cuda"), kv_bytes=3 << 30)
    arguments = engine_arguments(settings)
    assert arguments["kv_cache_memory_bytes"] == 3 << 30
    # vLLM refuses a start unless this part of the device is free: the plan gave an H100's engine 44.7 of 79.2 GiB, and
    # the fraction of .6 asked for 47.5.
    assert arguments["gpu_memory_utilization"] * 79.2 < 5


def test_engines_that_sleep_give_back_graphs_and_communicators() -> None:
    names = {"enable_sleep_mode", "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend"}
    asleep = engine_arguments(dataclasses.replace(_settings("cuda"), sleeps=True))
    assert {name for name in names if asleep.get(name) is True} == names
    assert not names & engine_arguments(_settings("cuda")).keys()
    assert not names & engine_arguments(dataclasses.replace(_settings("cpu"), sleeps=True)).keys()
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    installed = Path(vllm.origin).with_name("engine") / "arg_utils.py"
    assert all(f"    {name}: bool = " in installed.read_text() for name in names)


def test_pinned_memory_of_gpu_engines_is_not_rounded_up() -> None:
    key = "PYTORCH_ALLOC_CONF"
    assert engine_environment(_settings("cuda"), {})[key] == "pinned_max_round_threshold_mb:1"
    assert engine_environment(_settings("cuda"), {key: "backend:native"})[key] == "backend:native"
    assert key not in engine_environment(_settings(), {})


def test_the_limits_of_vllm_are_no_shorter_than_the_runs() -> None:
    timeouts = TimeoutsSpec(start_s=2000.5, sync_s=900, generate_s=700)
    environment = engine_environment(dataclasses.replace(_settings("cuda"), timeouts=timeouts), {})
    assert environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "2001"
    assert environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "900"


def test_a_connector_whose_package_is_missing_is_refused_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arguments_module.importlib.util, "find_spec", lambda name: None if name == "nixl" else object())
    with pytest.raises(ValueError, match="nixl") as refused:
        engine_arguments(_with_connector("nixl", "cuda"))
    text = str(refused.value)
    assert "scaling.prefill.kv_connector is nixl" in text
    assert "the package nixl is not installed where this engine runs" in text
    assert (
        "install it on every node (the extra `nixl` of rlhfless), or set kv_connector to folder (engines of one node)"
        in text
    )
    monkeypatch.setattr(arguments_module.importlib.util, "find_spec", lambda _: object())
    transfer = engine_arguments(_with_connector("nixl", "cuda"))["kv_transfer_config"]
    assert transfer["kv_connector"] == "NixlConnector"


def test_engines_with_nixl_listen_at_their_nodes_address_each_at_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    first, second = (
        engine_environment(_with_connector("nixl"), {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}) for _ in range(2)
    )
    assert first["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert len({"5600", first["VLLM_NIXL_SIDE_CHANNEL_PORT"], second["VLLM_NIXL_SIDE_CHANNEL_PORT"]}) == 3
    assert first["UCX_NET_DEVICES"] == "lo"
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "0.0.0.0")  # stands for an address of the network
    assert "UCX_NET_DEVICES" not in engine_environment(_with_connector("nixl", "cuda"), {})
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in engine_environment(_with_connector("folder"), {})


def test_kernels_that_do_not_depend_on_the_batch_are_asked_for_on_gpus_alone() -> None:
    for device, wanted, found in (("cuda", True, "1"), ("cuda", False, "0"), ("cpu", True, None)):
        settings = dataclasses.replace(_settings(device), batch_invariant=wanted)
        assert engine_environment(settings, {}).get("VLLM_BATCH_INVARIANT") == found


def test_the_sampler_that_takes_no_seeds_is_off_on_gpus() -> None:
    inherited = {"VLLM_USE_FLASHINFER_SAMPLER": "1"}
    assert engine_environment(_settings("cuda"), inherited)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_flashinfer_is_off_unless_the_spec_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {FLASHINFER: "1"}
    assert engine_environment(_settings("cuda"), inherited)[FLASHINFER] == "0"
    wanted = _settings("cuda", flashinfer=True)
    assert engine_environment(wanted, {})[FLASHINFER] == "1"
    assert FLASHINFER not in engine_environment(_settings("cpu", flashinfer=True), {})
    with pytest.raises(ValueError, match=r"engine\.flashinfer is true, but flashinfer-cubin and flashinfer-jit"):
        engine_arguments(wanted)
    engine_arguments(_settings("cpu", flashinfer=True))
    monkeypatch.setattr(arguments_module, "FLASHINFER_KERNELS", ("json",))
    engine_arguments(wanted)


@pytest.mark.parametrize(("setting", "found"), [("0", False), ("1", True)])
def test_the_compiler_of_a_host_does_not_decide_about_flashinfer(setting: str, found: bool, tmp_path: Path) -> None:
    """vLLM finds FlashInfer where there is an nvcc, as here."""
    (tmp_path / "flashinfer.py").touch()
    (tmp_path / "bin").mkdir()
    for tool in ("nvcc", "ninja"):
        (tmp_path / "bin" / tool).touch(0o755)
    code = (
        "from rlhfless.functions.devices import hide_flashinfer; hide_flashinfer()\n"
        "from vllm.utils.flashinfer import has_flashinfer; print('found', has_flashinfer())"
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, FLASHINFER: setting, "CUDA_HOME": str(tmp_path), "PATH": path}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert f"found {found}" in done.stdout, done.stderr


def test_the_processes_of_an_engine() -> None:
    """One on a CPU core; on a GPU, and for several devices, more than one."""
    assert not has_core_process(_settings())
    assert has_core_process(_settings("cuda"))
    assert has_core_process(_settings(tensor_parallel_size=2))
    assert has_core_process(_settings(core_process=True))
    with pytest.raises(ValueError, match="core_process is false, but tensor_parallel_size is 2"):
        has_core_process(_settings(tensor_parallel_size=2, core_process=False))
    apart = engine_environment(_settings(core_process=True), {"VLLM_WORKER_MULTIPROC_METHOD": "fork"})
    assert apart["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert apart["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_extra_arguments_win_but_for_the_adapters_own() -> None:
    assert engine_arguments(_settings(extra={"block_size": 64}))["block_size"] == 64
    with pytest.raises(ValueError, match="'logprobs_mode'"):
        engine_arguments(_settings(extra={"logprobs_mode": "raw_logprobs"}))


def test_a_quantised_engine_has_our_format_and_no_other() -> None:
    settings = dataclasses.replace(_settings(), quantization="fp8")
    assert engine_arguments(settings)["quantization"] == "rlhfless-fp8"
    assert "quantization" not in engine_arguments(_settings())
    for name in ("quantization", "quantization_config"):
        with pytest.raises(ValueError, match=f"'{name}'"):
            engine_arguments(_settings(extra={name: "fp8"}))


@pytest.mark.parametrize(
    ("device", "method", "asked"),
    [
        ("cpu", "ngram", {"method": "custom_class", "model": DRAFTERS["ngram"]}),
        ("cuda", "ngram", {"method": "ngram_gpu", "prompt_lookup_min": 3, "prompt_lookup_max": 5}),
        ("cpu", "suffix", {"method": "custom_class", "model": DRAFTERS["suffix"]}),
        ("cpu", "auto", {"method": "custom_class", "model": DRAFTERS["auto"]}),
        ("cuda", "suffix", {"method": "custom_class", "model": DRAFTERS["suffix"]}),
        ("cuda", "draft_model", {"method": "draft_model", "model": "small"}),
        ("cuda", "eagle3", {"method": "eagle3", "model": "small"}),
        ("cuda", "mtp", {"method": "mtp"}),
    ],
)
def test_speculation(device: str, method: str, asked: dict[str, object]) -> None:
    model = "small" if asked.get("model") == "small" else None
    speculation = SpeculationSpec(method=method, depth=6, model=model)  # type: ignore[arg-type]
    arguments = engine_arguments(dataclasses.replace(_settings(device), speculation=speculation))
    assert arguments["speculative_config"] == asked | {"num_speculative_tokens": 6}
    assert arguments["per_request_spec_decode_metrics"] == "detailed"
    assert "speculative_config" not in engine_arguments(_settings(device))
    with pytest.raises(ValueError, match="'speculative_config'"):
        engine_arguments(_settings(device, extra={"speculative_config": {}}))


def test_the_drafters_are_there() -> None:
    for path in DRAFTERS.values():
        module, _, name = path.rpartition(".")
        assert f"class {name}" in (Path(rlhfless.__file__).parent.parent / f"{module.replace('.', '/')}.py").read_text()


def test_a_draft_model_of_the_hub_is_asked_for(tmp_path: Path) -> None:
    local = _settings(path=str(tmp_path))
    of_hub = dataclasses.replace(local, speculation=SpeculationSpec(method="draft_model", model="some/draft"))
    assert local.is_local
    assert not of_hub.is_local
    assert "HF_HUB_OFFLINE" not in engine_environment(of_hub, {})


def test_environment(tmp_path: Path) -> None:
    inherited = {"OMP_NUM_THREADS": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HOME": "/home/me"}
    hub = engine_environment(_settings(), inherited)
    assert hub["OMP_NUM_THREADS"] == "3"
    assert hub["HOME"] == "/home/me"
    assert hub["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert hub["TORCHDYNAMO_DISABLE"] == "1"
    assert hub["VLLM_LOGGING_LEVEL"] == "INFO"
    assert engine_environment(_settings(), {"VLLM_LOGGING_LEVEL": "DEBUG"})["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "HF_HUB_OFFLINE" not in hub
    assert engine_environment(_settings(path=str(tmp_path)), inherited)["HF_HUB_OFFLINE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in engine_environment(_settings("cuda"), inherited)
    assert "LD_PRELOAD" not in engine_environment(_settings("cuda"), inherited)


def test_the_preloaded_libraries_exist() -> None:
    libraries = engine_environment(_settings(), {})["LD_PRELOAD"].split(":")
    assert any("libgomp" in library for library in libraries)
    assert all(Path(library).is_file() for library in libraries)


def test_the_token_of_a_store_is_not_printed() -> None:
    assert "secret" not in repr(StoreAddress("http", "cache", token="secret"))


@pytest.mark.parametrize("installed", ["0.32.0", "0.32.1+cpu", "0.32.0rc1"])
def test_supported_vllm(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(arguments.metadata, "version", lambda _name: installed)
    arguments.require_supported_vllm()


@pytest.mark.parametrize("installed", ["0.31.9", "0.33.0", "1.32.0", "0.320.0"])
def test_other_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(arguments.metadata, "version", lambda _name: installed)
    with pytest.raises(RuntimeError, match=rf"vLLM {installed} is installed, .* 0.32"):
        arguments.require_supported_vllm()


def test_missing_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise arguments.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(arguments.metadata, "version", missing)
    with pytest.raises(RuntimeError, match="not installed"):
        arguments.require_supported_vllm()


async def test_frames_cross_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    large = list(range(300_000))  # more than any socket buffer
    writer.write(processes.encode("first") + processes.encode(large))
    assert await asyncio.to_thread(processes.receive, theirs) == "first"
    assert processes.is_waiting(theirs)
    assert await asyncio.to_thread(processes.receive, theirs) == large
    assert not processes.is_waiting(theirs)
    sending = asyncio.create_task(asyncio.to_thread(processes.send, theirs, large))
    assert await processes.read(reader) == large
    await sending
    theirs.close()
    with pytest.raises(EOFError):
        await processes.read(reader)
    writer.close()


def test_the_end_of_the_stream() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(processes.encode("half")[:10])
    theirs.close()
    assert processes.is_waiting(ours)
    with ours, pytest.raises(EOFError):
        processes.receive(ours)


def test_spec_defaults_reach_the_engine() -> None:
    assert _settings().engine == EngineSpec()
