"""A body within its limit, and work that ends when the client goes: whatever is awaited."""

import asyncio
import json

import pytest

from jaxspec.api.fair_pool import CALLER, Caller
from jaxspec.server.http.connection import ClientConnection
from jaxspec.server.http.request_ids import RequestIds


class Client:
    """The other side of an ASGI app: what it sends, when it goes, and what it got."""

    def __init__(self, *parts, length=None):
        self._parts, self.sent = list(parts), []
        self.num_read, self._gone = 0, asyncio.Event()
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        self.scope = {"type": "http", "method": "POST", "path": "/x", "headers": headers}

    def go(self):
        self._gone.set()

    async def receive(self):
        if self._parts:
            part = self._parts.pop(0)
            self.num_read += len(part)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"] if self.sent else None


async def echo(scope, receive, send):
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def answered(client, app=echo, most=10):
    async def run():
        await ClientConnection(app, most)(client.scope, client.receive, client.send)
        assert len(asyncio.all_tasks()) == 1

    return run()


def test_a_body_in_parts_comes_whole():
    async def run():
        client = Client(b"abc", b"", b"de")
        await answered(client)
        assert client.sent[1]["body"] == b"abcde"

    asyncio.run(run())


@pytest.mark.parametrize("told", [None, 3, 11, 10**30])
def test_a_long_body_is_a_413_whatever_its_length_says(told):
    async def run():
        client = Client(b"x" * 8, b"y" * 8, b"z", length=told)
        await answered(client)
        assert client.status == 413
        error = json.loads(client.sent[1]["body"])["error"]
        assert "at most 10 bytes" in error["message"]
        assert (b"connection", b"close") in client.sent[0]["headers"]

    asyncio.run(run())


def test_somewhat_too_long_is_read_to_its_end_and_far_too_long_is_not():
    async def run():
        some = Client(b"x" * 8, b"y" * 8, length=16)
        await answered(some)
        assert some.num_read == 16
        much = Client(*[b"x" * 8] * 100, length=800)
        await answered(much)
        assert much.num_read == 0 and much.status == 413
        unsaid = Client(*[b"x" * 8] * 100)
        await answered(unsaid)
        assert unsaid.num_read <= 32 and unsaid.status == 413

    asyncio.run(run())


def test_a_client_that_goes_before_its_body_is_whole_gets_nothing():
    async def run():
        client = Client()
        client.go()
        await answered(client, app=None)
        assert client.sent == []

    asyncio.run(run())


def test_a_body_that_does_not_come_is_a_408():
    async def run():
        client = Client()
        await ClientConnection(echo, 10, body_seconds=0.02)(
            client.scope, client.receive, client.send
        )
        assert client.status == 408
        assert "within 0.02 seconds" in json.loads(client.sent[1]["body"])["error"]["message"]
        assert (b"connection", b"close") in client.sent[0]["headers"]

    asyncio.run(run())


def test_work_is_cancelled_when_the_client_goes(caplog):
    async def run():
        client, ends = Client(b"x"), []

        async def slow(scope, receive, send):
            await receive()
            try:
                await asyncio.sleep(60)
            finally:
                ends.append("ended")

        task = asyncio.create_task(answered_inside(client, slow))
        await asyncio.sleep(0.01)
        client.go()
        await task
        assert ends == ["ended"] and client.sent == []

    async def answered_inside(client, app):
        named = RequestIds(ClientConnection(app, 10))
        client.scope["headers"].append((b"x-request-id", b"mine"))
        await named(client.scope, client.receive, client.send)

    with caplog.at_level("INFO", "uvicorn.error"):
        asyncio.run(run())
    assert caplog.messages == ["POST /x (request mine): 499, the client went."]


def test_what_comes_after_the_answer_is_done_in_peace():
    async def run():
        client, ends = Client(b"x"), []

        async def app(scope, receive, send):
            await echo(scope, receive, send)
            client.go()
            await asyncio.sleep(0.01)
            ends.append("done")

        await answered(client, app)
        assert ends == ["done"]

    asyncio.run(run())


def test_an_error_reaches_the_server():
    async def run():
        async def broken(scope, receive, send):
            raise KeyError("a bug")

        with pytest.raises(KeyError):
            await answered(Client(b"x"), broken)

    asyncio.run(run())


def test_the_app_may_wait_for_the_client_to_go():
    async def run():
        client, heard = Client(b"x"), []

        async def app(scope, receive, send):
            await receive()
            heard.append((await receive())["type"])

        task = asyncio.create_task(
            ClientConnection(app, 10)(client.scope, client.receive, client.send)
        )
        await asyncio.sleep(0.01)
        client.go()
        await task
        assert heard in ([], ["http.disconnect"])

    asyncio.run(run())


def test_a_compressed_body_is_refused_by_name():
    client = Client(b"x")
    client.scope["headers"] = [(b"content-encoding", b"gzip")]
    asyncio.run(answered(client))
    assert client.status == 415 and b"content-encoding" in client.sent[1]["body"]


def test_the_app_s_work_is_the_client_s_and_has_its_body_s_size():
    callers = []

    async def app(scope, receive, send):
        callers.append(await asyncio.create_task(caller()))  # of tasks that it starts, too
        await echo(scope, receive, send)

    async def caller():
        return CALLER.get()

    async def run():
        client = Client(b"abc", b"de")
        client.scope["client"] = ("10.0.0.1", 7)
        await asyncio.create_task(answered(client, app))
        assert CALLER.get() == Caller()

    async def answered(client, app):
        await ClientConnection(app, 10)(client.scope, client.receive, client.send)

    asyncio.run(run())
    assert callers == [Caller("10.0.0.1", 5)]
