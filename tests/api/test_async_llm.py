"""AsyncLLM: streams that give what LLM.generate gives; what is refused; how it ends."""

import asyncio
import dataclasses
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
from callers import Ask, expected
from fake_llm_engine import FakeLLMEngine
from harness import FIXTURES, HYBRID, folder_of
from threads import ctrl_c_after
from tokenizer_folders import with_bytes

import jaxspec
from jaxspec import LLM, AsyncEngineArgs, RequestOutputKind, SamplingParams
from jaxspec.api import async_llm
from jaxspec.api.async_llm import AsyncLLM

OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "decode_buckets": [4], "prefill_buckets": [64]}
SIZES = {"max_num_seqs": 2, "decode_rows": (2,)}
LONG = Ask(prompt=0, max_tokens=12)
WORDS = ("def f(x):", "naïve café", "日本語のテキスト", "🙂🙃", "\n\n", "return", " ", "{}", "ß")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Random weights with the byte tokenizer: any text may come, in pieces of characters."""
    folder = with_bytes(folder_of(HYBRID), tmp_path_factory.mktemp("bytes"))
    return LLM(folder, **OPTIONS, max_model_len=96)


@pytest.fixture
def over(llm, monkeypatch):
    """An AsyncLLM over the same engine, which `llm` may step while it sleeps."""
    monkeypatch.setattr(async_llm, "LLMEngine", lambda *given, **options: llm)
    monkeypatch.setattr(llm, "close", lambda: None)
    monkeypatch.setattr(llm.session, "close", lambda: None)
    return AsyncLLM


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(async_llm, "LLMEngine", FakeLLMEngine)
    return lambda **options: AsyncLLM(**(SIZES | options))


def random_request(random):
    text = "".join(random.choice(WORDS, int(random.integers(1, 5))))
    has_logprobs = random.random() < 0.3
    params = SamplingParams(
        temperature=1.0,
        seed=int(random.integers(1000)),
        n=int(random.choice((1, 1, 3))),
        max_tokens=int(random.integers(1, 30)),
        logprobs=int(random.integers(0, 3)) if has_logprobs else None,
        prompt_logprobs=1 if has_logprobs else None,
        output_kind=random.choice(list(RequestOutputKind)),
        include_stop_str_in_output=bool(random.random() < 0.5),
        min_tokens=int(random.integers(0, 2)),
        ignore_eos=bool(random.random() < 0.5),
    )
    return text, params


def with_stops(random, output, params):
    """Parameters by which a part of the text that was given ends it."""
    text = output.outputs[0].text
    if len(text) < 4 or random.random() < 0.3:
        return params
    start = int(random.integers(1, len(text) - 2))
    return dataclasses.replace(params, stop=[text[start : start + int(random.integers(1, 4))]])


def joined(deltas, index, kind):
    """One sample of what a stream gave."""
    mine = [delta for delta in deltas if delta.index == index]
    assert not any(delta.finish_reason for delta in mine[:-1])
    assert kind is not RequestOutputKind.FINAL_ONLY or len(mine) == 1
    logprobs = [each for delta in mine for each in delta.logprobs or ()]
    return {
        "text": "".join(delta.text for delta in mine),
        "token_ids": [token for delta in mine for token in delta.token_ids],
        "finish_reason": mine[-1].finish_reason,
        "stop_reason": mine[-1].stop_reason,
        "num_tokens": mine[-1].metrics.num_tokens,
        "logprobs": None if mine[-1].logprobs is None else rounded(logprobs),
    }


def told(output):
    """The same of a sample that `generate` gave."""
    names = "text", "token_ids", "finish_reason", "stop_reason"
    logprobs = None if output.logprobs is None else rounded(output.logprobs)
    fields = {name: getattr(output, name) for name in names}
    return fields | {"num_tokens": output.metrics.num_tokens, "logprobs": logprobs}


def rounded(logprobs):
    return [{i: (each.logprob, each.rank) for i, each in entry.items()} for entry in logprobs]


def assert_same(got, want):
    found, expected = got.pop("logprobs"), want.pop("logprobs")
    assert got == want
    assert (found is None) == (expected is None)
    for mine, theirs in zip(found or (), expected or (), strict=True):
        assert list(mine) == list(theirs)
        values = [[value for value, _ in each.values()] for each in (mine, theirs)]
        np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.soak
def test_many_streams_at_once_give_what_generate_gives(llm, over):
    """Of requests with seeds, stop strings, samples, logprobs and characters of several bytes."""
    random = np.random.default_rng(0)
    prompts, params = zip(*[random_request(random) for _ in range(90)], strict=True)
    free = llm.generate(list(prompts), list(params))
    params = [with_stops(random, *each) for each in zip(free, params, strict=True)]
    want = llm.generate(list(prompts), list(params))
    assert sum(o.outputs[0].stop_reason is not None for o in want) > 22
    assert sum("\N{REPLACEMENT CHARACTER}" in o.outputs[0].text for o in want) > 9

    async def stream(llm, prompt, param):
        found = await llm.submit(prompt, param)
        return found, [delta async for delta in found]

    async def all_at_once():
        async with over() as llm:
            return await asyncio.gather(*map(lambda p, q: stream(llm, p, q), prompts, params))

    for (found, deltas), output, param in zip(
        asyncio.run(all_at_once()), want, params, strict=True
    ):
        assert found.prompt_token_ids == output.prompt_token_ids
        assert found.prompt == output.prompt
        assert found.metrics.num_tokens == output.metrics.num_tokens
        for sample in output.outputs:
            assert_same(joined(deltas, sample.index, param.output_kind), told(sample))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_of_generate_are_vllms(llm, over, kind):
    """All so far, what is new, or all at the end; the last one says that it is the last."""
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=9, logprobs=1)
    params.output_kind = kind
    (want,) = llm.generate("Grüße", params)

    async def read():
        async with over() as llm:
            return [output async for output in llm.generate("Grüße", params, "mine")]

    outputs = asyncio.run(read())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert all((o.request_id, o.prompt) == ("mine", "Grüße") for o in outputs)
    if kind is RequestOutputKind.DELTA:
        for sample in want.outputs:
            mine = [c for o in outputs for c in o.outputs if c.index == sample.index]
            assert "".join(c.text for c in mine) == sample.text
            assert [t for c in mine for t in c.token_ids] == sample.token_ids
            assert sum(len(c.logprobs) for c in mine) == len(sample.token_ids)
    else:
        assert [c.text for c in outputs[-1].outputs] == [c.text for c in want.outputs]
        for found, sample in zip(outputs[-1].outputs, want.outputs, strict=True):
            assert_same(told(found), told(sample))
        assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)


def test_engine_args_make_one_and_shutdown_closes_it(monkeypatch):
    made = []

    def engine(model, **options):
        made.append((model, options))
        return FakeLLMEngine(**SIZES)

    monkeypatch.setattr(async_llm, "LLMEngine", engine)

    async def run():
        args = AsyncEngineArgs("folder", max_num_queued_reqs=1, page_size=8)
        llm = AsyncLLM.from_engine_args(args)
        (model, options), ask = made[0], llm._engine.ask(LONG)
        assert (model, options["page_size"]) == ("folder", 8)
        assert "max_num_queued_reqs" not in options
        (last,) = [o async for o in llm.generate(ask) if o.finished]
        stream = await llm.submit(llm._engine.ask(LONG), request_id="a")
        await llm.abort(["a", "nobody's"])
        assert [delta async for delta in stream][-1].finish_reason == "abort"
        llm.shutdown(30)
        assert not llm.is_healthy and llm._engine.session.is_closed
        with pytest.raises(jaxspec.DrainingError):
            await llm.submit(llm._engine.ask(LONG))
        return last

    assert asyncio.run(run()).outputs[0].finish_reason == "length"


def test_a_chat_is_that_of_chat(llm, over):
    messages = [{"role": "user", "content": "Grüße"}]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8)
    (want,) = llm.chat(messages, params)

    async def chat():
        async with over() as llm:
            stream = await llm.submit_chat(messages, params, request_id="mine")
            return stream, "".join([delta.text async for delta in stream])

    stream, text = asyncio.run(chat())
    assert (stream.prompt, text, stream.request_id) == (want.prompt, want.outputs[0].text, "mine")
    assert stream.num_cached_tokens >= want.num_cached_tokens  # it came before


@pytest.mark.soak
def test_prompt_logprobs_come_with_the_first_piece(llm, over):
    params = SamplingParams(seed=1, max_tokens=3, logprobs=0, prompt_logprobs=0)
    (want,) = llm.generate("hello", params)

    async def read():
        async with over() as llm:
            return [delta async for delta in await llm.submit("hello", params)]

    first, *others = asyncio.run(read())
    assert len(first.prompt_logprobs) == len(want.prompt_logprobs)
    assert not any(delta.prompt_logprobs for delta in others)


BAD = [
    (("",), {}, "at least one token"),
    (([999_999],), {}, "999999"),
    ((["a", "b"],), {}, "of one prompt, got 2"),
    ((3,), {}, "prompts must be a text"),
    (("a", "greedy"), {}, "sampling_params must be SamplingParams"),
    (("a",), {"priority": "high"}, "priority must be an integer"),
    (("a",), {"request_id": 3}, "request_ids must be"),
    (("a" * 200,), {}, "max_model_len=96"),
    (("a", SamplingParams(stop_token_ids=[999_999])), {}, "stop_token_ids"),
    (("\ud800",), {}, "half of a surrogate pair"),
]


def test_what_is_refused_queues_nothing(llm, over):
    async def refuse():
        async with over() as llm:
            for given, options, message in BAD:
                with pytest.raises(ValueError, match=message):
                    await llm.submit(*given, **options)
                with pytest.raises(ValueError, match=message):
                    await anext(llm.generate(*given, **options))
            for messages, template, error in (
                ([{"content": "no role"}], {}, ValueError),
                ([[{"role": "user", "content": "a"}]] * 2, {}, ValueError),
                ([{"role": "user", "content": "a"}], {"tool": []}, TypeError),
            ):
                with pytest.raises(error):
                    await llm.submit_chat(messages, **template)
            assert llm.num_waiting == llm.num_running == llm._admission.num_unfinished == 0
            assert llm.is_healthy and llm._thread._mail.empty()

    before = llm.metrics()["num_steps"]
    asyncio.run(refuse())
    assert llm.metrics()["num_steps"] == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs must be an integer of at least 1, got 0"),
        ({"max_num_queued_tokens": 1.5}, "max_num_queued_tokens must be an integer"),
        ({"queue_timeout": 0}, "queue_timeout must be seconds above 0, got 0"),
        ({"queue_timeout": "long"}, "queue_timeout must be seconds above 0"),
        ({"queue_timeout": float("nan")}, "queue_timeout must be seconds above 0"),
        ({"stream_interval": 0}, "stream_interval must be an integer of at least 1, got 0"),
        ({"stream_interval": True}, "stream_interval must be an integer of at least 1, got True"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_a_wrong_option_is_refused_before_a_thread_starts(options, message):
    before = set(threading.enumerate())  # some of which may end
    with pytest.raises(ValueError, match=message):
        AsyncLLM(**options)
    with pytest.raises(TypeError, match="max_num_seq"):
        AsyncLLM(max_num_seq=3)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("interval", [1, 3, 99])
def test_an_interval_makes_fewer_pieces_of_the_same_text(fake, interval):
    asks = [Ask(prompt=prompt, max_tokens=12, n=2) for prompt in range(5)]
    asks.append(Ask(prompt=2, max_tokens=12, n=2, ends_at=6, letters=2))

    async def read(llm, ask):
        stream = await llm.submit(llm._engine.ask(ask))
        deltas = [delta async for delta in stream]
        for sample_stream in stream._output_queue.sample_streams:
            mine = [delta for delta in deltas if delta.index == sample_stream.request.index]
            _, finish, text = expected(sample_stream.request)
            assert "".join(delta.text for delta in mine) == text
            assert mine[-1].finish_reason == finish.reason
            sizes = [len(delta.token_ids) for delta in mine]
            assert ask.letters or all(size >= interval for size in sizes[1:-1])
        assert stream.metrics.arrival_time <= stream.metrics.scheduled_time

    async def all_at_once():
        async with fake(stream_interval=interval) as llm:
            await asyncio.gather(*(read(llm, ask) for ask in asks))

    asyncio.run(all_at_once())


def test_stats_are_those_of_the_llm(llm, over):
    async def ask():
        async with over() as llm:
            await llm.warm_up(SamplingParams(seed=1))
            return llm, llm.metrics(), llm.get_metrics()

    found, metrics, named = asyncio.run(ask())
    assert set(metrics) == {*llm.metrics(), "num_running", "num_waiting", "kv_cache_usage"}
    assert [metric.name for metric in named] == [metric.name for metric in llm.get_metrics()]
    assert found.tokenizer is llm.tokenizer and found.max_model_len == 96
    assert found.model_name == llm.model_name
    assert found.get_default_sampling_params() == llm.get_default_sampling_params()


def test_lower_priorities_come_first_and_among_equals_those_that_came_first(fake):
    async def order():
        async with fake(max_num_seqs=1, decode_rows=(1,)) as llm:
            held = await llm.submit(llm._engine.ask(LONG))
            done = []

            async def visit(name, priority):
                prompt = llm._engine.ask(Ask(prompt=1, max_tokens=3))
                async for _ in await llm.submit(prompt, priority=priority):
                    pass
                done.append(name)

            gate = threading.Event()
            llm._engine.schedule.runner.at["result"] = lambda: gate.wait(10)
            tasks = [
                asyncio.create_task(visit(name, priority))
                for name, priority in (("late", 1), ("a", 0), ("b", 0), ("first", -1))
            ]
            while llm._admission.num_unfinished < 5:
                await asyncio.sleep(0.001)
            gate.set()
            async for _ in held:
                pass
            await asyncio.gather(*tasks)
            return done

    first, *others, last = asyncio.run(order())
    assert (first, sorted(others), last) == ("first", ["a", "b"], "late")


def test_a_request_ends_by_its_id_and_leaves_no_text_that_was_held_back(fake):
    """A stop string may have begun, or a character."""

    async def abort():
        async with fake() as llm:
            ask = Ask(prompt=1, max_tokens=12, ends_at=8, letters=3)
            whole = [d.text async for d in await llm.submit(llm._engine.ask(ask))]
            for count in range(1, 6):
                name = f"number {count}"
                stream = await llm.submit(llm._engine.ask(ask), request_id=name)
                gate = threading.Event()
                deltas = [await anext(stream)]
                llm._engine.schedule.runner.at["dispatch"] = lambda gate=gate: gate.wait(10)
                await llm.abort(name)
                await llm.abort("nobody's")
                gate.set()
                deltas += [delta async for delta in stream]
                text = "".join(delta.text for delta in deltas)
                assert "".join(whole).startswith(text)
                assert deltas[-1].finish_reason in ("abort", "stop")
                assert [d async for d in stream] == []

    asyncio.run(abort())


def test_a_stream_has_one_reader_in_its_own_loop(fake):
    async def read():
        async with fake() as llm:
            gate = threading.Event()
            llm._engine.schedule.runner.at["result"] = lambda: gate.wait(10)
            stream = await llm.submit(llm._engine.ask(LONG))
            first = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="by one task at a time"):
                await anext(stream)
            with pytest.raises(RuntimeError, match="in the event loop that submitted"):
                await asyncio.to_thread(lambda: asyncio.run(stream.__anext__()))
            gate.set()
            deltas = [await first] + [delta async for delta in stream]
            assert deltas[-1].finish_reason == "length"

    asyncio.run(read())


def test_a_tokenizer_that_fails_ends_its_own_stream_alone(fake, monkeypatch):
    async def read():
        async with fake() as llm:
            broken, sound = [await llm.submit(llm._engine.ask(LONG)) for _ in range(2)]

            def fail(ids):
                raise ValueError("no such token")

            monkeypatch.setattr(broken._output_queue.sample_streams[0].reader._stream, "push", fail)
            with pytest.raises(ValueError, match="no such token"):
                [delta async for delta in broken]
            assert [delta async for delta in sound][-1].finish_reason == "length"
            assert await llm.drain(10) and llm.is_healthy

    asyncio.run(read())


def test_ctrl_c_ends_the_loop_the_streams_and_the_threads(fake):
    made = []

    async def read():
        async with fake() as llm:
            made.append(llm)
            while True:
                async for _ in llm.generate(llm._engine.ask(LONG)):
                    pass

    with ctrl_c_after(0.3, heard_within=20):
        asyncio.run(read())
    (llm,) = made
    assert llm._thread.ended.done() and not llm._engine.session.has_work
    assert not llm._admission.num_unfinished


def test_one_that_is_lost_closes_itself(fake):
    async def leave():
        llm = fake()
        stream = await llm.submit(llm._engine.ask(LONG))
        await anext(stream)
        return llm._thread.ended, llm._engine.session, weakref.ref(llm)

    ended, session, lost = asyncio.run(leave())
    gc.collect()
    assert lost() is None
    ended.result(10)
    assert session.is_closed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_forked_child_is_refused(fake):
    llm = fake()

    async def begin():
        stream = await llm.submit(llm._engine.ask(LONG))
        child = os.fork()
        if not child:
            refused = 0
            for call in (
                lambda: llm.submit("0"),
                lambda: llm.generate("0").__anext__(),
                lambda: llm.abort("0"),
                lambda: anext(stream),
                llm.drain,
                llm.close,
            ):
                try:
                    call().send(None)
                except RuntimeError as error:
                    refused += "made it" in str(error)
                except BaseException:
                    pass
            os._exit(refused)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = "".join([delta.text async for delta in stream])
        await llm.close()
        return status, text

    status, text = asyncio.run(begin())
    assert status == 6 and text


EXIT = """
import asyncio, jaxspec
llm = jaxspec.AsyncLLM({folder!r}, **{options!r})
params = jaxspec.SamplingParams(max_tokens=80, ignore_eos=True)
kept = []

async def main():
    kept.append(await llm.submit([1, 2, 3], params))
    await anext(kept[0])

asyncio.run(main())
print("leaving", flush=True)
"""


@pytest.mark.soak
def test_python_ends_without_a_close(tmp_path):
    """While a step runs: it is waited for, and nothing hangs or crashes."""
    code = EXIT.format(folder=str(FIXTURES / "llama"), options=OPTIONS | {"max_model_len": 96})
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "leaving\n" and "Traceback" not in result.stderr


def test_what_is_exported_is_there():
    for name in ("AsyncLLM", "AsyncStream", "QueueFullError", "EngineDeadError", "ServiceError"):
        assert name in jaxspec.__all__ and hasattr(jaxspec, name)
