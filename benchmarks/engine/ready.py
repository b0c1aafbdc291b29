"""Seconds until an engine is ready, and what its requests wait for while programs still compile.

    python -m benchmarks.engine.ready [--shape qwen3.5-9b] [--rows 64] [--json FILE]

An engine with default options, three drafts and random weights starts with an empty cache of
programs (or with what a first run has left there, `--cache`). It is ready when any request can be
served. Then greedy streams run in all rows but eight, and requests of 12 kinds come one after the
other. `largest_gap_ms` is the longest time between two pieces of a stream, `first_token_ms` how
long each kind waited for its first token. When nothing compiles any more, greedy batches are timed
again with the programs of each rung.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engine import dummy_llm, load_generator
from benchmarks.engine.load_generator import AsyncLLMClient
from benchmarks.measure import record
from benchmarks.measure.model_shapes import SHAPES
from jaxspec import AsyncLLM, SamplingParams

SAMPLED = {"temperature": 0.6}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "Qwen3.5's default": {**SAMPLED, "top_k": 20, "top_p": 0.95},
    "temperature": SAMPLED,
    "top_p=0.9": {**SAMPLED, "top_p": 0.9},
    "top_k=1000": {**SAMPLED, "top_k": 1000},
    "min_p=0.05": {**SAMPLED, "min_p": 0.05},
    "presence_penalty": {**SAMPLED, "presence_penalty": 1.5},
    "logit_bias": {"temperature": 0.0, "logit_bias": {5: 3.0}},
    "allowed_token_ids": {"temperature": 0.0, "allowed_token_ids": [5, 6, 7]},
    "logprobs=5": {"temperature": 0.0, "logprobs": 5},
    "prompt_logprobs=1": {"temperature": 0.0, "prompt_logprobs": 1},
    "n=2": {**SAMPLED, "n": 2},
}
TIMED = "greedy", "Qwen3.5's default", "presence_penalty", "top_p=0.9", "logprobs=5"
PROMPT = 512


class Gaps:
    """Seconds between the outputs of streams."""

    def __init__(self) -> None:
        self.largest, self.seconds = 0.0, list[float]()

    async def read(self, stream: Any) -> None:
        last = None
        async for _ in stream:
            now = time.perf_counter()
            if last is not None:
                self.seconds.append(now - last)
                self.largest = max(self.largest, now - last)
            last = now


async def measured(llm: AsyncLLM, shape: str, rows: int, seconds: float) -> dict[str, Any]:
    prompts = dummy_llm.random_prompts(shape, rows, PROMPT)
    begun = time.perf_counter()
    await llm.get_ready()
    ready = time.perf_counter() - begun
    results: dict[str, Any] = {"compile_seconds": ready, "kinds": []}
    gaps, end = Gaps(), time.perf_counter() + seconds
    long = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)

    async def stream(prompt: Any) -> None:
        while time.perf_counter() < end:
            await gaps.read(llm.generate(prompt, long))

    streams = [asyncio.ensure_future(stream(prompt)) for prompt in prompts[: rows - 8]]
    await asyncio.sleep(3.0)
    gaps.largest, background = 0.0, llm._engine._compiler
    for name, params in KINDS.items():
        given = SamplingParams(max_tokens=16, ignore_eos=True, **params)
        arrived, first, error = time.perf_counter(), None, None
        try:
            async for _ in llm.generate(prompts[-1], given):
                first = first or time.perf_counter() - arrived
        except Exception as caught:
            error = repr(caught)[:300]
        figures = {"kind": name, "first_token_ms": first and 1000 * first, "error": error}
        results["kinds"].append(figures | {"largest_gap_ms": 1000 * gaps.largest})
        print(results["kinds"][-1], flush=True)
        gaps.largest = 0.0
    beside = 0.0
    while background.is_busy and time.perf_counter() < end:
        await asyncio.sleep(0.5)
        beside, gaps.largest = max(beside, gaps.largest), 0.0
    results |= {
        "largest_gap_ms_while_compiling": 1000 * beside,
        "background_seconds": time.perf_counter() - begun - ready,
        "is_complete": not background.is_busy,
        "programs": len(background.seconds),
    }
    end = 0.0
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return results


def timed(llm: AsyncLLM, runner: asyncio.Runner, shape: str, rows: int) -> dict[str, float]:
    """Return milliseconds per token of batches of each kind."""
    prompts = [each["prompt_token_ids"] for each in dummy_llm.random_prompts(shape, rows, PROMPT)]

    def batch(params: dict[str, Any], tokens: int) -> float:
        given = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **params)
        client = AsyncLLMClient(llm, runner, [(prompt, given) for prompt in prompts])
        return load_generator.run(client, rows).seconds

    figures = {}
    for name in TIMED:
        params = KINDS[name]
        batch(params, 8)
        longs = [batch(params, 257) - batch(params, 1) for _ in range(3)]
        figures[name] = 1000 * statistics.median(longs) / 256
        print(name, round(figures[name], 3), flush=True)
    return figures


async def make_llm(folder: Path, **options: Any) -> AsyncLLM:
    defaults = {"background_compilation": True, "enable_prefix_caching": None}
    return AsyncLLM(folder, **dummy_llm.options_of(3, max_model_len=4096, **defaults, **options))


def run(args: Any, folder: Path, cache: str) -> dict[str, Any]:
    begun = time.perf_counter()
    with asyncio.Runner() as runner:
        llm = runner.run(make_llm(folder, max_num_seqs=args.rows, compilation_cache=cache))
        try:
            loaded = time.perf_counter() - begun
            results = runner.run(measured(llm, args.shape, args.rows, args.seconds))
            results = {"load_seconds": loaded, **results}
            results["ready_seconds"] = loaded + results["compile_seconds"]
            if args.timed:
                results["ms_per_token"] = timed(llm, runner, args.shape, args.rows)
            return results
        finally:
            runner.run(llm.close())


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-9b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=150.0, help="of streams, at most")
    parser.add_argument("--cache", default=None, help="default: an empty folder")
    parser.add_argument("--timed", action="store_true", help="time batches of kinds at the end")
    args = parser.parse_args()
    start = "warm" if args.cache and any(Path(args.cache).rglob("*-cache")) else "cold"
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty,
        dummy_llm.model_folder(args.shape) as folder,
    ):
        results = run(args, folder, args.cache or empty)
        about = {"shape": args.shape, "rows": args.rows, "start": start}
        print({name: value for name, value in results.items() if name != "kinds"})
        record.write(args.json, {"results": [about | results]})


if __name__ == "__main__":
    main()
