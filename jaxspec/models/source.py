"""Sources of a model: a checkpoint folder or a GGUF file."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.checks import shown
from jaxspec.gguf import is_gguf
from jaxspec.models import fields
from jaxspec.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from jaxspec.models.fields import Fields
from jaxspec.models.mlx import MLXCheckpoint, is_mlx
from jaxspec.models.quantised.checkpoint import QuantisedCheckpoint
from jaxspec.models.quantised.scheme import Scheme

_FILES = ("config.json", "generation_config.json")


def read_fields(source: Path, overrides: Mapping[str, Any] | None = None) -> Fields:
    """Read the model's config.json, or the GGUF metadata in its place.

    `overrides` replaces entries of config.json.

    Raises:
        FileNotFoundError, ValueError: As `fields.read_fields` or `gguf.fields.read_fields`, or
            there are overrides for a GGUF file.
    """
    if not is_gguf(source):
        return fields.read_fields(source, overrides)
    if overrides:
        raise ValueError(
            f"hf_overrides replaces entries of a config.json, and {source} is a GGUF file, got "
            f"{shown(overrides)}. Leave it out, or load the checkpoint that the file was made from."
        )
    from jaxspec.models.gguf import fields as gguf_fields  # only for GGUF files

    return gguf_fields.read_fields(source)


def open_checkpoint(
    source: Path,
    scheme: Scheme | None = None,
    is_read: Callable[[str], bool] = lambda name: True,
    *,
    scales_kv: bool = False,
) -> Checkpoint:
    """Open the model's tensors. The result is a context manager that closes the files.

    Args:
        source: The folder or GGUF file.
        scheme: The formats of a folder of quantised weights.
        is_read: Returns whether the model reads a tensor, by its name; other ones of such a folder
            stay as stored.
        scales_kv: Read the scales of keys and values of such a folder.

    Raises:
        FileNotFoundError, ValueError: As `SafetensorsCheckpoint`, `QuantisedCheckpoint` or
            `GGUFCheckpoint`.
    """
    if not is_gguf(source):
        with contextlib.ExitStack() as opened:
            checkpoint = opened.enter_context(SafetensorsCheckpoint(source))
            checkpoint = dequantised(checkpoint, scheme, is_read, scales_kv=scales_kv)
            found = MLXCheckpoint(checkpoint) if is_mlx(checkpoint) else checkpoint
            opened.pop_all()
        return found
    from jaxspec.models.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(source)


def dequantised(
    checkpoint: Checkpoint,
    scheme: Scheme | None,
    is_read: Callable[[str], bool],
    *,
    scales_kv: bool,
) -> Checkpoint:
    """Return the checkpoint, with the names of 16 bits if there is a scheme.

    Arguments and errors are those of `open_checkpoint`.
    """
    if scheme is None:
        return checkpoint
    return QuantisedCheckpoint(checkpoint, scheme, is_read, scales_kv=scales_kv)


@contextlib.contextmanager
def giving_sizes(fields: Fields, source: Path) -> Iterator[None]:
    """Add the sizes in config.json to ValueErrors of tensors that do not match it."""
    try:
        yield
    except ValueError as error:
        if is_gguf(source):
            raise
        sizes = ", ".join(f"`{name}` {value}" for name, value in sorted(fields.sizes.items()))
        raise ValueError(f"{error} The config.json has {sizes}.") from error


@contextlib.contextmanager
def naming(source: Path) -> Iterator[None]:
    """Add the source's path to ValueErrors in the block, many of which begin with config.json."""
    try:
        yield
    except ValueError as error:
        words = str(error)
        if str(source) in words:
            raise
        if is_gguf(source):
            words = f"{source}, whose metadata stands for a config.json: {words}"
        elif source.is_dir() and words.startswith(_FILES):
            words = f"{source}/{words}"
        else:
            words = f"{source}: {words}"
        raise ValueError(words) from error
