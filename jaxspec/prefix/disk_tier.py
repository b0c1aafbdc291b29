"""DiskTier: blocks evicted from host memory, as files in a folder.

One thread writes, reads and deletes the files in order; the scheduler never waits for it while a
step runs. Errors cost cached prefixes only: a block that cannot be written is dropped, and a file
that cannot be read, or has unexpected contents, is deleted. Files outlive the engine and are found
by the next engine with the same model.
"""

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.plan.block_plan import Block, Key
from jaxspec.prefix.block_index import BlockIndex
from jaxspec.transfer.container import Container

MAX_WAITING = 8  # most blocks waiting to be written; further ones are dropped
MAX_AHEAD_BYTES = 2**29  # limit of files read for requests after the next one
KIND = "piece of kept prefixes"
Like = Sequence[tuple[tuple[int, ...], np.dtype]]
"""Shape and dtype of each array of a block."""
_NAME = re.compile(r"([0-9a-f]{32})-[0-9a-f]{32}\.piece")
_PART = re.compile(r"\.\w+\.piece\.part")  # temporary name in `Container.save`
_MAX_KEYS = 2**12
_log = logging.getLogger(__name__)


def write(path: Path, block: Block) -> int:
    """Write a block; return the bytes of its file.

    Raises:
        OSError: it cannot be written.
    """
    arrays = {str(index): np.asarray(array) for index, array in enumerate(block.arrays or ())}
    Container(KIND, _about(block), arrays).save(path)
    return path.stat().st_size


def read(path: Path, block: Block, like: Like) -> tuple[np.ndarray, ...]:
    """Return the arrays of a block.

    Raises:
        FileNotFoundError, ValueError: the file does not exist, or has other contents or those of
            another block.
    """
    container = Container.load(path, KIND)
    if container.about != _about(block):
        raise ValueError(f"{path} must hold the block that was written to it, and has another.")
    arrays = container.arrays
    found = tuple(arrays[str(index)] for index in range(len(arrays)))
    if [(array.shape, array.dtype) for array in found] != list(like):
        raise ValueError(f"{path} must hold the arrays of a piece of this engine, and has others.")
    os.utime(path)  # preserves the eviction order for the next engine
    return found


def _about(block: Block) -> dict[str, Any]:
    keys = [[before.hex(), list(map(int, tokens))] for before, tokens in block.keys]
    return {"is_state": block.is_state, "keys": keys}


def scan(folder: Path, own: str, page_size: int) -> list[tuple[str, int, Block]]:
    """Return name, bytes and block of the files whose names begin with `own`, by last use.

    Deletes other block files and partial files of killed processes.
    """
    found = []
    for entry in os.scandir(folder):
        path, name = Path(entry.path), _NAME.fullmatch(entry.name)
        if _PART.fullmatch(entry.name):
            _delete(path)
        if name is None:
            continue  # not a block file
        try:
            if name[1] != own:
                raise ValueError("it is of another model, or of other sizes")
            status, about = path.stat(), Container.about_of(path, KIND)
            keys = tuple(Key(bytes.fromhex(b), tuple(map(int, t))) for b, t in about["keys"])
            if not 0 < len(keys) <= _MAX_KEYS or max(len(k.tokens) for k in keys) > page_size:
                raise ValueError("it has no such pages")
            block = Block(is_state=about["is_state"] is True, keys=keys)
            found.append((status.st_mtime_ns, entry.name, status.st_size, block))
        except (OSError, ValueError, TypeError, KeyError):
            _delete(path)
    return [each[1:] for each in sorted(found, key=lambda each: each[0])]


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def delete_all(folder: Path, own: str) -> None:
    """Delete the block files whose names begin with `own`."""
    for path in folder.glob(f"{own}-*.piece"):
        path.unlink(missing_ok=True)


