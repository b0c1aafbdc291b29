"""Models from the Hugging Face hub: downloaded into its cache, and checked against its digests."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxspec.checks import shown
from jaxspec.files import fill, open_file
from jaxspec.gguf import SUFFIX, is_gguf

_RULE = "A model must be a folder, a GGUF file or a Hugging Face hub id such as Qwen/Qwen3.5-0.8B"
_TEXT_FILES = ("*.json", "*.jinja", "*.txt")
_WEIGHTS = "*.safetensors"
_MAX_CHARACTERS = 200  # of a revision
_SHA256, _GIT_SHA1 = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
_CHECKED = ".jaxspec-checked"  # a folder in the hub's cache of a model
_PART = 2**20  # bytes that are digested at once


def resolve_folder(
    name_or_path: str | Path,
    progress: bool = False,
    *,
    weights: bool = True,
    revision: str | None = None,
) -> Path:
    """The checkpoint: a folder or a GGUF file itself, or that of a hub id, downloaded if need be.

    Without `progress` the hub's own bars stay hidden; without `weights` those are not downloaded.
    `revision`: the branch, tag or commit to take of a hub id; None is main.

    Raises:
        FileNotFoundError: it is neither, or the hub cannot be reached.
        ValueError: a folder with a revision, or one that may not be read; a malformed revision; a
            file that is not what the hub says.
    """
    if not isinstance(name_or_path, str | Path) or name_or_path == "":
        raise ValueError(f"{_RULE}, got {shown(name_or_path)}.")
    folder = _folder(name_or_path)
    if folder is None:
        return _download(str(name_or_path), progress, weights, revision)
    kind, mode = ("file", os.R_OK) if is_gguf(folder) else ("folder", os.R_OK | os.X_OK)
    if revision is not None:
        raise ValueError(
            f"revision chooses among the versions of a hub id, and {folder} is a {kind}. Leave "
            "revision out, or give the hub id."
        )
    if not os.access(folder, mode):
        raise ValueError(f"{_RULE}; the {kind} {folder} may not be read. Check its permissions.")
    return folder


def _folder(name_or_path: str | Path) -> Path | None:
    """The folder or the GGUF file of that path; None where nothing is there."""
    try:
        folder = Path(name_or_path).expanduser()
        if folder.is_dir() or is_gguf(folder):
            return folder
        is_there = os.path.lexists(folder)
    except (OSError, RuntimeError) as error:  # a name too long, a way barred, no such user
        reason = getattr(error, "strerror", error)
        raise FileNotFoundError(
            f"{_RULE}; {shown(str(name_or_path))} can't be looked up: {reason}. Check the path."
        ) from error
    if not is_there:
        return None
    kind = "a link to nothing" if not folder.exists() else "a file"
    raise FileNotFoundError(
        f"{_RULE}; {folder} is {kind}. Give the folder that "
        f"holds it, or a file whose name ends in {SUFFIX}."
    )


def _download(name: str, progress: bool, weights: bool, revision: str | None) -> Path:
    """The folder in the hub's cache, with what was not there downloaded, and all of it checked.

    The hub's library downloads several files at once, takes up a connection that breaks where it
    broke, and keeps every file that came whole.
    """
    if revision is not None and not _is_revision(revision):
        raise ValueError(
            "revision must be the name of a branch or tag or the id of a commit, such as 'main', "
            f"got {shown(revision)}."
        )
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    patterns = [*[_WEIGHTS] * weights, *_TEXT_FILES]
    try:
        with contextlib.nullcontext() if progress else _no_hub_bars():
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # networks fail with exceptions of many kinds
        named = shown(name) if revision is None else f"{shown(name)} at revision {revision!r}"
        raise FileNotFoundError(f"{_RULE}; {named} {_why_not(error)}") from error
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"{_RULE}; the hub's {shown(name)} has no config.json. If it holds GGUF files, which "
            "jaxspec does not download, download one and give its path."
        )
    _check_digests([path for pattern in patterns for path in folder.glob(pattern)])
    return folder


def _is_revision(value: object) -> bool:
    """Whether git could have a branch, tag or commit of that name."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _MAX_CHARACTERS
        and value.isprintable()
        and not set(value) & set(" ~^:?*[\\")
        and ".." not in value
        and value[0] not in "/-"
    )


def _why_not(error: Exception) -> str:
    """What the hub's error means to the user who named the model, and the way out."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "is none of these: there is no such folder or file. Check the path."
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            "is no folder here, and the hub's model has no such revision. Look up its branches, "
            "tags and commits on its page, or leave revision out."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "is no folder here, and the hub has no such model, or not for you. Check the name; if "
            "the model is private or gated, log in with `hf auth login`."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "is no folder here, was not downloaded before, and the hub can't be reached. Check the "
            "name and the network, or download the model elsewhere and give its folder."
        )
    reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".: ")
    return (
        f"is no folder here, and downloading it failed ({reason:.300}). Try again, which keeps the "
        "files that came whole, or download the model another way and give its folder."
    )


@contextlib.contextmanager
def _no_hub_bars() -> Iterator[None]:
    """Hide the hub's bars inside; the hub only has one switch for all of them."""
    from huggingface_hub import utils

    was_hidden = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if not was_hidden:
            utils.enable_progress_bars()


def _check_digests(paths: list[Path]) -> None:
    """Refuse files of the hub's cache whose content is not what the hub says it is.

    The cache keeps a file under its digest as the hub gave it, and links to it from the model's
    folder. So this needs no network. Where the cache can't make links nothing is known.
    """
    with ThreadPoolExecutor(max_workers=4) as pool:  # digests leave other threads running
        list(pool.map(_check_digest, [path for path in paths if path.is_symlink()]))


def _check_digest(path: Path) -> None:
    """ValueError unless the file that `path` links to has the digest that is its name.

    A digest takes a second for each GB or two, so it is noted in the cache once it was right; the
    note holds as long as the file's size and time of change do.
    """
    blob = Path(os.path.normpath(path.parent / os.readlink(path)))
    with open_file(blob) as file:
        status = os.fstat(file.fileno())
        digest = _digest_of(blob.name, status.st_size)
        if digest is None:
            return
        state = f"{status.st_size} {status.st_mtime_ns}"
        note = blob.parent.parent / _CHECKED / blob.name
        if _read_note(note) == state:
            return
        part = bytearray(_PART)
        for start in range(0, status.st_size, _PART):
            view = memoryview(part)[: min(_PART, status.st_size - start)]
            fill(file, view, start)
            digest.update(view)
    if digest.hexdigest() != blob.name:
        raise ValueError(
            f"{path} must be what the hub holds, and is not: its digest is {digest.hexdigest()} in "
            f"place of {blob.name} ({status.st_size:,} bytes). It was cut short or changed. "
            f"Delete {blob}, and load the model again to download it."
        )
    _write_note(note, state)


def _digest_of(name: str, size: int):
    """The empty digest for a file that the hub gave this `name`; None for another kind of name.

    The hub gives large files their SHA-256, and others the SHA-1 of their `size` and content that
    git has.
    """
    if _SHA256.fullmatch(name):
        return hashlib.sha256()
    if _GIT_SHA1.fullmatch(name):
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return None


def _read_note(note: Path) -> str | None:
    try:
        return note.read_text()
    except (OSError, ValueError):
        return None


def _write_note(note: Path, state: str) -> None:
    with contextlib.suppress(OSError):  # a cache that others own is checked each time
        note.parent.mkdir(exist_ok=True)
        note.write_text(state)
