"""Keys of programs in the program cache, the same in every process.

A key is a hash of all inputs of tracing: the sources of this package, versions, devices, JAX's
settings, the arguments, and the constants that the program's function closes over.
"""

import dataclasses
import enum
import functools
import hashlib
import logging
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np

from jaxspec import device

_log = logging.getLogger(__name__)


def sources() -> str:
    """Return a digest of this package's source files on disk."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


SOURCES = sources()  # at import: the sources that this process runs
_VERSIONS = {module.__name__: module.__version__ for module in (flax, jax, jaxlib, np)}
_COVERED = {"builtins", "jaxspec", *_VERSIONS}  # modules identified by sources and versions
_PLACES = (
    "jax_backend_target",
    "jax_default_device",
    "jax_platform_name",
    "jax_platforms",
    "jax_xla_backend",
)


def settings() -> dict[str, Any]:
    """Return JAX's settings with plain values, except those that select the device."""
    return {
        name: value
        for name, value in _all_settings().items()
        if name not in _PLACES and (value is None or isinstance(value, bool | int | float | str))
    }


def _all_settings() -> dict[str, Any]:
    """Return JAX's settings in the current context, except those of the compilation cache."""
    return {
        name: getattr(jax.config, name, value)
        for name, value in jax.config.values.items()
        if "cache" not in name
    }


def described(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and weak type of an array."""
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def words(x: Any) -> str | None:
    """Return a text of `x` that is equal in all processes, or None if there is none."""
    try:
        return repr(_plain(x))
    except _UnknownError as unknown:
        _log.info("a program is not kept: another process would not know %r", *unknown.args)
        return None


def fingerprint(args: tuple[Any, ...], closed_over: Any) -> str | None:
    """Return a hash like `key`, but independent of devices; None if `words` has no text."""
    leaves, tree = jax.tree.flatten(jax.tree.map(described, args))
    operands = tree, [(str(leaf.shape), str(leaf.dtype), leaf.weak_type) for leaf in leaves]
    mesh = repr(jax.sharding.get_abstract_mesh())
    text = words((mesh, SOURCES, _VERSIONS, operands, closed_over))
    return text and hashlib.sha256(text.encode()).hexdigest()


def key(args: tuple[Any, ...], closed_over: Any) -> str | None:
    """Return a hash that is equal in all processes that would trace the same program.

    Args:
        args: Arguments of the program.
        closed_over: Everything else that its function depends on, besides this package's sources.

    Returns:
        The hash, or None if `words` has no text for the inputs.
    """
    here = device.default_device()
    leaves, tree = jax.tree.flatten(args)
    config = {name: repr(value) for name, value in _all_settings().items()}
    around = config, repr(jax.sharding.get_abstract_mesh()), SOURCES, _VERSIONS
    runtime = here.platform, here.device_kind, here.client.platform_version
    operands = tree, [_operand(leaf) for leaf in leaves]
    text = words((around, runtime, operands, closed_over))
    return text and hashlib.sha256(text.encode()).hexdigest()[:32]


def _operand(leaf: Any) -> tuple[str, ...]:
    kind = jax.typeof(leaf)
    where = getattr(leaf, "sharding", None), getattr(leaf, "committed", None)
    return (*map(str, (kind.shape, kind.dtype, kind.weak_type)), *map(repr, where))


class _UnknownError(Exception):
    """A value that has no text with the same meaning in all processes."""


def _plain(x: Any) -> Any:
    """Convert `x` to numbers, strings and tuples, without addresses and unused parts."""
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, enum.Enum):
        return _plain(type(x)), x.name
    if isinstance(x, np.dtype):
        return "dtype", x.name
    if isinstance(x, type | types.FunctionType):
        if str(x.__module__).partition(".")[0] not in _COVERED:
            raise _UnknownError(x)
        cells = [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
        defaults = [getattr(x, name, None) for name in ("__defaults__", "__kwdefaults__")]
        return x.__module__, x.__qualname__, _plain(cells), _plain(defaults)
    if isinstance(x, functools.partial):
        return "partial", _plain(x.func), _plain(x.args), _plain(x.keywords)
    if dataclasses.is_dataclass(x):
        # Programs do not depend on fields with compare=False.
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.compare}
        return _plain((type(x), fields))
    if isinstance(x, Mapping):
        return "mapping", tuple((_plain(name), _plain(value)) for name, value in x.items())
    if isinstance(x, Sequence):
        return tuple(map(_plain, x))
    if isinstance(x, jax.tree_util.PyTreeDef):
        return "tree", _plain(x.node_data()), _plain(x.children())
    raise _UnknownError(x)
