"""Sources of a model: a checkpoint folder or a GGUF file."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxspec.gguf import is_gguf
from jaxspec.models import fields
from jaxspec.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from jaxspec.models.fields import Fields


def read_fields(source: Path) -> Fields:
    """Read the model's config.json, or the GGUF metadata in its place.

    Raises:
        FileNotFoundError, ValueError: As `fields.read_fields` or `gguf.fields.read_fields`.
    """
    if not is_gguf(source):
        return fields.read_fields(source)
    from jaxspec.models.gguf import fields as gguf_fields  # only for GGUF files

    return gguf_fields.read_fields(source)


def open_checkpoint(source: Path) -> Checkpoint:
    """Open the model's tensors. The result is a context manager that closes the files.

    Raises:
        FileNotFoundError, ValueError: As `SafetensorsCheckpoint` or `GGUFCheckpoint`.
    """
    if not is_gguf(source):
        return SafetensorsCheckpoint(source)
    from jaxspec.models.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(source)


@contextlib.contextmanager
def naming(source: Path) -> Iterator[None]:
    """Add the GGUF file's name to ValueErrors in the block, which refer to config.json."""
    try:
        yield
    except ValueError as error:
        if not is_gguf(source):
            raise
        raise ValueError(f"{source}, whose metadata stands for a config.json: {error}") from error
