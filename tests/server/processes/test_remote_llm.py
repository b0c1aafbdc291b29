"""RemoteLLM: an engine behind a channel gives what it gives next door, and loses nothing."""

import asyncio
import gc

import pytest
from joined import joined

from jaxspec import RequestOutputKind, SamplingParams
from jaxspec.engine.errors import DrainingError, EngineDeadError, QueueFullError

pytestmark = pytest.mark.soak

PROMPTS = ["def fibonacci(n):", "naïve ☕ = '", {"prompt_token_ids": [5, 6, 7]}]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
ASKED = {
    "drawn": SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=2),
    "stops": SamplingParams(max_tokens=24, temperature=1.0, seed=5, n=3, stop=["e", " "]),
    "logprobs": SamplingParams(max_tokens=5, seed=4, logprobs=2, prompt_logprobs=1),
    "at the end": SamplingParams(max_tokens=9, seed=4, output_kind=RequestOutputKind.FINAL_ONLY),
    "stops at the end": SamplingParams(
        max_tokens=24, seed=5, stop=["e"], output_kind=RequestOutputKind.FINAL_ONLY
    ),
}


async def read(stream):
    """Each sample: text, tokens, how it ended; and what the stream knows of its prompt."""
    found = {}
    async for delta in stream:
        text, tokens, rows, _, _ = found.get(delta.index, ("", [], [], None, None))
        end = delta.finish_reason, delta.stop_reason
        rows = rows + (delta.logprobs or [])
        found[delta.index] = (text + delta.text, tokens + delta.token_ids, rows, *end)
    return found, stream.prompt, stream.prompt_token_ids, stream.prompt_logprobs


async def nothing_is_left(llm, remote):
    async with asyncio.timeout(60):
        while (
            llm.num_running
            or llm.num_waiting
            or remote._client.submissions
            or remote._submissions
            or remote.engine_server._output_senders
        ):
            await asyncio.sleep(0.005)


def with_remote(served, test):
    async def run():
        async with asyncio.timeout(120), joined(served.llm) as remote:
            await test(remote)
            await nothing_is_left(served.llm, remote)

    asyncio.run(run())


@pytest.mark.parametrize("name", ASKED)
def test_streams_are_those_of_the_engine_itself(served, name):
    async def test(remote):
        for prompt in PROMPTS:
            found, want = [
                await read(await llm.submit(prompt, ASKED[name].clone()))
                for llm in (remote, served.llm)
            ]
            assert found == want

    with_remote(served, test)


def test_chats_stats_and_steps_come_through(served):
    messages = [{"role": "user", "content": "Hello"}]

    async def test(remote):
        params = SamplingParams(max_tokens=6, seed=4)
        found, want = [
            await read(await llm.submit_chat(messages, params, cache_salt="a"))
            for llm in (remote, served.llm)
        ]
        assert found == want
        snapshot = await remote.snapshot()
        assert snapshot.is_healthy and snapshot.engine["num_running"] == 0
        assert {metric.name for metric in snapshot.by_vllm} >= {"vllm:generation_tokens"}
        await remote.last_steps(4)
        await read(await remote.submit("a", params))
        assert await remote.last_steps(4)
        assert remote.get_default_sampling_params() == served.llm.get_default_sampling_params()
        assert remote.shapes == served.llm.shapes and remote.is_healthy

    with_remote(served, test)


def test_who_leaves_early_leaves_nothing(served):
    async def test(remote):
        num_tokens = served.llm.metrics()["num_tokens"]
        async with await remote.submit("x = [", LONG.clone()) as stream:
            await anext(stream)
        dropped = await remote.submit("x = [", LONG.clone())
        del dropped
        gc.collect()
        submitting = [asyncio.create_task(remote.submit("x = [", LONG.clone())) for _ in range(6)]
        for turns, task in enumerate(submitting):
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait(submitting)
        reading = asyncio.create_task(read(await remote.submit("x = [", LONG.clone())))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.wait([reading])
        await nothing_is_left(served.llm, remote)
        assert served.llm.metrics()["num_tokens"] - num_tokens < 400  # of 9 x 200: they were ended

    with_remote(served, test)


def test_a_prompt_is_refused_here_and_what_there_is_no_room_for_there(served, monkeypatch):
    async def test(remote):
        with pytest.raises(ValueError, match="at least one token"):
            await remote.submit({"prompt_token_ids": []})
        with pytest.raises(ValueError, match="A stream is of one prompt"):
            await remote.submit(["a", "b"])
        monkeypatch.setattr(served.llm._admission, "_max_reqs", 0)
        with pytest.raises(QueueFullError, match="max_num_queued_reqs=0"):
            await remote.submit("a")

    with_remote(served, test)


def test_what_fails_on_the_way_ends_streams_with_its_error(served):
    async def test(remote):
        stream = await remote.submit("x = [", LONG.clone())
        await anext(stream)
        remote.end(DrainingError())
        with pytest.raises(DrainingError):
            await read(stream)
        with pytest.raises(DrainingError):
            await remote.submit("a")
        assert not remote.is_healthy
        remote.error = None
        stream = await remote.submit("x = [", LONG.clone())
        remote._channel.close()
        await asyncio.wait(remote.hearing)
        with pytest.raises(EngineDeadError):
            await remote.snapshot()
        remote.end(EngineDeadError(OSError("gone")))
        with pytest.raises(EngineDeadError):
            await read(stream)

    with_remote(served, test)


@pytest.mark.parametrize("is_closed, told", [(False, "release"), (True, "abort")])
def test_what_nobody_read_to_its_end_is_settled_by_an_abort(served, is_closed, told):
    """Its reader left in the same turn of the event loop."""

    async def test(remote):
        stream = await remote.submit("x = [", SamplingParams(max_tokens=2, stop=["never"]))
        ((number, submission),) = remote._client.submissions.items()
        submission.receiver.is_closed, heard = is_closed, []
        notify = remote._channel.notify
        remote._channel.notify = lambda name, *args: (heard.append(name), notify(name, *args))
        async with asyncio.timeout(30):
            while not (submission.is_over or (is_closed and not submission.running)):
                await asyncio.sleep(0.005)
            if is_closed:  # the garbage collector closes it, and then calls this
                remote._abort(submission.receiver)
            while number in remote._client.submissions:
                await asyncio.sleep(0.005)
        assert heard[-1] == told
        del stream

    with_remote(served, test)


def test_refusals_do_not_share_a_traceback(served):
    async def test(remote):
        remote.end(DrainingError())
        for _ in range(3):
            with pytest.raises(DrainingError) as caught:
                await remote.submit("a")
            assert caught.value is not remote.error
        assert remote.error.__traceback__ is None

    with_remote(served, test)
