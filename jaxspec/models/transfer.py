"""Copy parameters from checkpoint files to the device, in parallel and with bounded memory.

Each thread reads a block into one of its two buffers, starts the copy to the device, and reads the
next block into the other buffer. On the device, a program transposes and converts the block and
writes it into the parameter in place. So the host holds only the buffers, and the device only the
weights and one block per buffer, however large a parameter is.

Small parameters are assembled on the host instead: compiling a program for each of the many small
shapes would take longer than converting them all. If the device is the CPU, all parameters are
assembled on the host, and XLA adopts their memory without a copy.
"""

import concurrent.futures
import functools
import math
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.device import default_device
from jaxspec.models.blocks import Block, Source
from jaxspec.models.checkpoint import Checkpoint

BLOCK_BYTES = 2**25
SMALL_BYTES = 2**22
_THREADS = 8  # readers; more are no faster, and each has two buffers
_COMPILERS = 4  # threads that compile programs while others read
_ALIGNMENT = 64  # bytes; XLA adopts aligned host memory without a copy


def to_device(
    sources: Sequence[Source], checkpoint: Checkpoint, report: Callable[[int], object]
) -> list[jax.Array]:
    """Load the value of each source's parameter to the default device.

    After an error or Ctrl-C all threads have ended and the values are freed, even if Ctrl-C is
    pressed again in the meantime. Threads finish the blocks that they have started.

    Args:
        sources: What to load.
        checkpoint: The open checkpoint.
        report: Called with the bytes of each block after it was read, by one thread at a time.

    Raises:
        ValueError: A file was truncated or written to after it was opened.
    """
    transfer = _Transfer(sources, checkpoint, report)
    try:
        transfer.run()
        _despite_ctrl_c(transfer.end)
        checkpoint.check_unchanged()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # frames hold buffers
        _despite_ctrl_c(transfer.drop)
        raise
    return transfer.values()


def _despite_ctrl_c(call: Callable[[], None]) -> None:
    """Repeat the call until Ctrl-C does not interrupt it; then raise the last interrupt."""
    heard = None
    while True:
        try:
            call()
            break
        except KeyboardInterrupt as interrupt:
            heard = interrupt
    if heard is not None:
        raise heard


class _Program(NamedTuple):
    """Key of a program that writes blocks into a parameter; shapes as in the checkpoint."""

    shape: tuple[int, ...]
    block: tuple[int, ...]
    transpose: bool
    param_dtype: np.dtype
    dtype: np.dtype


class _Compiled(NamedTuple):
    create: Callable[[], jax.Array]  # makes a parameter of zeros
    write: Callable[..., tuple[jax.Array, jax.Array]]  # `_write` without the static argument


class _Target:
    """A parameter that is being assembled."""

    def __init__(self, source: Source):
        self.source = source
        self.value: jax.Array | None = None
        self.blocks = list(source.blocks(BLOCK_BYTES))
        self.lock = threading.Lock()


class _OnHost(_Target):
    """A parameter assembled in host memory, and moved to the device when complete."""

    def __init__(self, source: Source):
        super().__init__(source)
        self._missing = len(self.blocks)
        self._content: np.ndarray | None = None  # in the layout of the parameter

    def take(self, block: Block, checkpoint: Checkpoint, buffers: "_Buffers") -> None:
        """Read a block, and move the parameter if this was the last one."""
        source = self.source
        with self.lock:
            if self._content is None:
                self._content = _empty(math.prod(source.shape), source.param_dtype)
            content = self._content
        if source.transpose:
            stored = buffers.take(block.size, source.dtype)
            source.read(block, checkpoint.read, stored)
            block.transpose(stored, content.reshape(source.shape[::-1]))
        else:
            place = content[block.first : block.first + block.size]
            source.read(block, checkpoint.read, place)
        with self.lock:
            self._missing -= 1
            if self._missing == 0:
                whole = content.reshape(source.shape[::-1] if source.transpose else source.shape)
                self.value, self._content = jax.device_put(whole), None


class _OnDevice(_Target):
    def __init__(self, source: Source):
        super().__init__(source)
        self.key = _Program(
            source.shape,
            self.blocks[0].shape,
            source.transpose,
            source.param_dtype,
            source.dtype,
        )
        self.program: Future[_Compiled] | None = None

    def take(self, block: Block, checkpoint: Checkpoint, buffers: "_Buffers") -> None:
        """Read a block and launch the program that writes it."""
        stored = buffers.take(block.size, self.source.dtype)
        self.source.read(block, checkpoint.read, stored)
        assert self.program is not None
        program = self.program.result()
        on_device = jax.device_put(stored.reshape(block.shape))
        start = np.array(block.start[:: -1 if self.source.transpose else 1], np.int32)
        with self.lock:
            value = program.create() if self.value is None else self.value
            self.value, is_written = program.write(value, on_device, start)
        buffers.hold(is_written)


