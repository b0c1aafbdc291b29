"""Connections over real sockets: late, long and too many headers, and those that are none of it."""

import asyncio
import contextlib
import json
import socket
import time

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import StreamingResponse

from jaxspec.server.http.bounded_protocol import ConnectionCounts
from jaxspec.server.http.http_server import HttpServer, event_loop
from jaxspec.server.options import ServerOptions

GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
MOST = 4096


def app():
    made = FastAPI()

    @made.get("/")
    async def answer():
        return "done"

    @made.post("/length")
    async def length(request: Request):
        return len(await request.body())

    @made.get("/slow")
    async def slow():
        async def parts():
            for _ in range(6):
                yield b"part"
                await asyncio.sleep(0.3)

        return StreamingResponse(parts())

    return made


@contextlib.asynccontextmanager
async def serving(**options):
    """Yield a function that connects to a server; its connections are closed in the end."""
    opened, clients = asyncio.Event(), []
    server = HttpServer(app(), ServerOptions(access_log=False, **options))

    async def connect():
        address = port.getsockname()
        clients.append(Client(*await asyncio.open_connection(*address)))
        return clients[-1]

    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        running = asyncio.create_task(server.serve_at(port, opened.set))
        try:
            async with asyncio.timeout(120):
                await opened.wait()
                yield connect
        finally:
            for client in clients:
                await client.close()
            server.end(now=True)
            await running


def run(test):
    """Run a coroutine function in each event loop that the server may have."""
    for factory in (event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test())


