"""Checkpoints to look at and to damage."""

import json
import shutil

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
