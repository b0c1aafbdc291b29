"""Keeps programs on disk as JAX writes them for XLA, so a later process neither traces nor lowers.

XLA's own cache, beside which they lie, spares XLA's work alone. The process that first runs a
program lowers it from the kept bytes, as every later one does: XLA then finds what it compiled of
them. So another process may trace it before; `place` says where `kept` looks for it.

A file is a digest of the rest; a line with the choices that `pallas.dispatch` made when the program
was traced; and what `jax.export` makes of it. Its name holds the program's key (`program_key.py`).
The digest tells damage alone: anybody can make one, so `own_files` says whose files are read.
"""

import contextlib
import hashlib
import json
import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
from jax import export

from jaxspec import device
from jaxspec.pallas import dispatch
from jaxspec.runner.programs import program_key
from jaxspec.runner.programs.own_files import own_folder, read_own, write_own
from jaxspec.runner.programs.xla_options import XLA_OPTIONS

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
    key = program_key.key(args, closed_over) if folder else None
    if folder is None or key is None:
        return None
    anywhere = program_key.fingerprint(args, closed_over)
    return folder / f"{function.__name__}-{_of_name(anywhere)}-{key}"


def lacks(fingerprint: str) -> bool:
    """True if programs are kept, and none with this `program_key.fingerprint` is there.

    It needs no arrays, so it can be asked before weights are read.
    """
    folder = _folder()
    return folder is not None and not any(folder.glob(f"*-{_of_name(fingerprint)}-*"))


def _of_name(fingerprint: str | None) -> str:
    return str(fingerprint)[:16]


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
    leaves, tree = jax.tree.flatten(jax.tree.map(program_key.described, args))

    def flat(*leaves: Any) -> list[Any]:
        # Not the jitted function: what JAX remembers of it, nobody would hear `dispatch` choose.
        return jax.tree.leaves(function.__wrapped__(*jax.tree.unflatten(tree, leaves)))

    with dispatch.choices() as chosen:
        exported = export.export(jax.jit(flat), platforms=[platform])(*leaves)
    return json.dumps(chosen).encode() + b"\n" + exported.serialize()


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
    expected = [
        (leaf.shape, leaf.dtype) for leaf in map(program_key.described, jax.tree.leaves(args))
    ]
    if [(kind.shape, kind.dtype) for kind in exported.in_avals] != expected:
        raise ValueError("it takes other arguments")

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(results, exported.call(*jax.tree.leaves(args)))

    call.__name__ = function.__name__  # which profiles and compilation logs show
    return jax.jit(call, donate_argnums=donated, compiler_options=XLA_OPTIONS)


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
    if program_key.sources() != program_key.SOURCES:
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
