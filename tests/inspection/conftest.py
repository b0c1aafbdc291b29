"""Checkpoints to look at and to damage, and devices that say how much memory they have."""

import json
import shutil
from types import SimpleNamespace

import pytest
from harness import FIXTURES


@pytest.fixture
def copy(tmp_path):
    """A copy of a fixture's folder, some fields of its config.json changed (None: taken out)."""

    def make(name, **fields):
        folder = shutil.copytree(FIXTURES / name, tmp_path / name)
        config = json.loads((folder / "config.json").read_text()) | fields
        kept = {field: value for field, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        return folder

    return make


@pytest.fixture
def device_with(monkeypatch):
    """The default device becomes one with so many bytes for JAX."""

    def patch(limit):
        stats = {"bytes_limit": limit, "bytes_in_use": 0}
        device = SimpleNamespace(platform="cpu", device_kind="fake", memory_stats=lambda: stats)
        monkeypatch.setattr("jaxspec.device.default_device", lambda: device)

    return patch
