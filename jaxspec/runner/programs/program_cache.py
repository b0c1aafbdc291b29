"""Program cache: exported programs on disk, so that later processes neither trace nor lower them.

It complements JAX's compilation cache, which only saves XLA's work, and is in the same folder. All
processes, including the first, lower a program from the exported bytes, so that the compilation
cache has the result for all of them. So another process may trace a program in advance.

A file has a SHA-256 digest of the rest; a line with the choices of `pallas.dispatch` during
tracing; and the output of `jax.export`. Its name contains the program's key (`program_key.py`). The
digest only detects damage; `own_files` rejects files that another user could have written.
"""

import contextlib
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
from jax import export

from jaxspec import device
from jaxspec.pallas import dispatch
from jaxspec.runner.programs import program_key
from jaxspec.runner.programs.own_files import own_folder, read_own, write_own

_log = logging.getLogger(__name__)
_MAX_BYTES = 2**28  # limit for all files; a program of Qwen3.5-9B has 1.5 MB
# By file name: open engines with equal programs share them, and free them when they are closed.
_calls = weakref.WeakValueDictionary[str, jax.stages.Wrapped]()
_handed: dict[str, bytes] = {}  # unused programs from other processes, by file name


def kept(
    file: Path | None,
    function: Any,
    args: tuple[Any, ...],
    results: Any,
    options: Mapping[str, Any],
) -> jax.stages.Wrapped:
    """Return a function equivalent to `function`, from the cache if possible.

    Args:
        file: File of the program, from `place`.
        function: The jitted function, traced and cached if the file does not exist.
        args: Arguments, of which only shapes, dtypes and placement are used.
        results: PyTreeDef of the function's results.
        options: Keyword arguments of `jax.jit` with which `function` was jitted.

    Returns:
        The function, which is `function` itself if `file` is None or the export fails.
    """
    if file is None:
        return function
    call = _calls.get(file.name)
    if call is None:
        try:
            call = _found(file, function, args, results, options)
            if call is None:
                content = traced(function, args, platform())
                keep(file, content)
                call = _jitted(content, function, args, results, options)
        except Exception as error:  # JAX can't export everything, such as `jax.debug.print`
            _log.info("a program is not kept: %r", error)
            return function
        _calls[file.name] = call
    return call


def place(function: Any, args: tuple[Any, ...], closed_over: Any) -> Path | None:
    """Return the file of a program, or None without a cache folder or a key.

    `closed_over` is everything that `function` depends on, besides `args` and this package's
    sources.
    """
    folder = _folder()
    key = program_key.key(args, closed_over) if folder else None
    if folder is None or key is None:
        return None
    anywhere = program_key.fingerprint(args, closed_over)
    return folder / f"{function.__name__}-{_of_name(anywhere)}-{key}"


def lacks(fingerprint: str) -> bool:
    """Return True if the cache is enabled and has no program with this `program_key.fingerprint`.

    It needs no arrays, so it works before the weights are read.
    """
    folder = _folder()
    return folder is not None and not any(folder.glob(f"*-{_of_name(fingerprint)}-*"))


def _of_name(fingerprint: str | None) -> str:
    return str(fingerprint)[:16]


def is_there(file: Path) -> bool:
    """Return whether `kept` would find the program without tracing it."""
    try:
        return file.name in _calls or _read(own_folder(file.parent) / file.name) is not None
    except (OSError, ValueError):
        return False


def hand_over(file: Path, content: bytes) -> None:
    """Store a program traced by another process for `kept`, in memory and, if possible, on disk."""
    _handed[file.name] = content
    keep(file, content)


def _found(
    file: Path, function: Any, args: tuple[Any, ...], results: Any, options: Mapping[str, Any]
) -> jax.stages.Wrapped | None:
    """Load a program from another process or the cache; None if there is none that works."""
    content = _handed.pop(file.name, None) or _read(own_folder(file.parent) / file.name)
    if content is None:
        return None
    try:
        return _jitted(content, function, args, results, options)
    except Exception as error:
        _log.info("a program is traced anew: %r", error)
        return None


def _folder() -> Path | None:
    """Return the folder inside JAX's cache folder; None if that is disabled or not local."""
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    if not folder or "://" in folder or not config.jax_enable_compilation_cache:
        return None
    return Path(folder) / "jaxspec-programs"


# Content of files


def traced(function: Any, args: tuple[Any, ...], platform: str) -> bytes:
    """Trace and export the jitted `function`, and return the file's content without the digest.

    Only the shapes and dtypes of `args` are used.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(program_key.described, args))

    def flat(*leaves: Any) -> list[Any]:
        # Not the jitted function: if JAX has its trace cached, `dispatch` records no choices.
        return jax.tree.leaves(function.__wrapped__(*jax.tree.unflatten(tree, leaves)))

    with dispatch.choices() as chosen:
        exported = export.export(jax.jit(flat), platforms=[platform])(*leaves)
    return json.dumps(chosen).encode() + b"\n" + exported.serialize()


def platform() -> str:
    """Return the default device's platform name for lowering, such as "cuda" for a "gpu"."""
    name = device.default_device().platform
    return export.default_export_platform() if name == jax.default_backend() else name


def _jitted(
    content: bytes, function: Any, args: tuple[Any, ...], results: Any, options: Mapping[str, Any]
) -> jax.stages.Wrapped:
    chosen, _, program = content.partition(b"\n")
    for op, what, level in json.loads(chosen):
        dispatch.note(op, what, level)
        if what == "kernel":
            # Tracing a kernel imports this module, which sets the path of Mosaic's runtime in the
            # environment for XLA.
            import_module("jax.experimental.pallas.mosaic_gpu")
    exported = export.deserialize(bytearray(program))
    expected = [
        (leaf.shape, leaf.dtype) for leaf in map(program_key.described, jax.tree.leaves(args))
    ]
    if [(kind.shape, kind.dtype) for kind in exported.in_avals] != expected:
        raise ValueError("it takes other arguments")

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(results, exported.call(*jax.tree.leaves(args)))

    call.__name__ = function.__name__  # for profiles and compilation logs
    return jax.jit(call, **options)


# Files; after any error the program is traced again


def _read(path: Path) -> bytes | None:
    try:
        data = read_own(path)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            _log.info("a program is traced anew: %s", error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the least recently used files are deleted first
    digest, content = data[:32], data[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def keep(path: Path, content: bytes) -> None:
    """Write the result of `traced` atomically.

    Nothing is written if the sources have changed since import, because they may have been traced.
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
