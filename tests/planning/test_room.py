"""Room for the weights is known before anything starts, also where a quota bounds it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless.planning.host_memory import Needed, Room, chart_shared_memory, room_at, room_problems
from rlhfless.scaling.memory import CACHED_VERSIONS, GIB, kept_versions, stored_versions
from rlhfless.spec import RunSpec
from rlhfless.weights.address import StoreAddress
from rlhfless.weights.http import HttpStoreServer
from rlhfless.weights.store import FolderStore, StoreFull

ROOM = Room("/dev/shm", 40 * GIB, True, 100 * GIB)


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system in memory, of so many bytes."""
    folder = tmp_path / "quota"
    folder.mkdir()

    def mounted(size_bytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a file system in memory needs root (and CAP_SYS_ADMIN in a container)")
        return folder

    yield mounted
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def spec_of(**changes: Any) -> RunSpec:
    values = {"model": {"path": "m"}, "prompts": {"path": "p"}, "rewards": [{"type": "exact_match"}]}
    return RunSpec.model_validate(values | {"placement": {"mode": "disaggregated"}} | changes)


@pytest.mark.parametrize(
    ("needed", "lacking"),
    [
        (Needed(10 * GIB, 4), []),
        (Needed(11 * GIB, 4), ["weights.folder"]),
        (Needed(13 * GIB, CACHED_VERSIONS), []),
        (Needed(14 * GIB, CACHED_VERSIONS), ["weights.folder"]),
        (Needed(10 * GIB, 4, memory_bytes=60 * GIB), []),
        (Needed(10 * GIB, 4, memory_bytes=61 * GIB), ["placement"]),  # with 40 GiB of versions
    ],
)
def test_a_store_and_a_cache_have_three_versions(needed: Needed, lacking: list[str]) -> None:
    assert (stored_versions(spec_of()), CACHED_VERSIONS) == (3, 3)
    assert [problem.where for problem in room_problems(needed, ROOM)] == lacking


def test_a_version_is_kept_for_each_that_steps_may_still_draw_with() -> None:
    """While the learner publishes version k - 1, the step after may draw with k - 1 - staleness."""
    assert [kept_versions(behind) for behind in (0, 1, 2, 4)] == [2, 2, 3, 5]
    assert stored_versions(spec_of(schedule="async")) == 4
    assert stored_versions(spec_of(learner={"ema_decay": 0.9})) == 4, "an average of the weights is one more"


def test_what_is_lacking_is_told_with_figures_node_and_mend() -> None:
    (problem,) = room_problems(Needed(16 * GIB, 4), ROOM, "10.0.0.7")
    assert problem.what == (
        "node 10.0.0.7: '/dev/shm' has 40 GiB free, and up to 4 versions of the weights of 16 GiB each are kept "
        "there: 64 GiB"
    )
    assert "--shm-size" in problem.hint
    assert "ray.gpuGroups[].sharedMemory or ray.cpuGroup.sharedMemory: 72Gi or more" in problem.hint


@pytest.mark.parametrize("store", [1, GIB, 7 * GIB, 64 * GIB, 458 * GIB])
def test_the_charts_value_holds_the_weights_beside_rays_part(store: int) -> None:
    whole = int(chart_shared_memory(store).removesuffix("Gi")) * GIB
    rays = max(min(whole // 8, 8 << 30), 200_000_000)  # as rlhfless.objectStore in the chart's _helpers.tpl
    assert store <= whole - rays
    assert whole - GIB < store + max(min(store / 7, 8 * GIB), 200_000_000)  # and no more than that, in whole GiB


def test_a_quota_counts_and_what_the_run_has_there_already_does_not(quota: Callable[[int], Path]) -> None:
    folder = quota(1 << 20)
    room = room_at(str(folder / "not" / "there" / "yet"))
    assert (room.folder, room.store_bytes, room.in_memory) == (str(folder), 1 << 20, True)
    (folder / "run").mkdir()
    (folder / "run" / "version").write_bytes(bytes(1 << 18))
    assert room_at(str(folder)).store_bytes == (1 << 20) - (1 << 18)
    assert room_at(str(folder), [str(folder / "run")]).store_bytes == 1 << 20


def test_a_run_over_http_stays_within_the_versions_of_its_plan(quota: Callable[[int], Path]) -> None:
    """The learner's node, with an actor on it: store and cache in one file system that holds what is planned."""
    tensors = {f"w{number}": torch.zeros(1 << 18) for number in range(4)}
    size = sum(tensor.nbytes for tensor in tensors.values()) + (1 << 14)
    folder = quota(stored_versions(spec_of()) * size)
    with HttpStoreServer(folder / "store") as server:
        address = StoreAddress("http", str(folder / "cache"), server.token, home=str(folder / "store"))
        kept = []
        for step in range(5):
            tensors["w0"] += 1
            stored = server.put("run", 1, step, tensors)
            assert len(list(address.connect().read(stored.location))) == len(tensors)
            kept = [*kept[-1:], stored.version]
            for version in set(server.versions()) - set(kept):
                server.delete(version)


def test_a_version_for_which_there_is_no_room_is_told_and_leaves_nothing(quota: Callable[[int], Path]) -> None:
    store = FolderStore(quota(1 << 20) / "store")
    with pytest.raises(StoreFull, match=r"does not fit into .*store', which has 1 MiB free .*--shm-size"):
        store.put("run", 1, 1, {"w": torch.zeros(1 << 19)})
    assert list(store.folder.iterdir()) == []
