"""Download models from the Hugging Face hub into its cache, and verify their digests."""

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
_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_WEIGHTS = "*.safetensors"
# The same weights in other layouts, as of gpt-oss and Mistral, which would double the download.
_OTHER_LAYOUTS = ("*/*.safetensors", "consolidated*.safetensors")
_MAX_CHARACTERS = 200  # length limit of a revision
_SHA256, _GIT_SHA1 = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
_CHECKED = ".jaxspec-checked"  # folder for notes in a model's hub cache
_PART = 2**20  # bytes hashed at once


def resolve_folder(
    name_or_path: str | Path,
    progress: bool = False,
    *,
    weights: bool = True,
    revision: str | None = None,
) -> Path:
    """Return the checkpoint folder or GGUF file of a path or hub id, downloading it if needed.

    Args:
        name_or_path: A folder, a GGUF file, or a hub id.
        progress: Show the hub library's progress bars.
        weights: Also download the weights.
        revision: Branch, tag or commit of a hub id; None means main.

    Raises:
        FileNotFoundError: The path does not exist and is no hub id, or the hub can't be reached.
        ValueError: A revision was given for a path or is malformed, the path is not readable, or a
            file does not match the hub's digest.
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
    """Return the folder or GGUF file at a path; None if the path does not exist."""
    try:
        folder = Path(name_or_path).expanduser()
        if folder.is_dir() or is_gguf(folder):
            return folder
        is_there = os.path.lexists(folder)
    except (OSError, RuntimeError) as error:  # name too long, no permission, unknown user
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
    """Download missing files to the hub's cache, verify all, and return the folder.

    The hub library downloads files in parallel, resumes interrupted ones and keeps complete ones.
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
            wanted = {"allow_patterns": patterns, "ignore_patterns": list(_OTHER_LAYOUTS)}
            folder = Path(snapshot_download(name, revision=revision, **wanted))
    except Exception as error:  # network failures have many exception types
        named = shown(name) if revision is None else f"{shown(name)} at revision {revision!r}"
        raise FileNotFoundError(f"{_RULE}; {named} {_why_not(error)}") from error
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"{_RULE}; the hub's {shown(name)} has no config.json. If it holds GGUF files, which "
            "jaxspec does not download, download one and give its path."
        )
    patterns.append("*/*.jinja")  # the patterns of the download match in subfolders, too
    found = (path for pattern in patterns for path in folder.glob(pattern))
    _check_digests([path for path in found if not path.match(_OTHER_LAYOUTS[1])])
    return folder


def _is_revision(value: object) -> bool:
    """Return whether `value` is a valid name of a git branch, tag or commit."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _MAX_CHARACTERS
        and value.isprintable()
        and not set(value) & set(" ~^:?*[\\")
        and ".." not in value
        and value[0] not in "/-"
    )


def _why_not(error: Exception) -> str:
    """Explain the hub library's error to the user, with the remedy."""
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
    """Hide the hub library's progress bars inside the block; it has only a global switch."""
    from huggingface_hub import utils

    was_hidden = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if not was_hidden:
            utils.enable_progress_bars()


def _check_digests(paths: list[Path]) -> None:
    """Raise ValueError if files in the hub's cache do not match their digests.

    The cache stores each file under its digest and links to it from the model's folder, so no
    network is needed. Where the cache can't create links, nothing is checked.
    """
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
        list(pool.map(_check_digest, [path for path in paths if path.is_symlink()]))


def _check_digest(path: Path) -> None:
    """Raise ValueError unless the linked file has the digest in its name.

    Hashing takes about a second per 1 to 2 GB, so a success is noted in the cache. The note is
    valid while the file's size and modification time are unchanged.
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
    """Return an empty digest of the type that a file's `name` implies; None for other names.

    The hub names large files by their SHA-256, and others by git's SHA-1 of `size` and content.
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
    with contextlib.suppress(OSError):  # a read-only cache is checked each time
        note.parent.mkdir(exist_ok=True)
        note.write_text(state)
