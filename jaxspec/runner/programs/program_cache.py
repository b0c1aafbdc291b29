"""Keeps programs on disk as JAX writes them for XLA, so a later process neither traces nor lowers.

XLA's own cache, beside which they lie, spares XLA's work alone. The process that first runs a
program lowers it from the kept bytes, as every later one does: XLA then finds what it compiled of
them. So another process may trace it before; `place` says where `kept` looks for it.

A file is a digest of the rest; a line with the choices that `pallas.dispatch` made when the program
was traced; and what `jax.export` makes of it. Its name holds a key of all that tracing reads. The
digest tells damage alone: anybody can make one, so `own_files` says whose files are read.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
from jax import export

from jaxspec import device
from jaxspec.pallas import dispatch
from jaxspec.runner.programs.own_files import own_folder, read_own, write_own

_log = logging.getLogger(__name__)
_MAX_BYTES = 2**28  # of all files; a program of Qwen3.5-9B has 1.5 MB
_MAX_CALLS = 128  # that this process keeps, as many as `jitted_step`
_calls: dict[str, jax.stages.Wrapped] = {}  # by file name: engines of equal shape share them
_handed: dict[str, bytes] = {}  # by file name: what other processes traced, until it is called


def kept(
    file: Path | None, function: Any, args: tuple[Any, ...], results: Any, *, donated: int
) -> jax.stages.Wrapped:
    """What does to such `args` what the jitted `function` does, from disk if it is there.

    `file`: its `place`. `results`: the PyTreeDef of what it returns. `donated`: the number of its
    donated argument. It is `function` itself where it has no place, or JAX does not export it.
    """
    if file is None:
        return function
    if file.name not in _calls:
        try:
            call = _found(file, function, args, results, donated)
            if call is None:
                content = traced(function, args, platform())
                keep(file, content)
                call = _jitted(content, function, args, results, donated)
        except Exception as error:  # JAX exports less than it compiles: no `jax.debug.print`
            _log.info("a program is not kept: %r", error)
            return function
        if len(_calls) == _MAX_CALLS:
            del _calls[next(iter(_calls))]
        _calls[file.name] = call
    return _calls[file.name]


def place(function: Any, args: tuple[Any, ...], closed_over: Any) -> Path | None:
    """The file of a program; None: programs are not kept, or no key would tell it from others.

    `closed_over`: all that `function` depends on, but for `args` and this package's sources.
    """
    folder = _folder()
    key = _key(args, closed_over) if folder else None
    return folder / f"{function.__name__}-{key}" if folder and key else None


def is_there(file: Path) -> bool:
    """Whether `kept` would find the program, and need not trace it."""
    try:
        return file.name in _calls or _read(own_folder(file.parent) / file.name) is not None
    except (OSError, ValueError):
        return False


def hand_over(file: Path, content: bytes) -> None:
    """Have `kept` find what another process traced, whether or not it can be written."""
    _handed[file.name] = content
    keep(file, content)


def _found(
    file: Path, function: Any, args: tuple[Any, ...], results: Any, donated: int
) -> jax.stages.Wrapped | None:
    """The program that another process traced; None: there is none, or none that can be used."""
    content = _handed.pop(file.name, None) or _read(own_folder(file.parent) / file.name)
    if content is None:
        return None
    try:
        return _jitted(content, function, args, results, donated)
    except Exception as error:
        _log.info("a program is traced anew: %r", error)
        return None


def _folder() -> Path | None:
    """In JAX's folder; None: it keeps nothing, or not in a file system."""
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    if not folder or "://" in folder or not config.jax_enable_compilation_cache:
        return None
    return Path(folder) / "jaxspec-programs"


# What is kept.


def traced(function: Any, args: tuple[Any, ...], platform: str) -> bytes:
    """What is kept of the jitted `function`. Only the shapes and dtypes of `args` are looked at."""
    leaves, tree = jax.tree.flatten(jax.tree.map(described, args))

    def flat(*leaves: Any) -> list[Any]:
        # Not the jitted function: what JAX remembers of it, nobody would hear `dispatch` choose.
        return jax.tree.leaves(function.__wrapped__(*jax.tree.unflatten(tree, leaves)))

    with dispatch.choices() as chosen:
        exported = export.export(jax.jit(flat), platforms=[platform])(*leaves)
    return json.dumps(chosen).encode() + b"\n" + exported.serialize()


