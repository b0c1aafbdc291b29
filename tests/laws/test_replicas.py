"""Replicas give the tokens of one engine, and one that dies ends its own requests alone."""

import asyncio
import contextlib
import inspect
import os
import signal
import time

import psutil
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.processes import replica_group
from jaxspec.engine.errors import ReplicaDiedError, ReplicasDeadError

pytestmark = pytest.mark.soak
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "decode_buckets": [4],
    "prefill_buckets": [64],
    "max_model_len": 512,
}
ASKED = {
    "greedy": SamplingParams(max_tokens=16, temperature=0.0),
    "without a seed": SamplingParams(max_tokens=16, temperature=1.0),
    "with a seed, forked": SamplingParams(max_tokens=16, temperature=1.0, seed=3, n=3),
    "stop strings": SamplingParams(max_tokens=40, temperature=1.0, n=2, stop=["e", " "]),
    "logprobs": SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1),
    "a form of the device": SamplingParams(
        max_tokens=24, temperature=1.0, structured_outputs={"regex": "(?:ab|cd){3,9}"}
    ),
    "a form of the host": SamplingParams(
        max_tokens=24, temperature=1.0, structured_outputs={"json_object": True}
    ),
    "top-k": SamplingParams(max_tokens=12, temperature=0.8, top_k=20, top_p=0.9),
}
PROMPTS = ["def fibonacci(n):", "import os", "x = ["]
BATCH = [prompt for prompt in PROMPTS for _ in ASKED]
PARAMS = [*ASKED.values()] * len(PROMPTS)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
SHARED = list(range(40, 140))  # over three blocks of the router


