"""What tells a program from all others, in this process and in later ones.

A key holds all that tracing reads: the sources of this package, versions, devices, JAX's settings,
the arguments, and what the program's function closes over.
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
    """A digest of this package's code, as it lies on disk now."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


SOURCES = sources()  # at import: those that this process runs
_VERSIONS = {module.__name__: module.__version__ for module in (flax, jax, jaxlib, np)}
_COVERED = {"builtins", "jaxspec", *_VERSIONS}  # modules whose code sources and versions tell
_PLACES = (
    "jax_backend_target",
    "jax_default_device",
    "jax_platform_name",
    "jax_platforms",
    "jax_xla_backend",
)


def settings() -> dict[str, Any]:
    """JAX's settings in plain values, but for those that say where programs run."""
    return {
        name: value
        for name, value in _all_settings().items()
        if name not in _PLACES and (value is None or isinstance(value, bool | int | float | str))
    }


def _all_settings() -> dict[str, Any]:
    """As a `with` around this may have set them, but for where and when XLA's programs are kept."""
    return {
        name: getattr(jax.config, name, value)
        for name, value in jax.config.values.items()
        if "cache" not in name
    }


def described(leaf: Any) -> jax.ShapeDtypeStruct:
    """An array without its values and its place."""
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def words(x: Any) -> str | None:
    """`x` as the same text in every process; None: another process could not tell what it is."""
    try:
        return repr(_plain(x))
    except _UnknownError as unknown:
        _log.info("a program is not kept: another process would not know %r", *unknown.args)
        return None


def fingerprint(args: tuple[Any, ...], closed_over: Any) -> str | None:
    """As the key, but the same for a process with other devices; None: who knows."""
    leaves, tree = jax.tree.flatten(jax.tree.map(described, args))
    operands = tree, [(str(leaf.shape), str(leaf.dtype), leaf.weak_type) for leaf in leaves]
    mesh = repr(jax.sharding.get_abstract_mesh())
    text = words((mesh, SOURCES, _VERSIONS, operands, closed_over))
    return text and hashlib.sha256(text.encode()).hexdigest()


def key(args: tuple[Any, ...], closed_over: Any) -> str | None:
    """The same in every process that would trace the same program; None: who knows.

    `closed_over`: all that the function depends on, but for `args` and this package's sources.
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
    """Something whose meaning another process could not tell from its words."""


def _plain(x: Any) -> Any:
    """`x` in numbers, words and tuples: no address, and no more than a program depends on."""
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
        # What is not compared is no part of a program.
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.compare}
        return _plain((type(x), fields))
    if isinstance(x, Mapping):
        return "mapping", tuple((_plain(name), _plain(value)) for name, value in x.items())
    if isinstance(x, Sequence):
        return tuple(map(_plain, x))
    if isinstance(x, jax.tree_util.PyTreeDef):
        return "tree", _plain(x.node_data()), _plain(x.children())
    raise _UnknownError(x)
