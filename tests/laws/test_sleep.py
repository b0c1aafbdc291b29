"""Laws of pauses and sleep: no token changes, nothing is compiled, and device memory is freed.

With drafts and without, at any moment of a generation, at both levels, with cached prefixes on the
device and in host memory. Bugs are planted at the end.
"""

import asyncio
import dataclasses
import functools
import gc
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from harness import FIXTURES
from pairwise import soak
from trees import tensors_of

import jaxspec
from jaxspec import LLM, AsyncLLM, PausedError, SamplingParams
from jaxspec.api.replicated_engine import ReplicatedEngine
from jaxspec.engine.session import Session
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.scheduler.scheduler import Scheduler

LONG = True
QWEN3 = FIXTURES / "qwen3"
SIZES = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "decode_buckets": [4],
    "prefill_buckets": [32],
    "max_model_len": 96,
    "page_size": 4,
    "num_pages": 150,
    "enable_prefix_caching": True,
    "background_compilation": False,
    "show_progress": False,
}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "draft_head_dtype": "float8_e4m3fn"}
ENGINES = {
    "3 drafts": {"speculative_config": MTP, "state_policy": "snapshot"},
    "0 drafts, host tier": {
        "speculative_config": None,
        "state_policy": "replay",
        "kv_offloading_size": 0.01,
    },
}
SAMPLED = SamplingParams(temperature=0.7, seed=5, max_tokens=20, logprobs=0)
GREEDY = dataclasses.replace(SAMPLED, temperature=0.0)
FORKED = dataclasses.replace(SAMPLED, n=2, max_tokens=8)
RANDOM = np.random.default_rng(1)
PROMPTS = [{"prompt_token_ids": RANDOM.integers(5, 250, n).tolist()} for n in (21, 9, 40, 4)]
PARAMS = [SAMPLED, GREEDY, FORKED, dataclasses.replace(GREEDY, seed=6)]
STEPS = 120  # more than a generation has


@pytest.fixture(scope="module")
def tensors(short_model):
    return tensors_of(short_model)


@pytest.fixture(scope="module", params=["3 drafts", soak("0 drafts, host tier")])
def llm(short_model, tensors, request):
    with LLM(short_model, **SIZES, **ENGINES[request.param]) as llm:
        llm.session.scheduler.prefixes.min_uncached = 1  # short prompts have cached states, too
        llm.update_weights(tensors)  # compiles what later updates need
        yield llm


@pytest.fixture(autouse=True)
def awake(request):
    """Each test ends as it began."""
    yield
    for name in {"llm", "drafted"} & set(request.fixturenames):
        llm = request.getfixturevalue(name)
        assert not (llm.is_paused or llm.is_sleeping or llm.session.has_work)
        assert len(llm.session.scheduler._free_slots) == llm.shapes.num_slots - 1


def told(samples):
    """Tokens, and their logprobs."""
    found = []
    for sample in samples:
        output = sample.output()
        places = zip(output.token_ids, output.logprobs, strict=True)
        found.append((output.token_ids, [place[token].logprob for token, place in places]))
    return found


def run(llm, after=0, act=lambda: None, prompts=PROMPTS, params=PARAMS):
    """The samples of prompts; `act` is called after so many collected steps."""
    samples = [sample for group in llm.prepare(prompts, params) for sample in group]
    llm.session.add(samples)
    for number in range(1, STEPS):
        if not llm.session.has_work:
            break
        llm.session.step()
        if number == after:
            act()
    return told(samples)


@pytest.fixture(scope="module")
def want(llm):
    llm.reset_prefix_cache()
    return run(llm)