class _Buffers:
    """The two buffers of a thread, used alternately."""

    def __init__(self):
        self._bytes: list[np.ndarray] = [np.empty(0, np.uint8)] * 2
        self._in_use: list[jax.Array | None] = [None] * 2
        self._turn = 0

    def take(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return the next buffer as `count` elements, once the device has read its last content."""
        self._turn = 1 - self._turn
        if (is_written := self._in_use[self._turn]) is not None:
            is_written.block_until_ready()
            self._in_use[self._turn] = None
        if self._bytes[self._turn].size < (num_bytes := count * dtype.itemsize):
            self._bytes[self._turn] = np.empty(num_bytes, np.uint8)
        return self._bytes[self._turn][:num_bytes].view(dtype)

    def hold(self, is_written: jax.Array) -> None:
        """Mark the last buffer as read by the device until `is_written` is ready."""
        self._in_use[self._turn] = is_written


class _Transfer:
    def __init__(
        self, sources: Sequence[Source], checkpoint: Checkpoint, report: Callable[[int], object]
    ):
        self._targets = [(_OnHost if _by_host(each) else _OnDevice)(each) for each in sources]
        self._checkpoint, self._report = checkpoint, report
        self._blocks = ((target, block) for target in self._targets for block in target.blocks)
        self._lock = threading.Lock()  # guards `_report` and `_blocks`
        self._stop = threading.Event()
        self._compilers = ThreadPoolExecutor(_COMPILERS, "jaxspec-compile")
        num_bytes = sum(target.source.num_bytes for target in self._targets)
        self._count = min(_THREADS, os.cpu_count() or 1, 1 + num_bytes // BLOCK_BYTES)
        self._readers = ThreadPoolExecutor(self._count, "jaxspec-load")
        self._futures: list[Future[Any]] = []  # tasks of both pools
        # Threads do not inherit `with jax.default_device(...)`.
        self._device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]

    def run(self) -> None:
        self._compile()
        working = [self._submit(self._readers, self._take_all) for _ in range(self._count)]
        for done in concurrent.futures.as_completed(working):
            done.result()

    def end(self) -> None:
        """Stop and wait for the threads, which finish their current task. Can be called again."""
        self._stop.set()
        for future in self._futures:
            future.cancel()  # only tasks that have not started
        # After a Ctrl-C in `Thread.join`, Python 3.11 reports a running thread as finished.
        concurrent.futures.wait(self._futures)
        self._readers.shutdown()
        self._compilers.shutdown()

    def values(self) -> list[jax.Array]:
        return [target.value for target in self._targets if target.value is not None]

    def drop(self) -> None:
        """Stop and free all device memory, even if a caller still holds the exception."""
        self.end()
        for target in self._targets:
            if target.value is not None:
                target.value.delete()
        self._targets.clear()
        self._futures.clear()  # their exceptions hold buffers

    def _compile(self) -> None:
        programs: dict[_Program, Future[_Compiled]] = {}
        for target in self._targets:
            if isinstance(target, _OnDevice):
                if target.key not in programs:
                    programs[target.key] = self._submit(self._compilers, _compiled_here, target.key)
                target.program = programs[target.key]

    def _submit(self, pool: ThreadPoolExecutor, call: Callable[..., Any], *arguments: Any):
        future = pool.submit(self._here, call, *arguments)
        self._futures.append(future)
        return future

    def _here(self, call, *arguments):
        """Call with the default device of the thread that started the transfer."""
        with jax.default_device(self._device):
            return call(*arguments)

    def _take_all(self) -> None:
        """Take blocks until none is left or another thread has failed."""
        buffers = _Buffers()
        while (taken := self._next()) is not None:
            target, block = taken
            target.take(block, self._checkpoint, buffers)
            with self._lock:
                self._report((block.size - block.repeated) * target.source.dtype.itemsize)

    def _next(self) -> tuple[_OnHost | _OnDevice, Block] | None:
        with self._lock:
            return None if self._stop.is_set() else next(self._blocks, None)


def _by_host(source: Source) -> bool:
    """Return whether a parameter is assembled on the host."""
    return default_device().platform == "cpu" or source.num_bytes <= SMALL_BYTES


def _empty(count: int, dtype: np.dtype) -> np.ndarray:
    """Return uninitialised elements, aligned so that XLA can adopt their memory."""
    dtype = np.dtype(dtype)
    content = np.empty(count * dtype.itemsize + _ALIGNMENT, np.uint8)
    begin = -content.ctypes.data % _ALIGNMENT
    return content[begin : begin + count * dtype.itemsize].view(dtype)


def _compiled_here(program: _Program) -> _Compiled:
    return _compiled(program, default_device())


@functools.cache
def _compiled(program: _Program, there: Any) -> _Compiled:
    """Compile the programs for one combination of parameter and block, for the default device."""
    shape = program.shape[::-1] if program.transpose else program.shape
    create = jax.jit(functools.partial(jnp.zeros, shape, program.param_dtype))
    write = _write.lower(
        jax.ShapeDtypeStruct(shape, program.param_dtype),
        jax.ShapeDtypeStruct(program.block, program.dtype),
        jax.ShapeDtypeStruct((len(shape),), np.int32),
        program.transpose,
    )
    return _Compiled(create.lower().compile(), write.compile())


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _write(param, block, start, transpose: bool):
    """Write a block, or its transpose, at `start` of the parameter; also return one element.

    The returned element of the block is ready when the block has been read. The parameter itself
    can't signal this, because it is donated to the next call; and an element of it would be a
    second use, which makes XLA copy the parameter.
    """
    values = (block.T if transpose else block).astype(param.dtype)
    return jax.lax.dynamic_update_slice(param, values, tuple(start)), block[(0,) * block.ndim]
