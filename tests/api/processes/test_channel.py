"""Channel: what is told comes in order, what is asked is answered, nobody waits for who is gone."""

import asyncio
import contextlib
import socket

import pytest

from jaxspec.api.processes import channel as channel_module
from jaxspec.api.processes.channel import Channel
from jaxspec.engine.errors import QueueFullError
from jaxspec.server.http.http_server import event_loop


class Unsendable(Exception):
    def __init__(self, first, second):
        super().__init__(first)


@contextlib.asynccontextmanager
async def pair():
    """Two ends, and a list of what the second one was told."""
    near, far = [await Channel.of(end) for end in socket.socketpair()]
    told = []

    async def double(number):
        await asyncio.sleep(0.001 * number)
        return 2 * number

    async def refuse(error):
        raise error

    async def never():
        await asyncio.sleep(60)

    far.handlers = {"note": lambda *given: told.append(given), "double": double}
    far.handlers |= {"refuse": refuse, "never": never, "crash": lambda: 1 / 0}
    tasks = [asyncio.create_task(each.run()) for each in (near, far)]
    try:
        yield near, far, told, tasks
    finally:
        near.close()
        await asyncio.wait(tasks)


def in_a_loop(test):
    async def run():
        async with asyncio.timeout(30), pair() as found:
            await test(*found)

    @pytest.mark.parametrize("loop", [event_loop, asyncio.new_event_loop])
    def wrapped(loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(run())

    return wrapped


@in_a_loop
async def test_what_is_told_comes_in_order_and_what_is_asked_is_answered(near, far, told, tasks):
    for number in range(100):
        near.notify("note", number, b"x" * 10_000)
    assert await asyncio.gather(*(near.call("double", n) for n in (9, 1, 5))) == [18, 2, 10]
    assert told == [(number, b"x" * 10_000) for number in range(100)]


@in_a_loop
async def test_errors_come_back_or_at_least_their_words(near, far, told, tasks):
    with pytest.raises(QueueFullError, match="max_num_queued_reqs=3"):
        await near.call("refuse", QueueFullError("max_num_queued_reqs", 3, 4))

    async def fail():
        raise Unsendable("its words", 2)

    async def give_a_function():
        return lambda: None

    far.handlers = {"fail": fail, "give": give_a_function}
    with pytest.raises(RuntimeError, match="^Unsendable: its words$"):
        await near.call("fail")
    with pytest.raises(Exception, match="pickle"):
        await near.call("give")


@in_a_loop
async def test_what_can_not_be_sent_is_not_waited_for(near, far, told, tasks):
    with pytest.raises(Exception, match="pickle"):
        await near.call("double", lambda: None)
    assert not near._asked and await near.call("double", 1) == 2


@in_a_loop
async def test_the_first_word_is_heard_before_there_are_handlers(near, far, told, tasks):
    first, second = [await Channel.of(end) for end in socket.socketpair()]
    first.notify("config", 3)
    first.notify("note", 4)
    assert await second.receive_first() == 3
    heard = []
    second.handlers = {"note": heard.append}
    running = asyncio.create_task(second.run())
    first.close()
    await running
    assert heard == [4]
    with pytest.raises(EOFError):
        await second.receive_first()


@in_a_loop
async def test_a_side_that_reads_nothing_is_given_up(near, far, told, tasks):
    deaf, other = [await Channel.of(end) for end in socket.socketpair()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_module, "_MAX_BUFFERED", 1000)
        other.notify("note", b"x" * 10_000_000)
    with pytest.raises(ConnectionError):
        await asyncio.sleep(0)
        await other.call("note")
    deaf.close()


@in_a_loop
async def test_who_asks_one_that_goes_hears_of_it(near, far, told, tasks):
    asking = asyncio.create_task(near.call("never"))
    cancelled = asyncio.create_task(near.call("never"))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    far.close()
    with pytest.raises(ConnectionError):
        await asking
    with pytest.raises(ConnectionError):
        await near.call("double", 1)
    near.notify("note", "nobody hears it")
    await asyncio.wait(tasks)
    assert told == []


@in_a_loop
async def test_a_handler_that_fails_ends_the_channel_with_its_error(near, far, told, tasks):
    near.notify("crash")
    with pytest.raises(ZeroDivisionError):
        await tasks[1]
    await tasks[0]