def check_same(given, want):
    assert [tokens for tokens, _ in given] == [tokens for tokens, _ in want]
    for (_, one), (_, other) in zip(given, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.fixture
def compiled():
    """Names of what XLA compiles meanwhile."""
    names = []

    def listen(name, seconds, **_):
        names.extend([name] if "backend_compile" in name else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def device_bytes():
    gc.collect()
    there = [each for each in jax.live_arrays() if each.sharding.memory_kind == "device"]
    return sum(each.nbytes for each in there)


# Pauses


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_pause_changes_no_token(llm, want, after, compiled):
    """It also awaits the steps in flight, and no other is dispatched."""

    def pause():
        llm.pause()
        engine = llm.session.engine
        assert llm.is_paused and not llm.is_sleeping and not engine._in_flight
        num_steps, work = engine.metrics.num_steps, llm.session.has_work
        assert llm.step() == []
        llm.pause()
        assert (engine.metrics.num_steps, llm.session.has_work) == (num_steps, work)
        llm.resume()
        llm.resume()

    llm.reset_prefix_cache()
    check_same(run(llm, after, pause), want)
    assert not compiled


@pytest.mark.soak
def test_calls_of_other_threads_wait(llm, want):
    llm.reset_prefix_cache()
    llm.pause()
    found = []
    thread = threading.Thread(target=lambda: found.append(llm.generate(PROMPTS[0], SAMPLED)))
    aborted = threading.Thread(target=lambda: found.append(llm.generate("a", request_ids=["b"])))
    for each in (thread, aborted):
        each.start()
    while not llm.session.of_request("b") or len(llm.session.scheduler.waiting) < 2:
        time.sleep(0.01)
    with pytest.raises(PausedError):  # it would wait for itself
        llm.generate(PROMPTS[0], SAMPLED)
    with pytest.raises(PausedError):
        list(llm.stream(PROMPTS[0], SAMPLED))
    llm.abort("b")
    aborted.join()  # without a resume
    assert found[0][0].outputs[0].finish_reason == "abort"
    assert thread.is_alive() and len(found) == 1
    llm.resume()
    thread.join()
    assert found[1][0].outputs[0].token_ids == want[0][0]


def test_requests_finish_or_end_before_a_pause(llm, want):
    """No other is taken until it ends."""
    for mode in ("wait", "abort"):
        llm.reset_prefix_cache()
        llm.enqueue(PROMPTS, PARAMS)
        llm.step()
        llm.pause(mode, clear_cache=True)
        with pytest.raises(PausedError):
            llm.enqueue(PROMPTS)
        assert llm.is_paused and not llm.session.has_work
        assert not llm.metrics()["prefix_cache"]["num_pages"]
        llm.resume()
        outputs = [each for output in llm.wait_for_completion() for each in output.outputs]
        if mode == "wait":
            assert [each.token_ids for each in outputs] == [tokens for tokens, _ in want]
        else:
            assert {each.finish_reason for each in outputs} == {"abort"}
    assert run(llm)


# Sleep


def sleep_and_wake(llm, level, tensors):
    llm.sleep(level)
    assert llm.is_sleeping and llm.is_paused
    llm.wake_up()
    if level == 2:
        assert llm.is_sleeping
        llm.update_weights(tensors)
    assert not llm.is_sleeping and not llm.is_paused


@pytest.mark.few(2)
@pytest.mark.parametrize(("level", "after"), [(1, 0), (1, 1), (1, 5), (2, 3), (2, 8)])
def test_sleep_changes_no_token(llm, want, tensors, level, after, compiled):
    """L8, L2: neither those of requests that run nor those on prefixes cached before and after."""
    llm.reset_prefix_cache()
    act = functools.partial(sleep_and_wake, llm, level, tensors)
    if after == 0:
        act()
    check_same(run(llm, after, act), want)
    act()
    for _ in range(2):  # the second time on cached prefixes
        check_same(run(llm), want)
    assert not compiled


OWN = (slice(0, 1), slice(1, 2), slice(2, 4), slice(4, 5))  # of `want`, by prompt


def trained(llm, random, tensors):
    """A pause, a sleep or an update with the same weights, and the end of it; or less memory."""
    level, tags = int(random.integers(1, 3)), random.choice(["weights", "kv_cache"])
    act = random.choice(["pause", "sleep", "part", "update", "clear"])
    if act == "pause":
        llm.pause(clear_cache=bool(random.integers(2)))
        llm.resume()
    elif act == "sleep":
        sleep_and_wake(llm, level, tensors)
    elif act == "part":
        llm.sleep(1, tags=[str(tags)])
        llm.wake_up()
    elif act == "update":
        llm.update_weights(tensors, mode=str(random.choice(["keep", "recompute"])))
    else:
        llm.reset_prefix_cache()
    return str(act)


@pytest.mark.soak
def test_a_storm_of_all_of_it_changes_no_token(llm, want, tensors, compiled):
    """L16: prompts come and are aborted among pauses, sleeps and updates; nothing is left."""
    random, session, live, acts = np.random.default_rng(4), llm.session, [], set()
    llm.reset_prefix_cache()
    for _ in range(150):
        chance = random.random()
        if chance < 0.25 and len(session.scheduler.waiting) < 4:
            number = int(random.integers(len(PROMPTS)))
            ((*samples,),) = llm.prepare([PROMPTS[number]], [PARAMS[number]])
            session.add(samples)
            live.append((want[OWN[number]], samples))
        elif chance < 0.3 and live:
            session.abort(live[random.integers(len(live))][1][:1])
        elif chance < 0.5:
            acts.add(trained(llm, random, tensors))
        session.step()
    while session.has_work:
        session.step()
    assert len(acts) == 5 and not compiled
    ends = set()
    for wanted, samples in live:
        for (tokens, logprobs), sample in zip(wanted, samples, strict=True):
            count = sample.request.num_output
            ends.add(sample.output().finish_reason)
            check_same(told([sample]), [(tokens[:count], logprobs[:count])])
            assert sample.output().finish_reason == "abort" or count == len(tokens)
    assert ends == {"length", "abort"}
    llm.reset_prefix_cache()
    assert session.scheduler.pages.num_free == llm.shapes.num_pages - 1


@pytest.mark.soak
def test_device_memory_is_freed_and_taken_again(llm, want, tensors):
    before, held = device_bytes(), llm.metrics()["memory_bytes"]
    total = sum(held.values())
    for level in (1, 2):
        llm.sleep(level)
        assert before - device_bytes() > 0.99 * total
        assert not any(llm.metrics()["memory_bytes"].values())
        llm.wake_up()
        llm.update_weights(tensors) if level == 2 else None
        assert llm.metrics()["memory_bytes"] == held
        assert abs(device_bytes() - before) < 0.01 * total
    llm.sleep(1)
    llm.sleep(2)  # also of the host
    kinds = {each.sharding.memory_kind for each in jax.live_arrays() if each.nbytes > total / 100}
    assert "pinned_host" not in kinds
    llm.wake_up()
    llm.update_weights(tensors)
    check_same(run(llm), want)


def test_parts_sleep_alone(llm, want, tensors):
    """A trainer wakes the weights, updates them, and wakes the caches."""
    held = llm.metrics()["memory_bytes"]
    llm.sleep(tags=["kv_cache"])
    there = {name: size for name, size in llm.metrics()["memory_bytes"].items() if size}
    assert there == {name: held[name] for name in ("weights", "proposer_tables") if held[name]}
    llm.update_weights(tensors)
    llm.wake_up(["weights"])
    assert llm.is_sleeping
    llm.wake_up(["kv_cache"])
    check_same(run(llm), want)
    llm.sleep(2)
    llm.wake_up(["weights"])
    with pytest.raises(RuntimeError):
        llm.update_weights(tensors, keep=["*"])
    llm.update_weights(tensors)
    assert llm.is_sleeping
    llm.wake_up(["kv_cache"])

    def weights_alone():
        """Rows keep their pages."""
        llm.sleep(tags=["weights"])
        assert llm.session.scheduler.running
        llm.wake_up()

    check_same(run(llm, 4, weights_alone), want)


def test_a_pause_goes_on_after_sleep(llm, want):
    llm.pause()
    llm.sleep()
    llm.resume()
    assert llm.is_paused
    llm.pause()
    llm.wake_up()
    assert llm.is_paused and not llm.is_sleeping
    llm.resume()
    check_same(run(llm), want)


def test_a_sleeping_engine_computes_nothing(llm, tensors):
    llm.sleep()
    calls = [
        llm.warm_up,
        llm.export_weights,
        lambda: jaxspec.differentiable(llm),
        lambda: llm.prefill(PROMPTS[0]),
        lambda: llm.generate(PROMPTS[0]),
    ]
    for call in calls:
        with pytest.raises(PausedError):
            call()
    with pytest.raises(RuntimeError):
        llm.update_weights(tensors)
    assert llm.is_sleeping
    llm.wake_up()


def test_a_sleep_after_the_copy_loses_no_exported_request(llm, monkeypatch):
    """Its state has the fingerprint of weights that were freed meanwhile."""
    ((sample,),) = llm.prepare(PROMPTS[:1], GREEDY, ["a"])
    llm.session.add([sample])
    for _ in range(6):
        llm.session.step()
    withdraw = llm.session.withdraw
    llm._runner.num_changes += 1  # the fingerprint of the new weights is not known yet

    def then_sleep(sample):
        copied = withdraw(sample)
        llm.sleep()
        return copied

    with monkeypatch.context() as planted:
        planted.setattr(llm.session, "withdraw", then_sleep)
        state = llm.export_request("a")
    llm.wake_up()
    ((first, *_),) = run(llm, prompts=PROMPTS[:1], params=GREEDY)
    found = [token for delta in llm.import_request(state) for token in delta.token_ids]
    assert [*state.token_ids, *found] == first


@pytest.mark.soak
def test_programs_compile_in_the_background_once_it_is_awake():
    sizes = SIZES | {"background_compilation": True, "max_num_seqs": 2, "decode_buckets": [1, 2]}
    with LLM(QWEN3, **sizes, speculative_config=None) as llm:
        llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)
        llm.sleep()
        seconds = dict(llm.metrics()["compile_seconds"])
        assert llm._compiler.is_busy
        llm.wake_up()
        while llm.metrics()["compile_seconds"].keys() == seconds.keys():
            assert llm._compiler.is_busy
            time.sleep(0.01)


def test_host_prefixes_are_dropped(llm):
    if llm.shapes.num_drafts == 0:
        for number in range(3):
            ids = [*range(10 + number, 60 + number)]
            llm.generate([ids], dataclasses.replace(GREEDY, max_tokens=2), use_tqdm=False)
        assert llm.metrics()["prefix_cache"]["host"]["num_pieces"]
        llm.sleep()
        found = llm.metrics()["prefix_cache"]
        assert found["num_pages"] == found["num_states"] == found["host"]["num_pieces"] == 0
        llm.wake_up()


# Errors


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.sleep(3),
        lambda llm: llm.sleep(0),
        lambda llm: llm.sleep(True),
        lambda llm: llm.sleep("1"),
        lambda llm: llm.sleep(1, "later"),
        lambda llm: llm.sleep(tags=["keys"]),
        lambda llm: llm.sleep(tags="weights"),
        lambda llm: llm.sleep(tags=[]),
        lambda llm: llm.wake_up(["all"]),
        lambda llm: llm.wake_up([["weights"]]),
        lambda llm: llm.pause("in_place"),
        lambda llm: llm.pause(None),
        lambda llm: llm.pause(clear_cache=1),
    ],
)
def test_a_wrong_argument_changes_nothing(llm, call):
    with pytest.raises(ValueError, match="must be"):
        call(llm)
    assert not llm.is_paused and not llm.is_sleeping
    llm.wake_up()
    llm.resume()


