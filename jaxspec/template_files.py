"""Chat templates as they lie in a checkpoint's files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checks import shown
from jaxspec.files import fill, open_file, read_json
from jaxspec.gguf import is_gguf

MAX_TEMPLATE_BYTES = 2**20
"""The longest template that is read: some thirty times the largest published ones."""
OWN_FILE = "chat_template.jinja"


def read_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name, in the order of transformers: own file, settings, old file.

    A GGUF file has settings alone.
    """
    is_folder = not is_gguf(folder)
    own = _read_own(folder / OWN_FILE) if is_folder else None
    if own is not None:
        return {"default": own}
    path, source = folder / "tokenizer_config.json", settings.get("chat_template")
    path = path if is_folder else folder
    if source in (None, "", []) and is_folder:
        path = folder / "chat_template.json"
        try:
            source = read_json(path).get("chat_template")
        except FileNotFoundError:
            source = None
    if source in (None, "", []):
        return {}
    found = {}
    entries = source if isinstance(source, list) else [{"name": "default", "template": source}]
    for entry in entries:
        name, text = map(entry.get, ("name", "template")) if isinstance(entry, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ValueError(
                f"{path}: chat_template must be a text, or a list of objects with the texts name "
                f"and template, got {shown(source)}. Download it again."
            )
        if len(text) > MAX_TEMPLATE_BYTES:
            raise ValueError(too_long(path))
        found[name] = text
    return found


def _read_own(path: Path) -> str | None:
    """The text of a template's own file; None if there is none."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_TEMPLATE_BYTES:
            raise ValueError(too_long(path))
        content = bytearray(size)
        fill(file, memoryview(content))
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8 text, and byte {error.start} is not. Download it again."
        ) from error


def too_long(path: Path | str) -> str:
    """What is said of a template that is."""
    return (
        f"{path}: a chat template must have at most {MAX_TEMPLATE_BYTES:,} bytes, and this one "
        "has more. Download it again."
    )