def described(leaf: Any) -> jax.ShapeDtypeStruct:
    """An array without its values and its place."""
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def platform() -> str:
    """The default device's, as lowering calls it: "cuda" is among several that are a "gpu"."""
    name = device.default_device().platform
    return export.default_export_platform() if name == jax.default_backend() else name


def _jitted(
    content: bytes, function: Any, args: tuple[Any, ...], results: Any, donated: int
) -> jax.stages.Wrapped:
    chosen, _, program = content.partition(b"\n")
    for op, what, level in json.loads(chosen):
        dispatch.note(op, what, level)
        if what == "kernel":
            # Which tracing it imports: it tells XLA, in the environment, where Mosaic's runtime is.
            import_module("jax.experimental.pallas.mosaic_gpu")
    exported = export.deserialize(bytearray(program))
    expected = [(leaf.shape, leaf.dtype) for leaf in map(described, jax.tree.leaves(args))]
    if [(kind.shape, kind.dtype) for kind in exported.in_avals] != expected:
        raise ValueError("it takes other arguments")

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(results, exported.call(*jax.tree.leaves(args)))

    call.__name__ = function.__name__  # which profiles and compilation logs show
    return jax.jit(call, donate_argnums=donated)


# Files: whatever is wrong with one, the program is traced.


def _read(path: Path) -> bytes | None:
    try:
        data = read_own(path)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            _log.info("a program is traced anew: %s", error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used last, removed last
    digest, content = data[:32], data[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def keep(path: Path, content: bytes) -> None:
    """Write what `traced` gave, in one piece.

    Not if the sources have changed meanwhile: who knows which were traced.
    """
    if _sources() != _SOURCES:
        return
    with contextlib.suppress(OSError, ValueError):
        path = own_folder(path.parent) / path.name
        write_own(path, hashlib.sha256(content).digest() + content)
        _make_room(path.parent)


def _make_room(folder: Path) -> None:
    left = _MAX_BYTES
    files = [(file.stat(), file) for file in folder.iterdir() if file.is_file()]
    for stat, file in sorted(files, key=lambda entry: entry[0].st_mtime, reverse=True):
        left -= stat.st_size
        if left < 0:
            file.unlink(missing_ok=True)


# The key.


def _sources() -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


_SOURCES = _sources()  # at import: those that this process runs
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
    """JAX's settings in plain values, as a `with` around this may have set them.

    Left out are those that say where programs run, and where and when XLA's are kept.
    """
    values = {name: getattr(jax.config, name, x) for name, x in jax.config.values.items()}
    return {
        name: value
        for name, value in values.items()
        if "cache" not in name
        and name not in _PLACES
        and (value is None or isinstance(value, bool | int | float | str))
    }


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
    text = words((mesh, _SOURCES, _VERSIONS, operands, closed_over))
    return text and hashlib.sha256(text.encode()).hexdigest()


def _key(args: tuple[Any, ...], closed_over: Any) -> str | None:
    """The same in every process that would trace the same program; None: who knows."""
    here = device.default_device()
    leaves, tree = jax.tree.flatten(args)
    config = {
        name: repr(getattr(jax.config, name, value))  # as a `with` around this may have set it
        for name, value in jax.config.values.items()
        if "cache" not in name  # those say where and when XLA's programs are kept
    }
    around = config, repr(jax.sharding.get_abstract_mesh()), _SOURCES, _VERSIONS
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
    if isinstance(x, np.dtype):
        return "dtype", x.name
    if isinstance(x, type | types.FunctionType):
        if str(x.__module__).partition(".")[0] not in _COVERED:
            raise _UnknownError(x)
        cells = [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
        defaults = [getattr(x, name, None) for name in ("__defaults__", "__kwdefaults__")]
        return x.__module__, x.__qualname__, _plain(cells), _plain(defaults)
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
