"""200 combinations of sampling parameters beside running streams: no stall, and bounded memory."""

import asyncio
import contextlib
import threading
import time

import jax
import numpy as np
import psutil
import pytest

from jaxspec import SamplingParams
from jaxspec.api.async_llm import AsyncLLM

pytestmark = pytest.mark.soak
NUM_COMBINATIONS, NUM_STREAMS, AT_ONCE = 200, 4, 8
MAX_GAP = 6.0  # seconds between two tokens of a stream, on two busy cores
MAX_GROWTH = 1.5 * 2**30  # bytes
COMPILED = "/jax/core/compile/backend_compile_duration"
IN_BACKGROUND = ("jaxspec-compile", "jaxspec-background")  # names of threads
FORMS = {"regex": r"\d{2,30}"}, {"choice": ["yes", "no"]}, {"json_object": True}
NOT_WITH_FORMS = "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"
FIELDS = {
    "temperature": lambda rng: float(rng.choice([0.0, 0.3, 1.0, 1.7])),
    "top_k": lambda rng: int(rng.choice([1, 5, 128, 129, 200])),
    "top_p": lambda rng: float(rng.uniform(0.1, 0.99)),
    "min_p": lambda rng: float(rng.uniform(0.01, 0.3)),
    "presence_penalty": lambda rng: float(rng.uniform(-2, 2)),
    "frequency_penalty": lambda rng: float(rng.uniform(-2, 2)),
    "repetition_penalty": lambda rng: float(rng.uniform(0.7, 1.6)),
    "logit_bias": lambda rng: {int(i): float(rng.normal()) for i in rng.integers(1, 250, 9)},
    "allowed_token_ids": lambda rng: rng.permutation(np.arange(1, 250))[:150].tolist(),
    "bad_words": lambda rng: ["def", "return"],
    "stop": lambda rng: ["zq", "the"],
    "stop_token_ids": lambda rng: rng.permutation(np.arange(1, 250))[:40].tolist(),
    "min_tokens": lambda rng: int(rng.integers(1, 6)),
    "ignore_eos": lambda rng: True,
    "logprobs": lambda rng: int(rng.integers(0, 21)),
    "prompt_logprobs": lambda rng: int(rng.integers(0, 21)),
    "num_speculative_tokens": lambda rng: int(rng.integers(0, 4)),
    "n": lambda rng: int(rng.integers(2, 5)),
    "seed": lambda rng: int(rng.integers(0, 2**31)),
    "skip_special_tokens": lambda rng: False,
    "structured_outputs": lambda rng: FORMS[rng.integers(len(FORMS))],
}


def combinations():
    """Each field alone, then random sets of them; no two requests are alike."""
    rng = np.random.default_rng(0)
    for number in range(NUM_COMBINATIONS):
        alone = list(FIELDS)[number : number + 1]
        names = alone or [name for name in FIELDS if rng.random() < 0.3]
        length = int(rng.integers(1, 40))
        if "structured_outputs" in names:
            names = [name for name in names if name not in NOT_WITH_FORMS]
        params = SamplingParams(max_tokens=8, **{name: FIELDS[name](rng) for name in names})
        yield "def f(x): # "[:length] + "y" * max(0, length - 12), params


async def stream(llm, gaps, ends):
    """Read streams one after the other until `ends`, and note the time between tokens."""
    greedy = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    while not ends.is_set():
        async with contextlib.aclosing(await llm.submit("class A:", greedy)) as deltas:
            last = None
            async for _ in deltas:
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
                if ends.is_set():
                    break


async def one_client(llm):
    """Send all combinations, a few at once; return how many tokens came for each."""
    free = asyncio.Semaphore(AT_ONCE)

    async def ask(prompt, params):
        async with free, await llm.submit(prompt, params) as deltas:
            return sum([len(delta.token_ids) async for delta in deltas])

    return await asyncio.gather(*(ask(*each) for each in combinations()))


def test_a_client_that_varies_its_parameters_stops_nobody(short_model):
    compiled, gaps = [], []

    def note(event, seconds, **_):
        thread = threading.current_thread().name
        if event == COMPILED and not thread.startswith(IN_BACKGROUND):
            compiled.append((thread, seconds))

    async def run():
        async with AsyncLLM(short_model, dtype="float32", max_model_len=512) as llm:
            await llm.get_ready()
            ends, before = asyncio.Event(), psutil.Process().memory_info().rss
            compiled.clear()
            streams = [asyncio.create_task(stream(llm, gaps, ends)) for _ in range(NUM_STREAMS)]
            counts = await one_client(llm)
            growth = psutil.Process().memory_info().rss - before
            ends.set()
            await asyncio.gather(*streams)
            return counts, growth

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        counts, growth = asyncio.run(run())
    finally:
        jax.monitoring.clear_event_listeners()
    print(f"largest gap {max(gaps):.2f} s of {len(gaps):,}, growth {growth / 2**20:.0f} MiB")
    assert len(counts) == NUM_COMBINATIONS and all(counts)
    assert compiled == []
    assert max(gaps) < MAX_GAP
    assert growth < MAX_GROWTH
