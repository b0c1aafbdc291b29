"""What a model is read from: the folder of a checkpoint, or a GGUF file."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jaxspec.gguf import is_gguf
from jaxspec.models import fields
from jaxspec.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from jaxspec.models.fields import Fields


def read_fields(source: Path) -> Fields:
    """The entries of the model's config.json, or of the metadata in its place.

    Raises:
        FileNotFoundError, ValueError: as `fields.read_fields`, or as that of `gguf.fields`.
    """
    if not is_gguf(source):
        return fields.read_fields(source)
    from jaxspec.models.gguf import fields as gguf_fields  # no other model needs it

    return gguf_fields.read_fields(source)


def open_checkpoint(source: Path) -> Checkpoint:
    """The model's tensors. A context manager, which closes the files.

    Raises:
        FileNotFoundError, ValueError: as `SafetensorsCheckpoint` and `GGUFCheckpoint`.
    """
    if not is_gguf(source):
        return SafetensorsCheckpoint(source)
    from jaxspec.models.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(source)


@contextlib.contextmanager
def naming(source: Path) -> Iterator[None]:
    """Errors inside, which name fields of config.json, name the GGUF file if it is `source`."""
    try:
        yield
    except ValueError as error:
        if not is_gguf(source):
            raise
        raise ValueError(f"{source}, whose metadata stands for a config.json: {error}") from error