def test_an_engine_that_cannot_sleep_refuses_it(llm, monkeypatch):
    replicas = object.__new__(ReplicatedEngine)
    replicas._size = 2
    for call in (replicas.pause, replicas.resume, replicas.sleep, replicas.wake_up):
        with pytest.raises(ValueError, match="data_parallel_size"):
            call()
    monkeypatch.setattr(ModelRunner, "group", SimpleNamespace(nodes=2))
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(ValueError, match="nodes"):
            call()


def test_a_failed_sleep_leaves_an_engine_that_runs(llm, want, monkeypatch):
    def fail(*_):
        raise MemoryError("planted")

    def try_to_sleep():
        with pytest.raises(MemoryError):
            llm.sleep()
        assert not llm.is_sleeping

    with monkeypatch.context() as planted:
        planted.setattr("jaxspec.runner.model_runner.PutAway.of", fail)
        llm.reset_prefix_cache()
        check_same(run(llm, 4, try_to_sleep), want)
    llm.sleep()
    with monkeypatch.context() as planted:
        planted.setattr("jaxspec.runner.memory.PutAway.on_devices", fail)
        with pytest.raises(MemoryError):
            llm.wake_up()
    assert llm.is_sleeping
    llm.wake_up()
    check_same(run(llm), want)


def test_a_closed_engine_neither_pauses_nor_sleeps():
    llm = LLM(QWEN3, **SIZES, speculative_config=None)
    llm.sleep()
    llm.close()
    assert not llm.is_paused
    for call in (llm.pause, llm.resume, llm.sleep, llm.wake_up):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize("place", ["bring_back", "allocate"])
