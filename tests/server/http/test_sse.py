"""Events as bytes: what a JSON parser reads, keep-alives while nothing comes, stalled clients."""

import asyncio
import json

from jaxspec.server.http.sse import DONE, Chunks, EventStream, event


def data(chunk):
    (line,) = chunk.decode().strip().split("\n")
    return json.loads(line.removeprefix("data: "))


def test_an_event_is_json_behind_its_name():
    assert event({"a": "é\n"}, "ping").startswith(b"event: ping\ndata: ")
    assert data(event({"a": "é\n"})) == {"a": "é\n"}
    assert event({"a": 1}).endswith(b"\n\n") and DONE == b"data: [DONE]\n\n"


def test_chunks_share_what_is_theirs():
    chunks = Chunks(id="a", created=1)
    assert data(chunks.chunk(b'{"index":0}')) == {
        "id": "a",
        "created": 1,
        "choices": [{"index": 0}],
    }
    assert data(chunks.chunk(b"", {"n": 2})) == {
        "id": "a",
        "created": 1,
        "choices": [],
        "usage": {"n": 2},
    }


async def sent(events, *, keep_alive=60.0, stall=60.0, send=None):
    found = []

    async def keep(message):
        found.append(message)

    stream = EventStream(events, keep_alive=keep_alive, stall_timeout=stall)
    task = asyncio.create_task(stream({"type": "http"}, None, send or keep))
    await asyncio.wait({task})
    return task, found


def test_events_are_sent_as_they_come_and_then_the_end():
    async def events():
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    async def run():
        _, (start, *parts, end) = await sent(events())
        headers = dict(start["headers"])
        assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
        assert headers[b"cache-control"] == b"no-cache" and b"content-length" not in headers
        assert [p["body"] for p in parts] == [b"data: 1\n\n", b"data: 2\n\n"]
        assert all(p["more_body"] for p in parts) and not end.get("more_body")

    asyncio.run(run())


def test_a_silent_stream_says_that_it_lives():
    async def events():
        await asyncio.sleep(0.08)
        yield b"data: 1\n\n"

    async def run():
        _, found = await sent(events(), keep_alive=0.02)
        bodies = [m["body"] for m in found if m["type"] == "http.response.body"]
        assert bodies[0] == b": keep-alive\n\n" and b"data: 1\n\n" in bodies

    asyncio.run(run())


async def stuck(message):
    """A client that takes the head of an answer and no more."""
    if message["type"] == "http.response.body":
        await asyncio.sleep(60)


def test_a_client_that_takes_nothing_is_given_up_and_the_events_are_closed():
    closed = []

    async def events():
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            closed.append(True)

    async def run():
        task, _ = await sent(events(), stall=0.02, send=stuck)
        assert task.cancelled() and closed == [True]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_client_that_does_not_take_the_sign_of_life_either_is_given_up():
    closed = []

    async def events():
        try:
            await asyncio.sleep(60)
            yield b"data: 1\n\n"
        finally:
            closed.append(True)

    async def run():
        async with asyncio.timeout(20):
            task, _ = await sent(events(), keep_alive=0.02, stall=0.04, send=stuck)
        assert task.cancelled() and closed == [True]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
