"""Downloads of a model's files, by the hub's own library, from a hub that fails on demand."""

import os
import threading

import fake_hub
import pytest

from jaxspec.models import resolve_folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's own library, asking a hub on this machine for a model of three shards."""
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.lower(), raising=False)
    shards = {f"model-{i}.safetensors": os.urandom(300_000) for i in range(3)}
    with fake_hub.serving({"config.json": b"{}", **shards}) as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
        yield hub


def downloads(hub, name):
    return [first for asked, first in hub.asked if asked == name]


def check_files(hub, folder):
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == hub.files


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub):
    cuts = iter([100_000])
    hub.cut = lambda name: next(cuts, None) if name == "model-1.safetensors" else None
    check_files(hub, resolve_folder(fake_hub.MODEL))
    assert downloads(hub, "model-1.safetensors") == [0, 100_000]


def test_a_download_that_failed_goes_on_with_the_files_that_it_lacks(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library's, before it tries again
    hub.cut = lambda name: 0 if name == "model-2.safetensors" else None
    with pytest.raises(FileNotFoundError, match="'some/model' is no folder here, and downloading"):
        resolve_folder(fake_hub.MODEL)
    hub.asked.clear()
    hub.cut = lambda name: None
    check_files(hub, resolve_folder(fake_hub.MODEL))
    assert "model-2.safetensors" in dict(hub.asked)
    assert len(hub.asked) < len(hub.files)


def test_shards_are_downloaded_side_by_side(hub):
    meeting = threading.Barrier(3)

    def meet(name):
        if name != "config.json":
            meeting.wait(20)

    hub.cut = meet
    check_files(hub, resolve_folder(fake_hub.MODEL))
    assert not meeting.broken
