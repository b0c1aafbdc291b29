"""Calls of several clients in few threads: whatever some do, those of others find a thread."""

import asyncio
import collections
import random
import threading

import pytest

from jaxspec.api.fair_pool import CALLER, LONG_BYTES, Caller, FairPool


class Calls:
    """Calls that run until `go`, and which of them have begun."""

    def __init__(self):
        self.pool, self.begun, self.ended = FairPool(4, "test"), [], threading.Event()
        self.running = collections.Counter()
        self.peak = collections.Counter()
        self._lock = threading.Lock()

    def call(self, client, is_long=False, *, waits=True):
        """A task of a client: its call waits for `ended`."""

        def work():
            key = client, is_long
            with self._lock:
                self.begun.append(key)
                self.running[key] += 1
                total = collections.Counter(all=self.running.total())
                for (name, long), count in self.running.items():
                    total[name] += count
                    total["long"] += count * long
                self.peak |= total
            if waits:
                assert self.ended.wait(60)
            with self._lock:
                self.running[key] -= 1
            return key

        async def run():
            CALLER.set(Caller(client, LONG_BYTES + 1 if is_long else 100))
            return await self.pool.run(work)

        return asyncio.create_task(run())


def run(test):
    async def bounded():
        calls = Calls()
        try:
            async with asyncio.timeout(60):
                await test(calls)
        finally:
            calls.ended.set()
            calls.pool.close()

    asyncio.run(bounded())


def test_many_calls_of_a_client_leave_a_thread_to_others():
    async def test(calls):
        many = [calls.call("a") for _ in range(50)]
        for client in "bcd":
            assert await calls.call(client, waits=False) == (client, False)
        assert calls.peak["a"] == 3
        calls.ended.set()
        assert await asyncio.gather(*many) == [("a", False)] * 50

    run(test)


def test_long_calls_leave_threads_to_short_ones_also_of_their_client():
    async def test(calls):
        long = [calls.call(client, is_long=True) for client in "aaabbbccc"]
        for client in "abcd":
            await calls.call(client, waits=False)
        assert calls.peak["long"] == 2
        assert [key for key in calls.begun if key[1]] == [("a", True), ("b", True)]
        calls.ended.set()
        await asyncio.gather(*long)
        assert calls.peak["long"] == 2

    run(test)


def test_a_call_may_be_long_whatever_its_request_s_size():
    async def test(calls):
        endless = [
            asyncio.create_task(calls.pool.run(lambda: calls.ended.wait(60), is_long=True))
            for _ in range(9)
        ]
        await calls.call("", waits=False)
        assert not any(task.done() for task in endless)
        calls.ended.set()
        assert all(await asyncio.gather(*endless))

    run(test)


def test_clients_take_turns_and_each_has_its_own_order():
    async def test(calls):
        names = ["a"] * 40 + ["b"] * 3
        holding = [calls.call(name) for name in ("x", "x", "x", "y")]
        await asyncio.sleep(0)
        tasks = [calls.call(name, waits=False) for name in names]
        await asyncio.sleep(0)
        calls.ended.set()
        await asyncio.gather(*holding, *tasks)
        later = [name for name, _ in calls.begun[4:]]
        assert "".join(later[:10]).count("b") == 3

    run(test)


def test_what_is_given_up_before_its_turn_is_not_run():
    async def test(calls):
        tasks = [calls.call("a") for _ in range(5)]
        while len(calls.begun) < 3:
            await asyncio.sleep(0.001)
        tasks[3].cancel()
        await asyncio.wait({tasks[3]})
        assert sum(map(len, calls.pool._waiting.values())) == 1  # its body is held no longer
        calls.ended.set()
        await asyncio.gather(*tasks[:3], tasks[4])
        assert len(calls.begun) == 4

    run(test)


def test_errors_reach_their_caller_and_free_the_thread():
    def fail():
        raise KeyError("mine")

    async def test(calls):
        for _ in range(9):
            with pytest.raises(KeyError, match="mine"):
                await calls.pool.run(fail)
        await calls.call("a", waits=False)

    run(test)


def test_a_closed_pool_refuses_what_waits_and_ends_what_runs():
    async def test(calls):
        tasks = [calls.call("a") for _ in range(5)]
        while len(calls.begun) < 3:
            await asyncio.sleep(0.001)
        calls.pool.close()
        calls.ended.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, RuntimeError) for each in found] == [False] * 3 + [True] * 2
        with pytest.raises(RuntimeError):
            await calls.pool.run(int)

    run(test)


def test_every_call_runs_once_within_the_limits_whoever_makes_it():
    async def test(calls):
        rng = random.Random(0)
        keys = [(rng.choice("abcde"), rng.random() < 0.4) for _ in range(400)]
        tasks = []
        for client, is_long in keys:
            tasks.append(calls.call(client, is_long, waits=False))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        assert await asyncio.gather(*tasks) == keys
        assert sorted(calls.begun) == sorted(keys)
        assert calls.peak["all"] <= 4 and calls.peak["long"] <= 2
        assert all(calls.peak[client] <= 3 for client in "abcde")

    run(test)