@pytest.fixture(scope="module")
def two(short_model):
    with LLM(short_model, data_parallel_size=2, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def one(short_model):
    with LLM(short_model, **OPTIONS) as llm:
        yield llm


def viewed(outputs):
    """What equals; logprobs are rounded differently in other batches."""
    return [
        (
            output.request_id,
            output.prompt,
            len(output.prompt_logprobs or ()),
            [
                (
                    *(each.text, each.token_ids, each.finish_reason, each.stop_reason),
                    len(each.logprobs or ()),
                )
                for each in output.outputs
            ],
        )
        for output in outputs
    ]


def processes_of(llm):
    return {index: replica.process for index, replica in llm.group._replicas.items()}


def until(is_so, seconds=300):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_every_call_gives_what_one_engine_gives(two, one):
    """In the same order of calls, for prompts without a seed are numbered."""

    def stepped(llm):
        for number, prompt in enumerate(PROMPTS):
            llm.add_request(f"step {number}", prompt, ASKED["without a seed"])
        found = {}
        while llm.has_unfinished_requests():
            found |= {output.request_id: output for output in llm.step()}
        return [found[f"step {number}"] for number in range(len(PROMPTS))]

    def queued(llm):
        llm.enqueue(BATCH, PARAMS)
        return llm.wait_for_completion()

    def streamed(llm):
        with llm.stream("import os", ASKED["stop strings"]) as deltas:
            texts = {}
            for delta in deltas:
                texts[delta.index] = texts.get(delta.index, "") + delta.text
        return sorted(texts.items())

    chat = [{"role": "user", "content": "Hello"}]
    calls = {
        "generate": lambda llm: viewed(llm.generate(BATCH, PARAMS)),
        "again": lambda llm: viewed(llm.generate(BATCH, PARAMS)),
        "enqueue": lambda llm: viewed(queued(llm)),
        "step": lambda llm: viewed(stepped(llm)),
        "stream": streamed,
        "chat": lambda llm: viewed(llm.chat([chat, chat], ASKED["without a seed"])),
        "score": lambda llm: [score.token_ids for score in llm.score(PROMPTS)],
    }
    for name, call in calls.items():
        assert call(two) == call(one), name
    found = two.metrics()
    assert sum(found["acceptance"]["mtp"]["drafted_per_position"]) > 0
    by_replica = [last.engine["num_tokens"] for last in two.group._last.values()]
    assert len(by_replica) == 2 and all(by_replica), "both served"
    assert found["num_tokens"] == sum(by_replica)
    assert two.group._router._in_flight == {0: 0, 1: 0} and not two.session._buffers


def test_a_prefix_goes_where_it_is_cached(two):
    two.reset_prefix_cache()
    greedy = SamplingParams(max_tokens=2, temperature=0.0)
    for number in range(4):
        tails = [SHARED + [number, 300 + tail] for tail in range(2)]
        outputs = two.generate([{"prompt_token_ids": tail} for tail in tails], greedy)
        if number:
            assert all(output.num_cached_tokens > 0 for output in outputs)
    (salted,) = two.generate([{"prompt_token_ids": SHARED, "cache_salt": "s"}], greedy)
    assert salted.num_cached_tokens == 0


def test_what_only_one_engine_can_do_is_refused_by_name(two, tmp_path):
    calls = {
        "memory_map": lambda: two.memory_map(),
        "save_flight": lambda: two.save_flight(tmp_path / "a"),
        "restart_flight": lambda: two.restart_flight(),
        "trace": lambda: two.trace(),
        "export_request": lambda: two.export_request("a"),
        "prefill": lambda: two.prefill("a"),
        "import_request": lambda: two.import_request(None),
        "weight_specs": lambda: two.weight_specs(),
        "update_weights": lambda: two.update_weights({}),
        "export_weights": lambda: two.export_weights(),
        "pause": lambda: two.pause(),
        "resume": lambda: two.resume(),
        "sleep": lambda: two.sleep(),
        "wake_up": lambda: two.wake_up(),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name}.*data_parallel_size=2"):
            call()
    with pytest.raises(ValueError, match="profiler_folder"):
        two.start_profile()
    works = {"close", "abort", "abort_request", "beam_search", "from_engine_args"}
    works |= {"collective_rpc", "get_default_sampling_params", "get_num_unfinished_requests"}
    works |= {"get_tokenizer", "get_metrics", "get_ready", "has_unfinished_requests", "prepare"}
    works |= {"stream_chat", "warm_up", "snapshot", "stop_profile", "admit"}
    works |= {"generate", "enqueue", "wait_for_completion", "add_request", "step", "stream"}
    works |= {"chat", "score", "metrics", "reset_prefix_cache", "start_profile"}
    methods = {name for name, _ in inspect.getmembers(LLM, callable) if not name.startswith("_")}
    assert methods == works | calls.keys(), "each public method works or is refused"


def test_an_abort_ends_a_request_in_its_replica(two):
    with two.stream("x = [", LONG, request_id="a") as deltas:
        next(deltas)
        two.abort("a")
        *_, last = deltas
    assert last.finish_reason == "abort"
    two.add_request("b", "x = [", LONG)
    two.abort_request("b")
    with two.stream("x = [", LONG) as deltas:
        next(deltas)
    until(lambda: not two.num_running)


def test_a_replica_that_dies_ends_its_own_requests_alone_and_comes_back(two):
    streams = [two.stream(prompt, LONG) for prompt in ("def f(", "class A")]
    for stream in streams:
        next(stream)
    before = processes_of(two)
    os.kill(before[0].pid, signal.SIGKILL)
    found = []
    for stream in streams:
        try:
            found.append(sum(len(delta.token_ids) for delta in stream))
        except ReplicaDiedError as error:
            found.append(str(error))
    (said,) = [each for each in found if isinstance(each, str)]
    assert "Replica 1 of 2" in said and "status -9" in said
    assert [each for each in found if not isinstance(each, str)] != [0]
    outputs = two.generate(PROMPTS, ASKED["greedy"])  # by the other one
    until(lambda: len(processes_of(two)) == 2)
    after = processes_of(two)
    assert after[1] is before[1] and after[0].pid != before[0].pid
    tokens = two.metrics()["num_tokens"]
    assert viewed(two.generate(PROMPTS, ASKED["greedy"]))[0][1:] == viewed(outputs)[0][1:]
    assert two.metrics()["num_tokens"] > tokens > 400  # those of the dead one are counted
    assert two.group._router._in_flight == {0: 0, 1: 0}


@pytest.mark.soak
def test_one_that_dies_again_and_again_ends_all_with_a_clear_error(short_model, monkeypatch):
    monkeypatch.setattr(replica_group, "WAITS", (0.0,))

    def children():
        return set(psutil.Process().children(recursive=True))

    before = children()

    async def run():
        async with AsyncLLM(short_model, data_parallel_size=2, **OPTIONS) as llm:
            started = children() - before
            assert llm.is_healthy and llm.is_ready and len(started) >= 2
            group = llm._engine.group
            for _ in range(2):
                async with asyncio.timeout(300):
                    while 1 not in group._replicas:
                        await asyncio.sleep(0.02)
                os.kill(group._replicas[1].process.pid, signal.SIGKILL)
                async with asyncio.timeout(60):
                    while 1 in group._replicas:
                        await asyncio.sleep(0.02)
            async with asyncio.timeout(60):
                while llm.error is None:
                    await asyncio.sleep(0.02)
            assert not llm.is_healthy and "Replica 2 of 2 ended 2 times" in str(llm.error)
            with pytest.raises(ReplicasDeadError):
                await llm.submit("a")
        _, alive = await asyncio.to_thread(psutil.wait_procs, started, 30)
        assert not alive and children() <= before

    asyncio.run(run())


def test_a_start_that_fails_says_why_and_leaves_no_process(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(FileNotFoundError):
        LLM(tmp_path / "nothing", data_parallel_size=2)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert set(psutil.Process().children(recursive=True)) <= before
