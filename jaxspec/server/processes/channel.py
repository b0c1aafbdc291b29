"""Channel: what two of the server's own processes tell and ask each other, over one socket."""

import asyncio
import contextlib
import pickle
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Self

_LENGTH = struct.Struct("<Q")
_ANSWER = ""  # the name of an answer's frame
_MAX_BUFFERED = 2**28  # bytes that wait for the other side; one that reads nothing is given up
_Frame = tuple[int | None, str, tuple[Any, ...]]


class Channel:
    """Frames both ways, in order: a length, and a pickle of (number, name, arguments).

    Pickles are safe here as they are in `multiprocessing`: the socket has no name, so nobody but
    the two processes can write into it.

    What comes calls the function of its name in `handlers`. It is a coroutine function where an
    answer is asked for.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """Speak over an open connection."""
        self.handlers: Mapping[str, Callable[..., Any]] = {}
        self._reader, self._writer = reader, writer
        self._asked = dict[int, asyncio.Future[Any]]()
        self._num_asked = 0
        self._is_gone = False
        self._tasks = set[asyncio.Task[None]]()  # that make answers

    @classmethod
    async def of(cls, end: socket.socket) -> Self:
        """The channel over one end of a pair of sockets."""
        return cls(*await asyncio.open_connection(sock=end))

    def tell(self, name: str, *args: Any) -> None:
        """Have the other side call its handler of this name; a side that is gone hears nothing."""
        self._write(None, name, args)

    async def ask(self, name: str, *args: Any) -> Any:
        """What the other side's handler returns.

        Raises:
            ConnectionError: the other side is gone.
            Exception: what the handler raised.
        """
        if self._is_gone or self._writer.is_closing():
            raise ConnectionResetError("The other process of the server is gone.")
        self._num_asked = number = self._num_asked + 1
        self._asked[number] = asyncio.get_running_loop().create_future()
        self._write(number, name, args)
        try:
            return await self._asked[number]
        finally:
            del self._asked[number]

    async def hear_first(self) -> Any:
        """The argument of the first thing told. No handler is called; `run` hears what follows.

        Raises:
            EOFError: the other side is gone.
        """
        _, _, (argument,) = pickle.loads(await self._read())
        return argument

    async def run(self) -> None:
        """Hear the other side until it is gone.

        Raises:
            Exception: what a handler of something told raised.
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

    def hang_up(self) -> None:
        """Close the connection: both sides' `run` ends."""
        self._writer.close()

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
            self._write(number, _ANSWER, (None, _portable(error)))

    def _write(self, number: int | None, name: str, args: tuple[Any, ...]) -> None:
        data = pickle.dumps((number, name, args), pickle.HIGHEST_PROTOCOL)
        if self._writer.is_closing():
            return
        self._writer.write(_LENGTH.pack(len(data)) + data)
        if self._writer.transport.get_write_buffer_size() > _MAX_BUFFERED:
            self._writer.transport.abort()


def _portable(error: Exception) -> Exception:
    """An error that comes through; one that can't be pickled gives its words."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
