"""Kept prefixes, a request that moves, updates, sleep, AsyncLLM and HTTP with 64 clients."""

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.acceptance.features import MIXED, params_of
from benchmarks.acceptance.job import Row, Rows, ready
from benchmarks.acceptance.models import config_of, folder_of
from benchmarks.acceptance.speed import Bench
from benchmarks.acceptance.watch import milliseconds
from benchmarks.engine.http_client import HTTPClient, ServerProcess, free_port
from benchmarks.engine.load_generator import AsyncLLMClient, run
from jaxspec import AsyncLLM, SamplingParams

CLIENTS = 64
SECONDS_TO_START = 180.0
# What HTTP's clients ask for, in turn; they read each answer to its length.
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 1000, "min_p": 0.01},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0, "logit_bias": {"50": 2.0}, "logprobs": 5},
    {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.1},
    # Its end is not forced before the length.
    {"structured_outputs": {"regex": "( [a-e]{1,2}){4000}"}, "ignore_eos": False},
)


def serving(rows: Rows) -> None:
    """Add a row per API; engines have the options of the part with the features."""
    job = rows.job
    with folder_of(job.model, config_of(job.model, is_small=job.is_small)) as folder:
        llm, figures = ready(folder, job.options(folder), ["greedy"])
        rows.add("ready", **figures)
        bench = Bench(llm, rows)
        rows.measure("kept prefix", lambda: kept_prefix(bench))
        rows.measure("export and import", lambda: moved(bench, folder, rows), needs=20.0)
        if not any(leaf.dtype.itemsize == 1 for leaf in llm.weight_specs("own").values()):
            rows.measure("update of weights", lambda: updated(bench), needs=20.0)
        rows.measure("sleep", lambda: slept(bench), needs=20.0)
        llm.close()
        rows.measure("AsyncLLM", lambda: by_tasks(folder, rows), needs=30.0)
        rows.measure("HTTP", lambda: by_http(bench, folder, rows), needs=45.0)


def kept_prefix(bench: Bench) -> Row:
    """The same prompt three times, then a chat's next turn: the tokens that are found.

    With recurrent states the second request leaves a state where the prompts part, and the third
    one begins on it.
    """
    (prompt,), params = bench.prompts(1), _greedy(bench.sizes.tokens)
    with bench.alone():
        same = [bench.llm.generate([prompt], params)[0] for _ in range(3)]
        ids = [*prompt["prompt_token_ids"], *same[0].outputs[0].token_ids, *range(7, 23)]
        (turn,) = bench.llm.generate([{"prompt_token_ids": ids}], params)
    found = {"cached_tokens": same[2].num_cached_tokens, "in_turn": turn.num_cached_tokens}
    if not all(found.values()):
        raise ValueError(f"Tokens that came before were not found: {found}.")
    first, _, again = (request.metrics.ttft or 0.0 for request in same)
    return {
        "prompt_tokens": len(prompt["prompt_token_ids"]),
        **found,
        "same_tokens": same[0].outputs[0].token_ids == same[2].outputs[0].token_ids,
        **milliseconds(first=first, again=again),
    }


def moved(bench: Bench, folder: Path, rows: Rows) -> Row:
    """Migrate a request to a second engine after its first tokens."""
    tokens = bench.sizes.tokens
    (prompt,), params = bench.prompts(1), _greedy(tokens)
    whole = bench.llm.generate([prompt], params)[0].outputs[0].token_ids
    other, figures = ready(folder, rows.job.options(folder), ["greedy"])
    try:
        with bench.llm.stream(prompt, params, request_id="moves") as pieces:
            ids = next(pieces).token_ids
            state = bench.llm.export_request("moves")
            ids += [id for piece in pieces for id in piece.token_ids]
        before = len(ids)
        with bench.alone():
            start = time.perf_counter()
            ids += [id for piece in other.import_request(state) for id in piece.token_ids]
            seconds = time.perf_counter() - start
    finally:
        other.close()
    if len(ids) != tokens or not 0 < before < tokens:
        raise ValueError(f"{before} tokens before the move, {len(ids)} in all, not {tokens}.")
    return {
        "tokens_before": before,
        "same_tokens": ids == whole,
        "ready_seconds": figures["ready_seconds"],
        **milliseconds(rest=seconds),
    }


def updated(bench: Bench) -> Row:
    """Update the weights in the middle of a stream, and back; from the device and from the host.

    The other weights write other ids for the same tokens, so drafts of a stale head are all wrong.
    """
    llm, tokens = bench.llm, bench.sizes.tokens
    (prompt,), params = bench.prompts(1), _greedy(tokens)
    whole = llm.generate([prompt], params)[0].outputs[0].token_ids
    old = llm.export_weights()
    ends = ("embed_tokens.weight", "lm_head.weight")
    host = {
        name: np.roll(each, 7, axis=0) if name.endswith(ends) else each
        for name, each in old.items()
    }
    there = {name: jax.device_put(each) for name, each in host.items()}
    llm.update_weights(there)  # compiles
    llm.update_weights(old)
    with bench.alone():
        by_host = llm.update_weights(host)
        start = time.perf_counter()
        llm.update_weights(there)
        jax.block_until_ready(llm._runner.weights)
        by_device = time.perf_counter() - start
    llm.update_weights(old)
    with llm.stream(prompt, params) as pieces:
        ids = next(pieces).token_ids
        update = llm.update_weights(there, mode="recompute")
        rest = list(pieces)
    before = len(ids) + sum(
        span.end - span.start
        for piece in rest
        for span in piece.weight_versions
        if span.version != update.version
    )
    ids += [id for piece in rest for id in piece.token_ids]
    so_far = {"prompt_token_ids": [*prompt["prompt_token_ids"], *ids[:before]]}
    again = llm.generate([so_far], _greedy(tokens - before))[0].outputs[0].token_ids
    llm.update_weights(old)
    back = llm.generate([prompt], params)[0].outputs[0].token_ids
    if ids[:before] != whole[:before] or back != whole or not 0 < before < tokens:
        raise ValueError(f"The first {before} tokens, or those after the update back, are others.")
    return {
        "tokens_of_old": before,
        "same_tokens": ids[before:] == again,
        "gigabytes": by_host.num_bytes / 1e9,
        **milliseconds(from_host=by_host.seconds, from_device=by_device),
    }


