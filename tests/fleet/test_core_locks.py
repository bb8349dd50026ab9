"""Cores are locked by one file each: runs on a machine get different cores, and the kernel releases the locks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfless.fleet.reservations import core_folder, lock_cores
from rlhfless.functions.base import DeviceBinding
from rlhfless.util.folders import NotPrivate


def test_holders_get_different_cores(tmp_path: Path) -> None:
    first = lock_cores(2, {0, 1, 3}, tmp_path)
    assert [core for core, _ in first] == [0, 1]
    # One core is left; the second number is above all cores.
    second = lock_cores(2, {0, 1, 3}, tmp_path)
    assert [core for core, _ in second] == [3, 4]
    for _, file in first:
        os.close(file)
    assert [core for core, _ in lock_cores(1, {0, 1, 3}, tmp_path)] == [0]


def test_a_holder_that_is_killed_has_no_cores(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from rlhfless.fleet.reservations import lock_cores; "
        "held = lock_cores(1, {0}, Path(sys.argv[1])); print(held[0][0], flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "0\n"
        assert [core for core, _ in lock_cores(1, {0}, tmp_path)] == [1]
        holder.kill()
        holder.wait(timeout=30)
    assert [core for core, _ in lock_cores(1, {0}, tmp_path)] == [0]


def test_the_folder_is_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = core_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: 12345)
    folder.rename(tmp_path / "rlhfless-cores-12345")
    with pytest.raises(NotPrivate, match="remove it"):
        core_folder()


@pytest.mark.parametrize(("kind", "ids", "mask"), [("cuda", ("3", "5"), "3,5"), ("cpu", ("0",), "")])
def test_a_process_sees_its_own_gpus_and_a_cpu_function_none(
    kind: str, ids: tuple[str, ...], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    DeviceBinding(kind, ids, exclusive=False).bind()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask
