"""Laws of updates that fail, are interrupted or cancelled: no request reads half of one."""

import asyncio
import threading
import time

import numpy as np
import pytest
from harness import FIXTURES
from trees import SIZES, changed, tensors_of

from jaxspec import LLM, AsyncLLM, SamplingParams
from jaxspec.runner import model_runner
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.scheduler.scheduler import Scheduler

QWEN3 = FIXTURES / "qwen3"
OPTIONS = SIZES | {"num_pages": 24, "speculative_config": None, "enable_prefix_caching": True}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
RANDOM = np.random.default_rng(3)
PROMPT, *OTHERS = ({"prompt_token_ids": RANDOM.integers(5, 250, 30).tolist()} for _ in range(5))


@pytest.fixture(scope="module")
def old():
    return tensors_of(QWEN3)


@pytest.fixture(scope="module")
def new(old):
    return changed(old)


@pytest.fixture
def llm(tmp_path):
    tier = {"kv_offloading_size": 0.01, "kv_offloading_folder": tmp_path}
    with LLM(QWEN3, **OPTIONS, **tier) as llm:
        yield llm


def tokens_of(llm):
    return llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_an_interrupt_after_the_last_parameter_stops_the_engine(llm, old, new, monkeypatch):
    """Prefixes of the old weights are gone from all tiers; an update of all tensors mends it."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = tokens_of(llm)
    for prompt in OTHERS:
        llm.generate(prompt, PARAMS, use_tqdm=False)
    assert llm.metrics()["prefix_cache"]["host"]["num_pieces"] > 0
    with monkeypatch.context() as planted:
        planted.setattr(Scheduler, "renew_weights", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(new, version="new")
    found = llm.session.scheduler.prefixes.stats()["prefix_cache"]
    assert found["num_pages"] == found["host"]["num_pieces"] == 0
    for call in (lambda: tokens_of(llm), lambda: llm.update_weights(new, keep=["*"])):
        with pytest.raises(RuntimeError, match="update"):
            call()
    assert llm.update_weights(old, version="new").version == "new"
    assert tokens_of(llm) == before


def test_a_fingerprint_taken_during_an_update_is_not_kept(llm, old, new, monkeypatch):
    """Nor one of a mixture."""
    seen = []

    def update(*args, **options):
        digest = real(*args, **options)
        seen.append(digest)
        if len(seen) == 1:
            llm.update_weights(old)
        return digest

    llm.update_weights(new)
    real = model_runner.fingerprint
    of_new = llm._runner.fingerprint
    llm._runner._digest = -1, ""
    monkeypatch.setattr(model_runner, "fingerprint", update)
    assert llm._runner.fingerprint == of_new == seen[0]
    assert llm._runner.fingerprint == seen[1] != of_new


def test_weights_that_were_donated_are_replaced(llm, old):
    """By all tensors, as long as the engine has none of its arrays."""
    before = tokens_of(llm)
    for leaf in llm._runner.weights:
        leaf.delete()
    llm.update_weights(old)
    llm.reset_prefix_cache()
    assert tokens_of(llm) == before


@pytest.fixture(scope="module")
def in_tasks():
    """Runs a coroutine function on an engine whose steps are slow."""

    async def main(act):
        async with AsyncLLM(QWEN3, **OPTIONS) as engine:
            await last_of(engine, 2)
            step = engine._engine.session.engine.step

            def slow():
                time.sleep(0.05)
                return step()

            engine._engine.session.engine.step = slow
            await act(engine)

    return lambda act: asyncio.run(asyncio.wait_for(main(act), 100))


async def last_of(engine, num_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    async for output in engine.generate(PROMPT, params):
        last = output.outputs[0]
    return last


async def started(engine):
    """A task that reads a stream which has begun."""
    task = asyncio.ensure_future(last_of(engine, 30))
    while not engine.num_running:
        await asyncio.sleep(0.01)
    return task


@pytest.mark.soak
def test_a_request_added_during_an_update_that_fails_is_aborted(in_tasks, old, monkeypatch):
    """The engine thread survives it."""

    def fail(self, model, drafter):
        def cut(before):
            yield next(iter(model(before)))
            begin()
            raise MemoryError("planted")

        return real(self, cut, drafter)

    real = ModelRunner.replace_weights

    async def act(engine):
        nonlocal begin
        loop, mail, late = asyncio.get_running_loop(), engine._thread._mail, []

        def add():
            late.append(asyncio.ensure_future(last_of(engine, 2)))

        def begin():
            loop.call_soon_threadsafe(add)
            until = time.monotonic() + 20
            while mail.empty() and time.monotonic() < until:
                time.sleep(0.01)

        running = await started(engine)
        monkeypatch.setattr(ModelRunner, "replace_weights", fail)
        with pytest.raises(MemoryError):
            await engine.update_weights(old)
        monkeypatch.undo()
        for task in (running, *late):
            assert (await task).finish_reason == "abort"
        await engine.update_weights(old)
        assert (await last_of(engine, 2)).finish_reason == "length" and late

    begin = None
    in_tasks(act)


@pytest.mark.soak
def test_streams_end_if_the_update_that_aborts_them_is_cancelled(in_tasks, old):
    async def act(engine):
        running = await started(engine)
        begun, go = threading.Event(), threading.Event()
        real = engine._engine._compile_updates

        def wait(fillings):
            begun.set()
            go.wait(20)
            real(fillings)

        engine._engine._compile_updates = wait
        update = asyncio.ensure_future(engine.update_weights(old, mode="abort"))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        update.cancel()
        await asyncio.wait([update])
        go.set()
        assert (await asyncio.wait_for(running, 20)).finish_reason == "abort"

    in_tasks(act)