def slept(bench: Bench) -> Row:
    """Sleep and wake up in the middle of a stream, with the weights on the host."""
    llm, tokens = bench.llm, bench.sizes.tokens
    (prompt,), params = bench.prompts(1), _greedy(tokens)
    whole = llm.generate([prompt], params)[0].outputs[0].token_ids
    held = sum(llm.metrics()["memory_bytes"].values())
    with bench.alone(), llm.stream(prompt, params) as pieces:
        ids = next(pieces).token_ids
        start = time.perf_counter()
        llm.sleep()
        asleep = time.perf_counter()
        left = sum(llm.metrics()["memory_bytes"].values())
        waking = time.perf_counter()
        llm.wake_up()
        awake = time.perf_counter()
        before = len(ids)
        ids += [id for piece in pieces for id in piece.token_ids]
    if left or not 0 < before < tokens or len(ids) != tokens:
        raise ValueError(f"{left} bytes held asleep; {before} tokens before, {len(ids)} in all.")
    return {
        "tokens_awake": before,
        "same_tokens": ids == whole,
        "gigabytes": held / 1e9,
        **milliseconds(sleep=asleep - start, wake=awake - waking),
    }


def by_tasks(folder: Path, rows: Rows) -> Row:
    """Run a task per row, with all features in turn."""
    sizes, start = rows.job.sizes, time.perf_counter()
    with asyncio.Runner() as runner:
        llm = runner.run(_async_llm(folder, rows.job.options(folder)))
        try:
            seconds = {"ready_seconds": time.perf_counter() - start}
            params = params_of(MIXED, sizes.rows, sizes.tokens, llm.get_default_sampling_params())
            requests = [([7 + i] * sizes.prompt, each) for i, each in enumerate(params)]
            for name in ("first", "again"):
                with rows.alone():
                    served = run(AsyncLLMClient(llm, runner, requests), len(requests))
                seconds[f"{name}_seconds"] = served.seconds
            seconds["largest_gap_ms"] = 1000 * max(served.gaps)
        finally:
            runner.run(llm.close())
    if not all(answer.tokens for answer in served.answers.values()):
        raise ValueError(f"Tokens of each task: {served.answers}.")
    return seconds | {
        "tokens": served.tokens,
        "tokens_per_second": served.tokens / seconds["again_seconds"],
    }


async def _async_llm(folder: Path, options: dict[str, Any]) -> AsyncLLM:
    llm = AsyncLLM(folder, **options)
    await llm.warm_up()
    return llm


def by_http(bench: Bench, folder: Path, rows: Rows) -> Row:
    """Stream from `jaxspec serve` to 64 clients, twice."""
    tokens = bench.sizes.tokens
    prompts = [prompt["prompt_token_ids"] for prompt in bench.prompts(CLIENTS)]
    same = {"model": "accepted", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    same |= {"stream_options": {"include_usage": True}}
    bodies = [
        {"prompt": prompt, **same, **asked}
        for prompt, asked in zip(prompts, itertools.cycle(ASKED), strict=False)
    ]
    start = time.perf_counter()
    with server_of(folder, rows.job.options(folder)) as server:
        figures: Row = {"ready_seconds": time.perf_counter() - start, "clients": CLIENTS}
        for name in ("first", "again"):
            with bench.alone(), HTTPClient(server.port, bodies, CLIENTS) as client:
                served = run(client, CLIENTS)
            figures[f"{name}_seconds"] = served.seconds
        if served.tokens != CLIENTS * tokens:
            raise ValueError(f"{served.tokens} tokens, not {CLIENTS * tokens}.")
        figures["tokens_per_second"] = served.tokens / served.seconds
        return figures | milliseconds(
            first_token=max(served.ttft), largest_gap=max(served.gaps, default=0.0)
        )


def server_of(folder: Path, options: dict[str, Any]) -> ServerProcess:
    """Start `jaxspec serve` with `options` of the engine.

    Raises:
        RuntimeError: it did not start; with the end of its words.
    """
    port, words = free_port(), folder / "server.txt"
    flags = ["--port", str(port), "--served-model-name", "accepted", "--no-access-log"]
    command = [sys.executable, "-m", "jaxspec", "serve", str(folder), *flags]
    for name, value in options.items():
        command += _flag(name, value)
    with words.open("w") as file:
        try:
            return ServerProcess(command, port, SECONDS_TO_START, stdout=file, stderr=file)
        except RuntimeError as error:
            end = words.read_text(errors="replace").strip()[-300:]
            raise RuntimeError(f"The server did not start: {end}") from error


def _flag(name: str, value: Any) -> list[str]:
    """Return an option's words on the command line; a server has no `show_progress`."""
    if value is None or name == "show_progress":
        return []
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{words}" if value else f"--no-{words}"]
    if isinstance(value, list):
        value = ",".join(map(str, value))
    word = json.dumps(value) if isinstance(value, dict) else str(value)
    return [f"--{words}", word]


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
