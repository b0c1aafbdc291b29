"""Folders of tokenizers that tests change."""

import json
import shutil
from pathlib import Path

BYTES = Path(__file__).parents[1] / "fixtures" / "tokenizer_bytes"


def folder_with(tmp_path, **files):
    """A copy of the byte tokenizer's tokenizer.json, with these files beside it."""
    shutil.copy(BYTES / "tokenizer.json", tmp_path)
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return tmp_path