def test_an_interrupted_wake_up_is_repeated(llm, want, monkeypatch, place):
    """Also one that is interrupted right after the weights are back."""
    act = getattr(llm._runner, place)

    def interrupted():
        act()
        raise KeyboardInterrupt

    llm.sleep()
    with monkeypatch.context() as planted:
        planted.setattr(llm._runner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.wake_up()
    assert llm.is_sleeping
    llm.wake_up()
    assert not llm.is_sleeping
    check_same(run(llm), want)


def test_a_loop_of_steps_waits_while_another_thread_pauses(llm):
    """It would take the interpreter from the thread that updates weights."""
    llm.add_request("a", PROMPTS[0], GREEDY)
    pausing = threading.Thread(target=llm.pause)
    pausing.start()
    pausing.join()
    waits, wait = [], llm.session.gate.wait

    def noted():
        waits.append(True)
        wait()

    llm.session.gate.wait = noted
    try:
        assert llm.step() == [] and waits
    finally:
        del llm.session.gate.wait
    llm.resume()
    while llm.has_unfinished_requests():
        llm.step()


# Tasks


@pytest.fixture(scope="module")
def in_tasks():
    """Runs a coroutine function on an engine whose steps are slow."""

    async def main(act):
        async with AsyncLLM(QWEN3, **SIZES, speculative_config=None) as engine:
            await last_of(engine)
            step = engine._engine.session.engine.step

            def slow():
                time.sleep(0.02)
                return step()

            engine._engine.session.engine.step = slow
            await asyncio.wait_for(act(engine), 200)

    return lambda act: asyncio.run(main(act))


async def last_of(engine, prompt=PROMPTS[0], params=SAMPLED):
    async for output in engine.generate(prompt, params):
        last = output.outputs[0]
    return last


async def started(engine):
    """A task that reads a stream which has begun."""
    task = asyncio.ensure_future(last_of(engine))
    while not engine.num_running:
        await asyncio.sleep(0.001)
    return task


@pytest.mark.soak
def test_streams_wait_finish_or_end(in_tasks):
    tensors = tensors_of(QWEN3)

    async def act(engine):
        want = await last_of(engine)
        for pause, unpause in ((engine.pause, engine.resume), (engine.sleep, engine.wake_up)):
            running = await started(engine)
            await pause()
            late = asyncio.ensure_future(last_of(engine))
            while not engine.num_waiting:
                await asyncio.sleep(0.001)
            assert engine.is_paused and not late.done()
            await unpause()
            assert (await running).token_ids == (await late).token_ids == want.token_ids
        for mode, reason in (("wait", "length"), ("abort", "abort")):
            running = await started(engine)
            await engine.pause(mode)
            assert (await running).finish_reason == reason
            assert engine.is_healthy and not engine.is_ready
            with pytest.raises(PausedError):
                await last_of(engine)
            await engine.resume()
            assert engine.is_ready
        running = await started(engine)
        await engine.sleep(2, mode="wait")
        await engine.wake_up()
        await engine.update_weights(tensors)
        assert not engine.is_sleeping
        assert (await running).token_ids == (await last_of(engine)).token_ids == want.token_ids
        with pytest.raises(ValueError, match="must be"):
            await engine.sleep(3, mode="wait")
        assert (await last_of(engine)).finish_reason == "length"
        await engine.sleep()
        queued = asyncio.ensure_future(last_of(engine))
        while not engine.num_waiting:
            await asyncio.sleep(0.001)
        await engine.close()
        assert (await queued).finish_reason == "abort"
        for call in (engine.pause, engine.resume, engine.sleep, engine.wake_up):
            with pytest.raises(RuntimeError):
                await call()

    in_tasks(act)


# Planted bugs: each is seen by a law above


@pytest.fixture(scope="module")
def drafted(short_model):
    with LLM(short_model, **SIZES, **ENGINES["3 drafts"]) as llm:
        yield llm


def check_sleep(llm):
    llm.reset_prefix_cache()
    want = run(llm)
    llm.reset_prefix_cache()
    try:
        check_same(run(llm, 4, functools.partial(sleep_and_wake, llm, 1, None)), want)
        check_same(run(llm), want)
    finally:
        llm.session.gate.open("weights", "kv_cache")
        llm.session.abort(())


@pytest.mark.soak
def test_steps_in_flight_that_sleep_drops_are_seen(drafted, monkeypatch):
    """P16."""
    monkeypatch.setattr(Session, "pause", lambda self, *reasons: self.gate.close(*reasons))
    reset = ModelRunner.reset

    def drop(self):
        drafted.session.engine._in_flight.clear()
        reset(self)

    monkeypatch.setattr(ModelRunner, "reset", drop)
    with pytest.raises((AssertionError, RuntimeError)):
        check_sleep(drafted)
    drafted.session.in_turn(drafted.session._recover)


@pytest.mark.soak
def test_prefixes_that_sleep_forgets_to_drop_are_seen(drafted, monkeypatch):
    monkeypatch.setattr(Scheduler, "forget_device", lambda self: self.preempt_all())
    with pytest.raises(AssertionError):
        check_sleep(drafted)
