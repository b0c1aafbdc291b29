"""DiskTier: pieces that the host's memory has no room for, as files in a folder.

A thread of its own writes, reads and deletes them, one after the other, and the scheduler never
waits for it while anything runs. What goes wrong there costs no more than what is kept. A piece
that can't be written is dropped. One that can't be read, or is not what it says, is forgotten and
its file deleted. The files outlive the engine, and the next one of the same model finds them.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.piece_plan import Piece
from jaxspec.scheduler import piece_files
from jaxspec.scheduler.piece_files import Like, PieceFile
from jaxspec.scheduler.piece_index import Key, PieceIndex

MAX_WAITING = 8  # pieces that wait to be written; beyond that they are dropped
MAX_AHEAD_BYTES = 2**29  # of files that are read for requests behind the next one
_log = logging.getLogger(__name__)


class DiskTier:
    """Files by their last use, in at most `max_bytes`; others' files in the folder are deleted.

    `arrays`: shapes and dtypes of a piece of pages (False) and of a piece of a state (True).
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        fingerprint: str,
        page_size: int,
        arrays: Mapping[bool, Like],
    ):
        """Have the thread list `folder`. Its files can be found from the first `poll` after that.

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
        self._do(lambda: piece_files.scan(folder, self._own, page_size), self._found)

    def _forget(self) -> None:
        self.index = PieceIndex()
        self._files: dict[Piece, PieceFile] = {}
        self._pieces: dict[str, Piece] = {}  # by the names of their files
        self._loading: dict[Piece, Future[Any]] = {}
        self._writing: set[str] = set()
        self._unread: list[tuple[str, Piece, tuple[Key, ...]]] = []  # of those: not filled yet
        self.num_bytes = 0

    def clear(self) -> None:
        """Forget everything, and delete the files."""
        self.want(())
        self._jobs = [(job, lambda _: None) for job, _ in self._jobs]
        self._forget()
        self._do(lambda: piece_files.delete_all(self._folder, self._own))

    def close(self) -> None:
        """Wait until all is written; nothing may be asked any more."""
        self.want(())
        self.poll()
        while self._jobs:  # what is noted of one may ask for more, as where a file has to go
            wait([self._jobs[-1][0]])
            self.poll()
        self._thread.shutdown()

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
            self._add(PieceFile(name, num_bytes, piece.is_state, keys))

        self._do(lambda: piece_files.write(self._folder / name, piece, keys), written, name)

    def want(self, pieces: Iterable[Piece], ahead: Iterable[Piece] = ()) -> None:
        """Begin to read these pieces. Others that were read are let go.

        `ahead`: those of use later, which are read up to `MAX_AHEAD_BYTES`.
        """
        wanted = dict.fromkeys(piece for piece in pieces if piece in self._files)
        size = 0
        for piece in ahead:
            if piece in self._files and piece not in wanted:
                size += self._files[piece].num_bytes
                if size > MAX_AHEAD_BYTES:
                    break
                wanted[piece] = None
        for piece in [each for each in self._loading if each not in wanted]:
            if not self._loading.pop(piece).cancel():
                self._renew(piece)
        for piece in wanted:
            self._read(piece)

    def is_loading(self, piece: Piece) -> bool:
        """Whether a piece is on disk alone, and has to be read first."""
        return piece in self._files and piece.arrays is None

    def wait(self, pieces: Iterable[Piece], seconds: float) -> bool:
        """Wait for these pieces, but no longer; whether all are there, or can't be read.

        A file that is being read at the end is deleted, for it would hold up others, too. One whose
        turn has not come stays.
        """
        awaited = [piece for piece in pieces if self.is_loading(piece)]
        for piece in awaited:
            self._read(piece)
        wait([self._loading[piece] for piece in awaited], seconds)
        self.poll()
        late = [piece for piece in awaited if self.is_loading(piece)]
        for piece in late:
            if not self._loading.pop(piece).cancel():
                self._fail(TimeoutError(f"a file took more than {seconds:.0f} s"))
                self._drop(piece)
        return not late

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
            if job.cancelled():
                return
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

    def _found(self, files: list[PieceFile]) -> None:
        for file in files:
            if not self._has(Piece(is_state=file.is_state), file.keys):
                self._add(file)

    def _read(self, piece: Piece) -> None:
        """Begin to read a piece that is on disk, unless that is done."""
        if piece not in self._loading:
            self.index.touch([piece])
            file = self._files[piece]
            self._loading[piece] = self._do(
                lambda: piece_files.read(self._folder / file.name, self._arrays[file.is_state]),
                lambda arrays: self._loaded(piece, arrays),
                piece=piece,
            )

    def _add(self, file: PieceFile) -> None:
        if file.name in self._pieces:  # this one was written in its place
            self._forget_piece(self._pieces[file.name])
        piece = Piece(is_state=file.is_state)
        self.index.add(piece, file.keys)
        self._files[piece], self._pieces[file.name] = file, piece
        self.num_bytes += file.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_evicted_files += 1
            self._drop(next(iter(self.index)))

    def _forget_piece(self, piece: Piece) -> str:
        """Forget a piece, but not its file, whose name it returns."""
        if (job := self._loading.pop(piece, None)) is not None:
            job.cancel()
        self.index.forget(piece)
        file = self._files.pop(piece)
        self.num_bytes -= file.num_bytes
        del self._pieces[file.name]
        return file.name

    def _drop(self, piece: Piece) -> None:
        if piece not in self._files:
            return
        name = self._forget_piece(piece)
        is_written_anew = name in self._writing - {name for name, *_ in self._unread}
        if not is_written_anew:  # else the thread would delete it behind that
            self._do(lambda: (self._folder / name).unlink(missing_ok=True))

    def _loaded(self, piece: Piece, arrays: tuple[np.ndarray, ...]) -> None:
        self.num_read += 1
        if piece in self._loading:
            piece.arrays = arrays

    def _renew(self, piece: Piece) -> None:
        """Let a new piece stand for a file, so that the old one's memory can go."""
        if piece in self._files:
            fresh = Piece(is_state=piece.is_state)
            self.index.add(fresh, self.index.forget(piece))
            file = self._files[fresh] = self._files.pop(piece)
            self._pieces[file.name] = fresh

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
