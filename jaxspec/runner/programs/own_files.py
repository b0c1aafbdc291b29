"""Access to folders and files that no other user can write, for compiled programs.

A compiled program is code, so a user who can write the file controls the process; a digest inside
the file only detects damage. A file is used only if its owner and mode, and those of every folder
above it, rule out changes by other users: the rules of OpenSSH's `StrictModes`. Root is trusted.
Windows has no such modes, and nothing is checked there.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH  # other users can write
_OPEN = stat.S_IXGRP | stat.S_IXOTH  # other users can enter the folder
_NEVER_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def own_folder(folder: Path) -> Path:
    """Return the folder with links resolved, creating it for the user alone (0700) if missing.

    Raises:
        PermissionError: another user could add files; the message has a remedy.
        OSError: the folder can't be created.
        ValueError: its name contains a NUL.
    """
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            _make(part)
    real = folder.resolve(strict=True)
    _check(real, real.stat())
    for parent in real.parents:
        _check_parent(parent, parent.stat())
    return real


def check_files(folder: Path) -> None:
    """Check that no other user wrote or can write the contents of an own folder.

    The modes of files are ignored if other users can't enter their folder. Direct subfolders are
    checked, too; deeper ones are not used.

    Raises:
        PermissionError: there is such a file, or a link; the message has a remedy.
    """
    is_open = folder.stat().st_mode & _OPEN
    for entry, status in _entries(folder):
        _check_file(entry, status, mode_matters=bool(is_open))
        if stat.S_ISDIR(status.st_mode):
            is_inner_open = is_open and status.st_mode & _OPEN
            for inner, its_status in _entries(entry):
                _check_file(inner, its_status, mode_matters=bool(is_inner_open))


def read_own(file: Path) -> bytes:
    """Return the content of a file in an own folder.

    Raises:
        PermissionError: another user wrote the file, or can write it.
        OSError: the file does not exist, is a link or not a regular file, or can't be read.
    """
    # Check the open file, not its name, which may refer to another file by then.
    with open(file, "rb", opener=lambda name, flags: os.open(name, flags | _NEVER_WAIT)) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{_quoted(file)} is no regular file.")
        _check_file(file, status)
        return opened.read()


def write_own(file: Path, content: bytes) -> None:
    """Write a file in an own folder atomically, for the user alone (0600).

    Raises:
        OSError: the file can't be written.
    """
    handle, name = tempfile.mkstemp(prefix=file.name + ".", dir=file.parent)
    new = Path(name)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():  # another process may have created it meanwhile
            raise


def _entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _check(folder: Path, status: os.stat_result) -> None:
    if _is_of_another(status):
        raise PermissionError(
            f"{_quoted(folder)} belongs to another user ({status.st_uid}), who could put programs "
            "there. Delete it if you may."
        )
    if _is_writable(status):
        raise PermissionError(
            f"Other users can write {_quoted(folder)} (mode {stat.S_IMODE(status.st_mode):o}) and "
            "put programs there. Delete it, or run `chmod -R go-w` on it if you trust what it "
            "holds."
        )


def _check_parent(folder: Path, status: os.stat_result) -> None:
    if _is_of_another(status):
        raise PermissionError(
            f"{_quoted(folder)}, above the folder of compiled programs, belongs to another user "
            f"({status.st_uid}), who could replace what is in it."
        )
    # In a sticky folder, such as /tmp, users can't rename or delete the files of others.
    if _is_writable(status) and not status.st_mode & stat.S_ISVTX:
        raise PermissionError(
            f"Other users can write {_quoted(folder)} (mode {stat.S_IMODE(status.st_mode):o}), "
            "above the folder of compiled programs, and replace what is in it. Run `chmod go-w` "
            "on it."
        )


def _check_file(file: Path, status: os.stat_result, *, mode_matters: bool = True) -> None:
    if stat.S_ISLNK(status.st_mode):
        why = "is a link"
    elif _is_of_another(status):
        why = f"belongs to another user ({status.st_uid})"
    elif mode_matters and _is_writable(status):
        why = f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise PermissionError(f"{_quoted(file)} {why}, so its program may be anybody's. Delete it.")


def _is_of_another(status: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and status.st_uid not in (0, os.geteuid())


def _is_writable(status: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and bool(status.st_mode & _WRITABLE)


def _quoted(path: Path) -> str:
    return f"{str(path)!r:.300}"
