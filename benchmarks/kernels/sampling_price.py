"""Cost of one program with all sampling features for rows that use few of them.

    python -m benchmarks.kernels.sampling_price [--rows 256] [--vocab 248320] [--json FILE]

Three programs draw from the same logits: greedy (an argmax), temperature with a small top-k, and
everything, with logprobs. Requests are data, so the third is compiled once for all of them. Logits
are made in each program, as a model makes them, so that XLA may overwrite them; `us` is what a
program takes beyond that. `kernels_us` names the longest kernels of a call, by a profile.

Beside them: the noise of all ids by threefry and by the counter-based generator that a draw uses,
the kernels at several numbers of blocks and of wanted rows, and `pack_logprobs`. The whole takes
about a minute, most of which is XLA's. On a CPU the times say nothing about a GPU.
"""

import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.sampling import COLUMNS, LOGITS, PLACES
from benchmarks.measure import record
from benchmarks.measure.kernel_times import kernel_times
from jaxspec.pallas import dispatch
from jaxspec.pallas.selection import LastKept, best_noisy, best_noisy_reference, sums_above
from jaxspec.requests.sampling_features import (
    BIAS,
    FULL,
    LOGPROBS,
    MIN_P,
    PENALTIES,
    TEMPERATURE,
    TOP_K,
    TOP_K_TOP_P,
    SamplingFeatures,
)
from jaxspec.sampling import SamplingInputs, Use, draw, gumbel_noise
from jaxspec.sampling.logprobs import pack_logprobs, report_logprobs, reported_logits
from jaxspec.sampling.noise import row_keys
from jaxspec.sampling.processors import process_logits
from jaxspec.sampling.tables import SamplingTables

EVERYTHING = SamplingFeatures.of(BIAS, PENALTIES, TEMPERATURE, MIN_P, TOP_K_TOP_P, LOGPROBS)
FEW, MANY, SAMPLES = 2, 12, 5
SHOWN = 14  # kernels of a profile

QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
PENALTY = {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
ASKED = {
    "nothing": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "Qwen's default": QWEN,
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-p 0.5": {"temperature": 1.0, "top_p": 0.5},
    "top-k 1,000": {"temperature": 1.0, "top_k": 1000},
    "top-k 1,000, top-p 0.9": {"temperature": 1.0, "top_k": 1000, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties, greedy": {"temperature": 0.0} | PENALTY,
    "its logprob": {"temperature": 0.8, "num_reported": 1},
    "likeliest ids": {"temperature": 0.8, "num_reported": 6},
}


def inputs_of(columns: dict[str, float], rows: int, vocab: int, tables: Any) -> SamplingInputs:
    """`columns` in all rows: verifies of `PLACES` tokens, each of a request of its own."""
    count = rows // PLACES
    values = COLUMNS | columns
    named = {
        name: jnp.full(count, value, jnp.float32 if isinstance(value, float) else jnp.int32)
        for name, value in values.items()
    }
    slots = jnp.arange(1, count + 1, dtype=jnp.int32)
    named |= {"seed": slots, "slot": slots, "table_slot": jnp.zeros_like(slots)}
    named["stop_ids"] = jnp.full((count, 4), 7, jnp.int32)
    named["grammar_states"] = jnp.zeros((count, PLACES), jnp.int32)
    tokens = jax.random.randint(jax.random.key(0), (count, PLACES), 0, vocab, jnp.int32)
    return SamplingInputs(named, tables, tokens)


def threefry_noise(seeds, positions, use, vocab):
    """The noise of all ids as jaxspec made it until 2026-11-26."""

    def of_row(seed, position):
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), use)
        return jax.random.bits(key, (vocab,), jnp.uint32)

    bits = jax.vmap(of_row)(seeds, positions)
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def microseconds(program: Callable, *operands: Any) -> float:
    """Device time of a call, from many enqueued calls less few."""

    def seconds(count):
        begin = time.perf_counter()
        for _ in range(count):
            out = program(*operands)
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    for _ in range(3):
        seconds(1)
    between = MANY - FEW
    times = [(seconds(MANY) - seconds(FEW)) / between for _ in range(SAMPLES)]
    return 1e6 * statistics.median(times)


