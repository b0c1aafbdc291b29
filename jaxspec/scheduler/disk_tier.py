"""DiskTier: pieces that the host's memory has no room for, as files in a folder.

A thread of its own writes, reads and deletes them, one after the other, and the scheduler never
waits for it while anything runs. What goes wrong there costs no more than what is kept. A piece
that can't be written is dropped. One that can't be read, or is not what it says, is forgotten and
its file deleted. The files outlive the engine, and the next one of the same model finds them.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.handover.container import Container
from jaxspec.piece_plan import Piece
from jaxspec.scheduler.piece_index import Key, PieceIndex

KIND = "piece of kept prefixes"
MAX_WAITING = 8  # pieces that wait to be written; beyond that they are dropped
_NAME = re.compile(r"([0-9a-f]{32})-[0-9a-f]{32}\.piece")
_MAX_KEYS = 2**12
_log = logging.getLogger(__name__)


class _File(NamedTuple):
    """A file as the thread found or wrote it."""

    name: str
    num_bytes: int
    is_state: bool
    keys: tuple[Key, ...]


class DiskTier:
    """Files by their last use, in at most `max_bytes`; others' files in the folder are deleted.

    `arrays`: shape and dtype of each array of a piece, by whether it is one of a state.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        fingerprint: str,
        page_size: int,
        arrays: Mapping[bool, Sequence[tuple[tuple[int, ...], np.dtype]]],
    ):
        """Look for what is in `folder`; it is found once that is done.

        `fingerprint`: of the model and its weights. Files are told by it, the page size and the
        `arrays`, so that none of another model, dtype or size of pieces is used.
        """
        self._folder, self.max_bytes, self._arrays = folder, max_bytes, arrays
        own = repr((fingerprint, page_size, {kind: str(like) for kind, like in arrays.items()}))
        self._own = hashlib.blake2b(own.encode(), digest_size=16).hexdigest()
        self._page_size = page_size
        self._thread = ThreadPoolExecutor(1, "jaxspec-prefixes")
        self._jobs: list[tuple[Future[Any], Callable[[Any], None]]] = []  # in order
        self._is_told = False
        self.num_written = self.num_read = self.num_skipped = self.num_failed = 0
        self.num_evicted_files = 0
        self._forget()
        self._do(lambda: _scan(folder, self._own, page_size), self._found)

    def _forget(self) -> None:
        self.index = PieceIndex()
        self._files: dict[Piece, _File] = {}
        self._loading: dict[Piece, Future[Any]] = {}
        self._writing: set[str] = set()
        self._unread: list[tuple[str, Piece, tuple[Key, ...]]] = []  # of those: not filled yet
        self.num_bytes = 0

    def clear(self) -> None:
        """Forget everything, and delete the files."""
        self._jobs = [(job, lambda _: None) for job, _ in self._jobs]
        self._forget()
        self._do(lambda: _delete_all(self._folder, self._own))

    def close(self) -> None:
        """Wait until all is written; nothing may be asked any more."""
        self._thread.shutdown()
        self.poll()

    def figures(self) -> dict[str, int]:
        """Its counts, for people."""
        return {
            "num_files": len(self._files),
            "num_bytes": self.num_bytes,
            "max_bytes": self.max_bytes,
            "num_written": self.num_written,
            "num_read": self.num_read,
            "num_evicted_files": self.num_evicted_files,
            "num_skipped": self.num_skipped,
            "num_failed": self.num_failed,
        }

    def put(self, piece: Piece, keys: Sequence[Key]) -> None:
        """Write a piece that leaves the host's memory, unless it is there, or too many wait."""
        self.poll()
        name = self._name(piece, keys)
        if name in self._writing or self._has(piece, keys):
            return
        if len(self._writing) >= MAX_WAITING:
            self.num_skipped += 1
            return
        self._writing.add(name)
        if piece.arrays is None:  # the plan that fills it has yet to be dispatched
            self._unread.append((name, piece, tuple(keys)))
        else:
            self._write(name, piece, tuple(keys))

    def forget_unread(self) -> None:
        """The plans that would have filled pieces are not dispatched any more."""
        self._writing -= {name for name, *_ in self._unread}
        self._unread.clear()

    def _write(self, name: str, piece: Piece, keys: tuple[Key, ...]) -> None:
        def written(num_bytes: int) -> None:
            self.num_written += 1
            self._add(_File(name, num_bytes, piece.is_state, keys))

        self._do(lambda: _write(self._folder / name, piece, keys), written, name)

    def want(self, pieces: Iterable[Piece]) -> None:
        """Read those of the pieces that are on disk alone; what was wanted before goes again."""
        wanted = [piece for piece in pieces if piece in self._files]
        for piece in [each for each in self._loading if each not in wanted]:
            del self._loading[piece]
            self._renew(piece)
        for piece in wanted:
            if piece not in self._loading:
                self.index.touch([piece])
                file = self._files[piece]
                self._loading[piece] = self._do(
                    lambda file=file: _read(self._folder / file.name, self._arrays[file.is_state]),
                    lambda arrays, piece=piece: self._loaded(piece, arrays),
                    piece=piece,
                )

    def is_loading(self, piece: Piece) -> bool:
        """Whether a piece that is wanted is not there yet."""
        return piece in self._loading and piece.arrays is None

    def wait(self, seconds: float) -> None:
        """Wait for all that is wanted, but no longer: what is not there by then is forgotten."""
        wait(self._loading.values(), seconds)
        self.poll()
        for piece in [each for each in self._loading if each.arrays is None]:
            self._fail(TimeoutError(f"a file took more than {seconds:.0f} s"))
            self._drop(piece)

    def poll(self) -> None:
        """Take note of what the thread has done. What was found before may be gone then."""
        while self._jobs and self._jobs[0][0].done():
            job, note = self._jobs.pop(0)
            note(job)
        for each in [each for each in self._unread if each[1].arrays is not None]:
            self._unread.remove(each)
            self._write(*each)

    # How. These run in the scheduler's thread.

    def _do(
        self,
        act: Callable[[], Any],
        note: Callable[[Any], None] = lambda _: None,
        name: str = "",
        piece: Piece | None = None,
    ) -> Future[Any]:
        """Have the thread `act`, and take note of the result; or that `name` or `piece` failed."""

        def done(job: Future[Any]) -> None:
            self._writing.discard(name)
            error = job.exception()
            if error is None:
                note(job.result())
                return
            self._fail(error)
            if piece is not None:
                self._drop(piece)

        job = self._thread.submit(act)
        self._jobs.append((job, done))
        return job

    def _fail(self, error: BaseException) -> None:
        self.num_failed += 1
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "kept prefixes: a file in %s could not be used: %s. Generation goes on; "
                "LLM.metrics()['prefix_cache']['host']['disk'] counts what fails.",
                self._folder,
                error,
            )

    def _found(self, files: list[_File]) -> None:
        for file in files:
            if not self._has(Piece(is_state=file.is_state), file.keys):
                self._add(file)

    def _add(self, file: _File) -> None:
        piece = Piece(is_state=file.is_state)
        self.index.add(piece, file.keys)
        self._files[piece] = file
        self.num_bytes += file.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_evicted_files += 1
            self._drop(next(iter(self.index)))

    def _drop(self, piece: Piece) -> None:
        self._loading.pop(piece, None)
        if piece in self._files:
            self.index.forget(piece)
            file = self._files.pop(piece)
            self.num_bytes -= file.num_bytes
            self._do(lambda: (self._folder / file.name).unlink(missing_ok=True))

    def _loaded(self, piece: Piece, arrays: tuple[np.ndarray, ...]) -> None:
        self.num_read += 1
        if piece in self._loading:
            piece.arrays = arrays

    def _renew(self, piece: Piece) -> None:
        """Let a new piece stand for a file, so that the old one's memory can go."""
        if piece in self._files:
            fresh = Piece(is_state=piece.is_state)
            self.index.add(fresh, self.index.forget(piece))
            self._files[fresh] = self._files.pop(piece)

    def _has(self, piece: Piece, keys: Sequence[Key]) -> bool:
        look = self.index.state if piece.is_state else self.index.page
        found = [look(key) for key in keys]
        self.index.touch(each.piece for each in found if each is not None)
        return None not in found

    def _name(self, piece: Piece, keys: Sequence[Key]) -> str:
        digest = hashlib.blake2b(b"state" if piece.is_state else b"pages", digest_size=16)
        for before, tokens in keys:
            digest.update(before + np.asarray(tokens, "<i4").tobytes())
        return f"{self._own}-{digest.hexdigest()}.piece"


