"""Steps are noted while somebody asks: by one trace at a time, and a bounded number of them."""

import asyncio
import contextlib
import threading

import pytest

from jaxspec.engine.engine import StepTimes
from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.server.metrics.step_watch import MAX_STEPS, StepWatch

STEP = StepTimes(Program(4, 0, GREEDY), 4, 0, 0.0, 1.0, 2.0, 2.0, 3.0, 4.0, 3.0)


class Traced:
    """Stands for an AsyncLLM; an engine has one trace at a time."""

    num_replicas = 1

    def __init__(self):
        self.steps: list | None = None
        self.num_traces = 0

    @contextlib.contextmanager
    def trace(self):
        assert self.steps is None, "two traces at a time"
        self.steps = steps = []
        self.num_traces += 1
        try:
            yield steps
        finally:
            self.steps = None


async def until(is_true):
    for _ in range(2000):
        if is_true():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError


def test_the_first_question_begins_the_trace_and_later_ones_read_it():
    async def act():
        llm = Traced()
        watch = StepWatch(llm)
        assert not watch.is_on and await watch.last(4) == []
        llm.steps += [STEP] * 6
        rows = await watch.last(4)
        assert watch.is_on and [row.name for row in rows] == [f"step {i}" for i in (2, 3, 4, 5)]
        assert llm.num_traces == 1

    asyncio.run(act())


def test_questions_at_once_share_one_trace():
    async def act():
        llm = Traced()
        watch = StepWatch(llm)
        await asyncio.gather(*(watch.last(4) for _ in range(8)))
        assert llm.num_traces == 1

    asyncio.run(act())


def test_old_steps_are_dropped_and_still_counted():
    async def act():
        llm = Traced()
        watch = StepWatch(llm)
        await watch.last(1)
        llm.steps += [STEP] * (MAX_STEPS + 50)
        (row,) = await watch.last(1)
        assert len(llm.steps) == MAX_STEPS and row.name == f"step {MAX_STEPS + 49}"
        assert len(await watch.last(MAX_STEPS)) == MAX_STEPS

    asyncio.run(act())


def test_without_questions_the_trace_ends_and_the_next_one_begins_anew():
    async def act():
        llm = Traced()
        watch = StepWatch(llm, idle=0.02)
        for count in (1, 2, 3):
            await watch.last(4)
            assert llm.num_traces == count
            await until(lambda: not watch.is_on)
        await until(lambda: llm.steps is None)

    asyncio.run(act())


def test_an_engine_that_can_t_be_traced_says_so_each_time():
    class Busy:
        num_replicas = 1

        def trace(self):
            raise RuntimeError("one trace at a time")

    async def act():
        watch = StepWatch(Busy())
        for _ in range(2):
            with pytest.raises(RuntimeError, match="one trace"):
                await watch.last(4)
            assert not watch.is_on

    asyncio.run(act())


def test_a_question_that_is_cancelled_while_the_trace_begins_leaves_one_that_ends():
    class Slow(Traced):
        """It waits for a step before it is traced."""

        def __init__(self):
            super().__init__()
            self.gate = threading.Event()

        @contextlib.contextmanager
        def trace(self):
            self.gate.wait(10)
            with super().trace() as steps:
                yield steps

    async def act():
        llm = Slow()
        watch = StepWatch(llm, idle=0.05)
        question = asyncio.create_task(watch.last(4))
        await asyncio.sleep(0.01)
        question.cancel()
        await asyncio.wait({question})
        others = [asyncio.create_task(watch.last(4)) for _ in range(2)]
        others[0].cancel()
        await asyncio.sleep(0.1)  # longer than it may be idle
        llm.gate.set()
        assert await others[1] == [] and llm.num_traces == 1
        await until(lambda: llm.steps is None and not watch.is_on)

    asyncio.run(act())