class Measurements:
    """Results, each printed when it is there; `made_us` is what making the logits takes."""

    def __init__(self, profiles: bool):
        self.results: list[dict] = []
        self.made_us, self._profiles = 0.0, profiles

    def add(
        self, program: Callable, /, *operands: Any, profile: bool = False, **about: Any
    ) -> None:
        """Measure a jitted program."""
        begin = time.perf_counter()
        jax.block_until_ready(program(*operands))
        first = time.perf_counter() - begin
        us = microseconds(program, *operands)
        result = about | {
            "us": round(us - self.made_us, 1),
            "us_with_logits": round(us, 1),
            "first_call_s": round(first, 2),
        }
        if profile and self._profiles:
            figures = kernel_times(lambda: jax.block_until_ready(program(*operands)), 1)
            times = list(figures["kernel_ms_by_name"].items())[:SHOWN]
            result["kernels_us"] = {name: round(1e3 * ms, 1) for name, ms in times}
            result["num_kernels"] = figures["kernels_per_step"]
        self.results.append(result)
        print(json.dumps(result), flush=True)


def made(logits: jax.Array, offset: jax.Array) -> jax.Array:
    """The logits, as a result that XLA may overwrite."""
    return jax.lax.optimization_barrier(logits + offset)


def greedy(logits, offset):
    """The draw of a program that has its logits, and nothing else."""
    return jnp.argmax(made(logits, offset), axis=1)


@functools.partial(jax.jit, static_argnames=("features", "places"))
def drawn(logits, offset, inputs, positions, *, features, places=PLACES):
    """Tokens, and logprobs where the features report them."""
    logits = made(logits, offset)
    rows = inputs.repeat(places)
    tokens = draw(logits, rows, positions, features=features)
    if LOGPROBS not in features:
        return tokens
    processed = functools.partial(reported_logits, logits, rows, positions, features=features)
    reports = rows.num_reported, rows.reports_processed
    return tokens, report_logprobs(logits, tokens, *reports, processed)


