"""A folder is for its user alone, or it is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhfless.util.folders import NotPrivate, private, require_safe_place


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o500])
def test_a_folder_that_is_there_is_corrected(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(mode)
    private(folder)
    assert folder.stat().st_mode & 0o7777 == 0o700


def test_a_new_folder_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private(tmp_path / "new")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o7777 == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(private(tmp_path / "theirs"))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    for name in ("theirs", "link"):
        with pytest.raises(NotPrivate, match=f"{name} cannot be used: .* belongs to another user"):
            private(tmp_path / name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link to another user")
def test_the_link_of_another_user_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(private(tmp_path / "mine"))
    private(tmp_path / "link")
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    with pytest.raises(NotPrivate, match=r"link cannot be used: it belongs to another user \(uid 12345\)"):
        private(tmp_path / "link")


@pytest.mark.parametrize(("mode", "safe"), [(0o755, True), (0o1777, True), (0o777, False)])
def test_a_folder_that_others_could_replace_is_refused(mode: int, safe: bool, tmp_path: Path) -> None:
    above = private(tmp_path / "above")
    above.chmod(mode)
    (tmp_path / "link").symlink_to(above)
    for folder in (above / "data", above / "deep" / "data", tmp_path / "link" / "data"):
        folder.mkdir(parents=True, exist_ok=True)
        if safe:
            require_safe_place(folder)
        else:
            with pytest.raises(NotPrivate, match=rf"any user can replace files in {above} \(mode 0777\); `chmod o-w"):
                require_safe_place(folder)