class DiskTier:
    """Files by last use, in at most `max_bytes`; block files of other models are deleted."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        fingerprint: str,
        page_size: int,
        arrays: Mapping[bool, Like],
    ):
        """Start to scan `folder`; its files are found from the first `poll` after the scan.

        Args:
            folder: Folder of the files.
            max_bytes: Limit of their total size.
            fingerprint: Fingerprint of the model and its weights. It names the files, together with
                `page_size` and `arrays`, so that no other model, dtype or block size shares them.
            page_size: Tokens per page.
            arrays: Shapes and dtypes of a block of pages (False) and of a state (True).
        """
        self._folder, self.max_bytes, self._arrays = folder, max_bytes, arrays
        self._page_size = page_size
        self.rename(fingerprint)
        self._thread = ThreadPoolExecutor(1, "jaxspec-prefixes")
        self._jobs: list[tuple[Future[Any], Callable[[Any], None]]] = []  # in order
        self._has_warned = False
        self.num_written = self.num_read = self.num_skipped = self.num_failed = 0
        self.num_evicted_files = 0
        self._forget()
        own = self._own  # at the time of the scan
        self._do(lambda: scan(folder, own, page_size), self._found)

    def rename(self, fingerprint: str) -> None:
        """Name files that are written from now on by another fingerprint; call it after `clear`."""
        sizes = {kind: str(like) for kind, like in self._arrays.items()}
        own = repr((fingerprint, self._page_size, sizes))
        self._own = hashlib.blake2b(own.encode(), digest_size=16).hexdigest()

    def _forget(self) -> None:
        self.index = BlockIndex()
        self._names: dict[Block, str] = {}  # of the files
        self._blocks: dict[str, Block] = {}  # by file name
        self._loading: dict[Block, Future[Any]] = {}
        self._writing: set[str] = set()
        self._unfilled: dict[str, Block] = {}  # by file name; written once they have contents

    def clear(self) -> None:
        """Forget everything and delete the files."""
        self.want(())
        self._jobs = [(job, lambda _: None) for job, _ in self._jobs]
        self._forget()
        own = self._own
        self._do(lambda: delete_all(self._folder, own))

    def close(self) -> None:
        """Wait until everything is written; no call may follow."""
        self.want(())
        self.poll()
        while self._jobs:  # a result may add jobs, such as a deletion
            wait([self._jobs[-1][0]])
            self.poll()
        self._thread.shutdown()

    def stats(self) -> dict[str, int]:
        """Return the stats by name."""
        return {
            "num_files": len(self._names),
            "num_bytes": self.index.num_bytes,
            "max_bytes": self.max_bytes,
            "num_written": self.num_written,
            "num_read": self.num_read,
            "num_evicted_files": self.num_evicted_files,
            "num_skipped": self.num_skipped,
            "num_failed": self.num_failed,
        }

    def put(self, block: Block) -> None:
        """Write an evicted block, unless it is on disk already or too many writes are pending."""
        self.poll()
        name = self._name(block)
        if name in self._writing or self._has(block):
            return
        if len(self._writing) >= MAX_WAITING:
            self.num_skipped += 1
            return
        self._writing.add(name)
        if block.arrays is None:  # the plan that fills it is not dispatched yet
            self._unfilled[name] = block
        else:
            self._write(name, block)

    def forget_unfilled(self) -> None:
        """Drop blocks without contents: the plans that fill them will not be dispatched."""
        self._writing -= self._unfilled.keys()
        self._unfilled.clear()

    def _write(self, name: str, block: Block) -> None:
        def written(num_bytes: int) -> None:
            self.num_written += 1
            self._add(name, num_bytes, block.without_arrays())

        self._do(lambda: write(self._folder / name, block), written, name)

    def want(self, blocks: Iterable[Block], ahead: Iterable[Block] = ()) -> None:
        """Start to read these blocks, and release all others that were read.

        `ahead` are blocks that are needed later, read up to `MAX_AHEAD_BYTES`.
        """
        wanted = dict.fromkeys(block for block in blocks if block in self._names)
        size = 0
        for block in ahead:
            if block in self._names and block not in wanted:
                size += self.index.blocks[block]
                if size > MAX_AHEAD_BYTES:
                    break
                wanted[block] = None
        for block in [each for each in self._loading if each not in wanted]:
            if not self._loading.pop(block).cancel() and block in self._names:
                # An empty block takes the place of one that was read, so that its memory is freed.
                num_bytes = self.index.blocks[block]
                self._add(self._remove(block), num_bytes, block.without_arrays())
        for block in wanted:
            self._read(block)

    def is_loading(self, block: Block) -> bool:
        """Return whether a block is on disk only and must be read first."""
        return block in self._names and block.arrays is None

    def wait(self, blocks: Iterable[Block], seconds: float) -> bool:
        """Wait for these blocks, at most `seconds`; return whether all are read or unreadable.

        After a timeout the file that is being read is deleted, because it would delay the others
        again. Files whose read has not begun stay.
        """
        awaited = [block for block in blocks if self.is_loading(block)]
        for block in awaited:
            self._read(block)
        wait([self._loading[block] for block in awaited], seconds)
        self.poll()
        late = [block for block in awaited if self.is_loading(block)]
        for block in late:
            if not self._loading.pop(block).cancel():
                self._fail(TimeoutError(f"a file took more than {seconds:.0f} s"))
                self._drop(block)
        return not late

    def poll(self) -> None:
        """Process the results of the thread; blocks found earlier may be gone afterwards."""
        while self._jobs and self._jobs[0][0].done():
            job, note = self._jobs.pop(0)
            note(job)
        for name, block in list(self._unfilled.items()):
            if block.arrays is not None:
                self._write(name, self._unfilled.pop(name))

    # Helpers, called in the scheduler's thread

    def _do(
        self,
        act: Callable[[], Any],
        note: Callable[[Any], None] = lambda _: None,
        name: str = "",
        block: Block | None = None,
    ) -> Future[Any]:
        """Run `act` in the thread; `poll` calls `note` with the result, or handles the failure."""

        def done(job: Future[Any]) -> None:
            self._writing.discard(name)
            if job.cancelled():
                return
            error = job.exception()
            if error is None:
                note(job.result())
                return
            self._fail(error)
            if block is not None:
                self._drop(block)

        job = self._thread.submit(act)
        self._jobs.append((job, done))
        return job

    def _fail(self, error: BaseException) -> None:
        self.num_failed += 1
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "kept prefixes: a file in %s could not be used: %s. Generation goes on; "
                "LLM.metrics()['prefix_cache']['host']['disk'] counts what fails.",
                self._folder,
                error,
            )

    def _found(self, files: list[tuple[str, int, Block]]) -> None:
        for name, num_bytes, block in files:
            if not self._has(block):
                self._add(name, num_bytes, block)

    def _read(self, block: Block) -> None:
        """Start to read a block on disk, unless that has begun."""
        if block not in self._loading:
            self.index.touch([block])
            path, like = self._folder / self._names[block], self._arrays[block.is_state]
            self._loading[block] = self._do(
                lambda: read(path, block, like),
                lambda arrays: self._loaded(block, arrays),
                block=block,
            )

    def _add(self, name: str, num_bytes: int, block: Block) -> None:
        if name in self._blocks:  # the file was overwritten
            self._remove(self._blocks[name])
        self.index.add(block, num_bytes)
        self._names[block], self._blocks[name] = name, block
        while self.index.num_bytes > self.max_bytes:
            self.num_evicted_files += 1
            self._drop(next(iter(self.index.blocks)))

    def _remove(self, block: Block) -> str:
        """Remove a block but not its file, whose name is returned."""
        if (job := self._loading.pop(block, None)) is not None:
            job.cancel()
        self.index.remove(block)
        name = self._names.pop(block)
        del self._blocks[name]
        return name

    def _drop(self, block: Block) -> None:
        if block not in self._names:
            return
        name = self._remove(block)
        is_written_anew = name in self._writing - self._unfilled.keys()
        if not is_written_anew:  # else the thread would delete the new file
            self._do(lambda: (self._folder / name).unlink(missing_ok=True))

    def _loaded(self, block: Block, arrays: tuple[np.ndarray, ...]) -> None:
        self.num_read += 1
        if block in self._loading:
            block.arrays = arrays

    def _has(self, block: Block) -> bool:
        found = [self.index.find(key, is_state=block.is_state) for key in block.keys]
        self.index.touch(each.block for each in found if each is not None)
        return None not in found

    def _name(self, block: Block) -> str:
        digest = hashlib.blake2b(b"state" if block.is_state else b"pages", digest_size=16)
        for before, tokens in block.keys:
            digest.update(before + np.asarray(tokens, "<i4").tobytes())
        return f"{self._own}-{digest.hexdigest()}.piece"