# These run in the thread.


def _write(path: Path, piece: Piece, keys: Sequence[Key]) -> int:
    """Write a piece; the bytes of its file."""
    arrays = {str(index): np.asarray(array) for index, array in enumerate(piece.arrays or ())}
    told = [[before.hex(), list(tokens)] for before, tokens in keys]
    Container(KIND, {"is_state": piece.is_state, "keys": told}, arrays).save(path)
    return path.stat().st_size


def _read(path: Path, like: Sequence[tuple[tuple[int, ...], np.dtype]]) -> tuple[np.ndarray, ...]:
    """The arrays of a piece.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds something else.
    """
    arrays = Container.load(path, KIND).arrays
    found = tuple(arrays[str(index)] for index in range(len(arrays)))
    if [(array.shape, array.dtype) for array in found] != list(like):
        raise ValueError(f"{path} must hold the arrays of a piece of this engine, and has others.")
    os.utime(path)  # it was used now, also for the next engine
    return found


def _scan(folder: Path, own: str, page_size: int) -> list[_File]:
    """The files of pieces, those first that were used longest ago; others are deleted."""
    found = []
    for entry in os.scandir(folder):
        name = _NAME.fullmatch(entry.name)
        if name is None:
            continue  # no file of ours
        path = Path(entry.path)
        try:
            if name[1] != own:
                raise ValueError("it is of another model, or of other sizes")
            status, about = path.stat(), Container.about_of(path, KIND)
            keys = tuple(Key(bytes.fromhex(b), tuple(map(int, t))) for b, t in about["keys"])
            if not 0 < len(keys) <= _MAX_KEYS or max(len(k.tokens) for k in keys) > page_size:
                raise ValueError("it has no such pages")
            file = _File(entry.name, status.st_size, about["is_state"] is True, keys)
            found.append((status.st_mtime_ns, file))
        except (OSError, ValueError, TypeError, KeyError):
            path.unlink(missing_ok=True)
    return [file for _, file in sorted(found, key=lambda each: each[0])]


def _delete_all(folder: Path, own: str) -> None:
    for path in folder.glob(f"{own}-*.piece"):
        path.unlink(missing_ok=True)