class Client:
    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    async def send(self, data):
        """Send data, of which none may arrive if the server has closed the connection."""
        with contextlib.suppress(ConnectionError):
            if not self._writer.transport.is_closing():
                self._writer.write(data)
                await self._writer.drain()

    async def answer(self):
        """Status and body of an answer with a length; 0 if the connection closed before it."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        body = await self._reader.readexactly(int(fields[b"content-length"]))
        return int(head.split()[1]), body

    async def rest(self):
        return await self._reader.read()

    async def is_closed(self):
        try:
            return await self._reader.read() == b""
        except ConnectionError:
            return True

    async def close(self):
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def test_headers_that_do_not_end_are_a_408_and_nothing_at_all_is_closed():
    async def test():
        async with serving(header_timeout=2) as connect:
            begun, silent, dripping, stray = [await connect() for _ in range(4)]
            await begun.send(GET)
            await stray.send(GET + b"\r\n")
            assert await stray.answer() == (200, b'"done"')
            await stray.send(b"\r\n")  # after an answer, without a request
            for byte in GET + 30 * b"x":
                await dripping.send(bytes([byte]))
                await asyncio.sleep(0.05)
            for late in (begun, stray):
                status, body = await late.answer()
                assert status == 408 and "2 seconds" in json.loads(body)["error"]["message"]
                assert await late.is_closed()
            assert (await dripping.answer())[0] in (408, 0)
            assert await silent.is_closed()

    run(test)


def test_an_answer_that_takes_longer_than_headers_may_is_not_cut():
    """Also if its client has begun the next request, whose rest comes after the answer."""

    async def test():
        async with serving(header_timeout=1) as connect:
            client = await connect()
            slow = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
            await client.send(slow + GET + b"connection: close\r\n")
            await asyncio.sleep(1.5)
            await client.send(b"\r\n")
            answers = await client.rest()
            assert answers.count(b"part") == 6 and answers.endswith(b'"done"')

    run(test)


@pytest.mark.parametrize("size, status", [(MOST, 200), (MOST + 1, 431), (100 * MOST, 431)])
@pytest.mark.parametrize("part", [7, 10**9])
def test_headers_have_so_many_bytes_and_no_more(size, status, part):
    head = GET + b"x: " + b"y" * (size - len(GET) - 7) + b"\r\n\r\n"
    assert len(head) == size

    async def test():
        async with serving(h11_max_incomplete_event_size=MOST) as connect:
            client = await connect()
            await client.send(GET + b"\r\n")  # headers are counted for each request
            assert await client.answer() == (200, b'"done"')
            for start in range(0, len(head), part):
                await client.send(head[start : start + part])
            found, body = await client.answer()
            assert found == status
            if status == 431:
                assert "at most 4,096 bytes" in json.loads(body)["error"]["message"]
                assert await client.is_closed()

    run(test)


def test_a_header_of_any_size_is_dropped_while_it_is_read():
    """A client that sends 64 MiB and reads only then has its 431, or sees the connection closed."""

    async def test():
        async with serving() as connect:
            client = await connect()
            await client.send(GET + b"x: ")
            for _ in range(64):
                await client.send(b"y" * 2**20)
            assert (await client.answer())[0] in (431, 0)

    run(test)


def test_a_body_is_no_header_and_comes_whole():
    async def test():
        async with serving(h11_max_incomplete_event_size=MOST, header_timeout=1) as connect:
            client = await connect()
            body = b"z" * 50 * MOST
            head = b"POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            for _ in range(2):  # two requests, one after the other within the same data
                await client.send(head + body + head + body[:100])
                assert await client.answer() == (200, str(len(body)).encode())
                await asyncio.sleep(1.3)  # a body has its own time
                await client.send(body[100:])
                assert await client.answer() == (200, str(len(body)).encode())

    run(test)


CHUNKED = b"POST /%b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def test_chunks_of_one_byte_come_whole():
    async def test():
        async with serving(h11_max_incomplete_event_size=MOST) as connect:
            client = await connect()
            await client.send(CHUNKED % b"length" + 10 * MOST * b"1\r\nz\r\n" + b"0\r\n\r\n")
            assert await client.answer() == (200, str(10 * MOST).encode())

    run(test)


@pytest.mark.parametrize("path", ["length", "missing"], ids=["waiting", "answered"])
@pytest.mark.parametrize("trailer", [b"a: b\r\n", b"c"], ids=["many", "long"])
def test_trailers_are_bounded_as_headers_are(path, trailer):
    async def test():
        async with serving(h11_max_incomplete_event_size=MOST) as connect:
            client = await connect()
            await client.send(CHUNKED % path.encode() + b"1\r\nz\r\n0\r\n" + b"x: ")
            if path == "missing":
                assert (await client.answer())[0] == 404
            for _ in range(4 * MOST):
                await client.send(trailer)
            assert await client.is_closed()

    run(test)


def test_a_body_that_no_one_reads_must_end_soon():
    async def test():
        async with serving(header_timeout=1) as connect:
            client = await connect()
            await client.send(CHUNKED % b"missing" + b"1\r\nz\r\n")
            assert (await client.answer())[0] == 404
            assert await client.is_closed()

    run(test)


@pytest.mark.parametrize("name", ["limit_concurrency", "limit_concurrency_per_address"])
def test_a_connection_too_many_is_a_503_until_another_closes(name):
    async def test():
        async with serving(**{name: 3}) as connect:
            clients = [await connect() for _ in range(3)]
            for client in clients:
                await client.send(GET + b"\r\n")
                assert await client.answer() == (200, b'"done"')
            for _ in range(5):
                refused = await connect()
                assert (await refused.answer())[0] == 503
                assert await refused.is_closed()
            await clients[0].close()
            end = time.monotonic() + 60
            status = 503
            while status != 200 and time.monotonic() < end:
                again = await connect()
                await again.send(GET + b"\r\n")
                status, _ = await again.answer()
            assert status == 200

    run(test)


def test_a_limit_is_for_all_addresses_or_for_each():
    counts = ConnectionCounts(4, 2)
    assert [counts.add(name) for name in "aaabbbc"] == [1, 1, 0, 1, 1, 0, 0]
    counts.remove("a")
    assert counts.add("c") and not counts.add("c")


def test_by_default_one_address_has_more_than_a_thousand_connections():
    options = ServerOptions()
    most = min(options.limit_concurrency_per_address, options.limit_concurrency)
    assert most > 1024 and options.header_timeout <= 30
