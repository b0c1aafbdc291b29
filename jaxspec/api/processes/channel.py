"""Channel: messages and remote calls between two processes, over one socket."""

import asyncio
import contextlib
import pickle
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Self

_LENGTH = struct.Struct("<Q")
_ANSWER = ""  # name of frames with an answer
_MAX_BUFFERED = 2**28  # unsent bytes above which the connection is aborted
_Frame = tuple[int | None, str, tuple[Any, ...]]


class Channel:
    """A connection of ordered frames: a length and a pickle of (number, name, arguments).

    Pickles are safe here, as in `multiprocessing`: the socket has no name, so only the two
    processes can write to it.

    A received frame calls the handler of its name in `handlers`, with its arguments. Handlers for
    `call` are coroutine functions, and handlers for `notify` are plain ones.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.handlers: Mapping[str, Callable[..., Any]] = {}
        self._reader, self._writer = reader, writer
        self._asked = dict[int, asyncio.Future[Any]]()
        self._num_asked = 0
        self._is_gone = False
        self._tasks = set[asyncio.Task[None]]()  # running handlers of `call`

    @classmethod
    async def of(cls, end: socket.socket) -> Self:
        return cls(*await asyncio.open_connection(sock=end))

    def notify(self, name: str, *args: Any) -> None:
        """Call a handler of the other side without an answer; does nothing if that side is gone."""
        self._write(None, name, args)

    async def call(self, name: str, *args: Any) -> Any:
        """Call a handler of the other side and return its result.

        Raises:
            ConnectionError: the other side is gone.
            Exception: raised by the handler.
        """
        if self._is_gone or self._writer.is_closing():
            raise ConnectionResetError("The other process is gone.")
        self._num_asked = number = self._num_asked + 1
        self._asked[number] = answer = asyncio.get_running_loop().create_future()
        try:
            self._write(number, name, args)
            return await answer
        finally:
            del self._asked[number]

    async def receive_first(self) -> Any:
        """Return the argument of the first message, without calling a handler; use it before `run`.

        Raises:
            EOFError: the other side is gone.
        """
        _, _, (argument,) = pickle.loads(await self._read())
        return argument

    async def run(self) -> None:
        """Handle messages until the other side disconnects.

        Raises:
            Exception: raised by a handler of `notify`.
        """
        try:
            with contextlib.suppress(EOFError, ConnectionError):
                while True:
                    self._take(pickle.loads(await self._read()))
        finally:
            self._is_gone = True
            self._writer.close()
            for each in self._asked.values():
                if not each.done():
                    each.set_exception(ConnectionResetError("The other process is gone."))

    def close(self) -> None:
        """Close the connection, which ends `run` on both sides."""
        self._writer.close()

    async def finish(self) -> None:
        """Send what is unsent and close the connection."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _read(self) -> bytes:
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        return await self._reader.readexactly(length)

    def _take(self, frame: _Frame) -> None:
        number, name, args = frame
        if number is None:
            self.handlers[name](*args)
        elif name != _ANSWER:
            task = asyncio.get_running_loop().create_task(self._answer(number, name, args))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (future := self._asked.get(number)) is not None and not future.done():
            result, error = args
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    async def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            self._write(number, _ANSWER, (await self.handlers[name](*args), None))
        except Exception as error:
            self._write(number, _ANSWER, (None, portable(error)))

    def _write(self, number: int | None, name: str, args: tuple[Any, ...]) -> None:
        data = pickle.dumps((number, name, args), pickle.HIGHEST_PROTOCOL)
        if self._writer.is_closing():
            return
        self._writer.write(_LENGTH.pack(len(data)) + data)
        if self._writer.transport.get_write_buffer_size() > _MAX_BUFFERED:
            self._writer.transport.abort()


def portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its message if it can't be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
