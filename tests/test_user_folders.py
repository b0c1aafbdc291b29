"""The user's folders, on Linux and macOS, with and without a home."""

from pathlib import Path

import pytest

from jaxspec.files import cache_folder, state_folder


def test_they_lie_where_the_system_keeps_such_files(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == Path("/home/me/.cache/jaxspec")
    assert state_folder() == Path("/home/me/.local/state/jaxspec")
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    assert state_folder() == Path("/elsewhere/jaxspec")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == Path("/home/me/Library/Caches/jaxspec")
    assert state_folder() == Path("/home/me/Library/Logs/jaxspec")


def test_an_account_without_a_home_has_none(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    with pytest.raises(RuntimeError, match="no absolute path: 'relative'"):
        cache_folder()