def programs(found: Measurements, rows: int, vocab: int, kind: str) -> None:
    """The three programs, by what requests ask for."""
    offset, positions = jnp.float32(0.0), jnp.arange(rows, dtype=jnp.int32)
    logits = jax.jit(functools.partial(LOGITS[kind], rows=rows, vocab=vocab))(jax.random.key(1))
    found.made_us = 0.0
    found.add(jax.jit(made), logits, offset, program="logits", logits=kind)
    found.made_us = found.results[-1]["us_with_logits"]
    found.add(jax.jit(greedy), logits, offset, program="greedy", logits=kind, asks="nothing")
    tables = SamplingTables.empty(rows // PLACES + 1, vocab, 8192, PLACES)
    for name in ("nothing", "temperature", "Qwen's default"):
        inputs = inputs_of(ASKED[name], rows, vocab, None)
        run = functools.partial(drawn, features=TOP_K)
        about = {"program": "top_k", "logits": kind, "asks": name}
        found.add(run, logits, offset, inputs, positions, profile=kind == "flat", **about)
    for name, columns in ASKED.items():
        inputs = inputs_of(columns, rows, vocab, tables)
        run = functools.partial(drawn, features=EVERYTHING)
        about = {"program": "everything", "logits": kind, "asks": name}
        found.add(run, logits, offset, inputs, positions, profile=kind == "flat", **about)


def parts(found: Measurements, rows: int, vocab: int) -> None:
    """Noise, kernels and `pack_logprobs` alone, on flat logits."""
    found.made_us = 0.0
    logits = jax.jit(functools.partial(LOGITS["flat"], rows=rows, vocab=vocab))(jax.random.key(2))
    seeds = jnp.arange(rows, dtype=jnp.int32)
    for name, noise in (("threefry", threefry_noise), ("counter", gumbel_noise)):
        run = jax.jit(lambda x, s, noise=noise: jnp.argmax(x + noise(s, s, Use.TARGET, vocab), 1))
        found.add(run, logits, seeds, part="argmax of logits and noise, XLA", noise=name)
    found.add(jax.jit(pack_logprobs), logits, seeds, part="pack_logprobs", profile=True)
    largest, flags = jnp.max(logits, axis=1), jnp.zeros(rows, bool)
    keys = row_keys(seeds, seeds, Use.TARGET)
    for blocks in _block_counts():
        noisy, sums = jax.jit(best_noisy), jax.jit(sums_above)
        for share in (1, 10, None):
            is_wanted = jnp.zeros(rows, bool) if share is None else seeds % share == 0
            about = {"wanted": int(is_wanted.sum()), "blocks": blocks}
            operands = logits, keys, ~flags, LastKept.none(rows), is_wanted
            found.add(noisy, *operands, part="best_noisy", **about)
            for count in (2, 15):
                limits = jnp.broadcast_to(jnp.linspace(-2.0, 2.0, count), (rows, count))
                operands = logits, largest, limits, flags, is_wanted
                found.add(sums, *operands, part="sums_above", limits=count, **about)


def checks(found: Measurements, rows: int, vocab: int) -> None:
    """Count rows whose kernel draws as the reference, and as a masked draw does."""
    rows = min(rows, 64)
    logits = jax.jit(functools.partial(LOGITS["flat"], rows=rows, vocab=vocab))(jax.random.key(3))
    seeds, every = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, bool)
    operands = row_keys(seeds, seeds, Use.TARGET), seeds % 8 > 0, LastKept.none(rows), every
    kernel, reference = (jax.jit(f)(logits, *operands) for f in (best_noisy, best_noisy_reference))
    inputs = inputs_of({"temperature": 1.0, "top_p": 0.5}, rows, vocab, None).repeat(PLACES)
    masked = jax.jit(functools.partial(process_logits, features=FULL))(logits, inputs, seeds)
    keys = row_keys(inputs.seed, seeds, Use.TARGET)
    wanted = jax.jit(best_noisy)(masked, keys, every, LastKept.none(rows), every)
    drawn = jax.jit(functools.partial(draw, features=FULL))(logits, inputs, seeds)
    result = {
        "check": rows,
        "kernel_as_reference": int((kernel == reference).sum()),
        "draw_as_masked": int((drawn == wanted).sum()),
        "kept_by_top_p": int(jnp.isfinite(masked).sum(axis=1).mean()),
        "implementations": dispatch.implementations(),
    }
    found.results.append(result)
    print(json.dumps(result), flush=True)


def _block_counts() -> Any:
    """Set the kernels' number of blocks, one after the other; the default comes last."""
    if jax.default_backend() != "gpu":
        yield None
        return
    from jaxspec.pallas.gpu.device import MULTIPROCESSORS
    from jaxspec.pallas.selection import best_noisy_kernel, sums_above_kernel

    files = best_noisy_kernel, sums_above_kernel
    kernels = best_noisy_kernel.best_noisy_kernel, sums_above_kernel.sums_above_kernel
    defaults = [file._BLOCKS for file in files]
    for each in (8, 16, 32):
        for file, kernel in zip(files, kernels, strict=True):
            file._BLOCKS = each * MULTIPROCESSORS
            kernel.clear_cache()
        jax.clear_caches()
        yield each
    for file, kernel, default in zip(files, kernels, defaults, strict=True):
        file._BLOCKS = default
        kernel.clear_cache()


def main() -> None:
    """Measure, line by line."""
    parser = record.parser(__doc__)
    parser.add_argument("--rows", type=int, default=256, help="rows of logits")
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--logits", nargs="*", choices=LOGITS, default=["flat", "peaked"])
    parser.add_argument("--no-parts", dest="parts", action="store_false")
    parser.add_argument("--no-profiles", dest="profiles", action="store_false")
    args = parser.parse_args()
    found = Measurements(args.profiles)
    checks(found, args.rows, args.vocab)
    for kind in args.logits:
        programs(found, args.rows, args.vocab, kind)
        record.write(args.json, {"results": found.results})
    if args.parts:
        parts(found, args.rows, args.vocab)
    record.write(args.json, {"results": found.results})


if __name__ == "__main__":
    main()
