"""Times of the stages of sampling on a device, by sampling features.

    python -m benchmarks.kernels.sampling [--rows 256 4] [--vocabs 248320] [--json FILE]

64 rows that verify 3 drafts have 256 rows of logits. One row has 4. Each line is a whole draw:
processors, noise and argmax; `us_more` is what it takes beyond a draw with temperature alone. There
are no stop ids, whose mask works in place in a step. Before anything is timed, the ids that are
kept are compared with a sort in float64 on the host.

A draw must read the logits once: 254 MB of 256 rows by 248,320 ids, about 60 us on an H200. To
make adjusted logits should take twice that. Noise for all ids computes for longer than it reads,
by its instructions about 170 us; a small top-k makes none, and sorts three times 2,048 numbers a
row. top-p alone draws, sums the mass above the token, and searches in the rows whose token it
rejects. A pass of the search gives four bits of the cut. It makes 15 comparisons and sums a logit,
about 100 us of arithmetic for 256 rows. Eight passes end a search, and top-k beyond 128 with top-p
makes two. A pass of a search that no row needs should cost a few microseconds. `sampling_price.py`
has one program for all requests.

To add a feature, add a line to `DRAWS`, or a function to `STAGES`. On a CPU the times are those of
XLA there, and say nothing about a GPU.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.run import chain, samples
from benchmarks.measure import record
from jaxspec.proposers.ngram import look_up
from jaxspec.requests.sampling_features import (
    BIAS,
    FULL,
    MIN_P,
    PENALTIES,
    SAMPLED,
    TOP_K,
    SamplingFeatures,
)
from jaxspec.sampling import SamplingInputs, draw
from jaxspec.sampling.logprobs import pack_logprobs
from jaxspec.sampling.processors import process_logits
from jaxspec.sampling.tables import SamplingTables

BASELINE = "temperature"
POOLS = 2**29  # bytes of inputs that calls take in turn, so that none finds them in the L2 cache
MAX_POOLS, CALLS, ROUNDS = 16, 4, 8
CHECKED = 8  # rows that are compared with the host's
TOLERANCE = 1e-5  # of top-p's mass: float32 sums round


class Draw(NamedTuple):
    """Sampling parameters of all rows of a draw; the columns of `SAMPLING_FIELDS` by name."""

    features: SamplingFeatures
    columns: dict[str, float]


DRAWS = {
    BASELINE: Draw(SAMPLED, {}),
    "top-k 20, top-p 0.95": Draw(TOP_K, {"top_k": 20, "top_p": 0.95}),
    "top-k 20, top-p 0.95, beside others": Draw(FULL, {"top_k": 20, "top_p": 0.95}),
    "top-p 0.95": Draw(FULL, {"top_p": 0.95}),
    "top-k 1,000": Draw(FULL, {"top_k": 1000}),
    "top-k 1,000, top-p 0.95": Draw(FULL, {"top_k": 1000, "top_p": 0.95}),
    "min-p 0.05": Draw(SAMPLED | SamplingFeatures.of(MIN_P), {"min_p": 0.05}),
    "penalties": Draw(
        SAMPLED | SamplingFeatures.of(PENALTIES),
        {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    ),
    "a bias": Draw(SAMPLED | SamplingFeatures.of(BIAS), {}),
}

COLUMNS = {"temperature": 0.8, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "min_len": 0}
COLUMNS |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
COLUMNS |= {"prompt_len": 100, "num_computed": 120}
COLUMNS |= {"num_reported": 0, "reports_processed": 0}
PLACES = 4  # that a row verifies


def peaked(key: jax.Array, rows: int, vocab: int) -> jax.Array:
    """Logits (float32) by Zipf's law: a dozen ids have 95% of the mass."""
    ranks = vocab * jax.random.uniform(key, (rows, vocab))
    return -2.0 * jnp.log(1.0 + ranks)


def flat(key: jax.Array, rows: int, vocab: int) -> jax.Array:
    """Logits (float32) of a normal distribution: most ids belong to the 95%."""
    return jax.random.normal(key, (rows, vocab))


LOGITS = {"peaked": peaked, "flat": flat}


def inputs_of(draw: Draw, rows: int, vocab: int) -> SamplingInputs:
    """`draw.columns` in all rows: verifies of `PLACES` tokens, each of a request of its own."""
    count, values = rows // PLACES, COLUMNS | draw.columns
    columns = {
        name: jnp.full(count, value, jnp.float32 if isinstance(value, float) else jnp.int32)
        for name, value in values.items()
    }
    slots = jnp.arange(1, count + 1, dtype=jnp.int32)
    columns |= {"seed": slots, "slot": slots, "table_slot": slots}
    columns["stop_ids"] = jnp.zeros((count, 0), jnp.int32)
    columns["grammar_states"] = jnp.zeros((count, PLACES), jnp.int32)
    tables = SamplingTables.empty(count + 1, vocab, 8192, PLACES).of(draw.features)
    tokens = jax.random.randint(jax.random.key(0), (count, PLACES), 0, vocab, jnp.int32)
    return SamplingInputs(columns, tables, tokens).repeat(PLACES)


def check(name: str, logits: jax.Array) -> None:
    """Compare the ids that a draw keeps in some rows with those of a sort on the host.

    Raises:
        AssertionError: they differ, by more than rounding explains.
    """
    draw, logits = DRAWS[name], logits[:CHECKED]
    if not {"top_k", "top_p"} & set(draw.columns):
        return  # it forbids nothing, or by another rule
    rows, vocab = logits.shape
    run = jax.jit(process_logits, static_argnames="features")
    arguments = inputs_of(draw, rows, vocab), jnp.zeros(rows, jnp.int32)
    scaled = np.asarray(run(logits, *arguments, features=SAMPLED))
    kept = np.isfinite(np.asarray(run(logits, *arguments, features=draw.features)))
    top_k, top_p = draw.columns.get("top_k", vocab), draw.columns.get("top_p", 1.0)
    for row, is_kept in zip(scaled, kept, strict=True):
        order = np.argsort(-row, kind="stable")[:top_k]
        weights = np.exp(row[order].astype(np.float64) - row.max())
        mass = np.cumsum(weights) / weights.sum()
        least, most = (
            top_k if top_p == 1.0 else 1 + int(np.searchsorted(mass, top_p * (1.0 + error)))
            for error in (-TOLERANCE, TOLERANCE)
        )
        count = int(is_kept.sum())
        assert least <= count <= min(most, top_k), (name, count, least, most)
        assert is_kept[order[:count]].all(), f"{name} keeps other ids than the likeliest."


def seconds_of(run: Callable, pools: list, *operands: jax.Array) -> float:
    """Device seconds of `run(pool, *operands)`, called with one of `pools` after the other."""

    def on_pool(pools, index, *operands):
        return run(pools[index], *operands), pools

    program = chain(on_pool, len(pools), CALLS, ROUNDS, writes=False)
    return statistics.median(samples(program, pools, operands)) / CALLS / ROUNDS


def make_pools(make: Callable[[jax.Array], jax.Array], size: int) -> list[jax.Array]:
    """Arrays of `size` bytes by `make(key)`, so many that none stays in the L2 cache."""
    count = min(MAX_POOLS, max(2, POOLS // size))
    return [jax.jit(make)(jax.random.key(number)) for number in range(count)]


def draws(rows: int, vocab: int, kind: str) -> list[dict]:
    """A result for each of `DRAWS`."""
    make = functools.partial(LOGITS[kind], rows=rows, vocab=vocab)
    results = []
    for name, asked in DRAWS.items():
        pools = make_pools(make, 4 * rows * vocab)
        check(name, pools[0])
        run = functools.partial(draw, features=asked.features)
        seconds = seconds_of(run, pools, inputs_of(asked, rows, vocab), jnp.arange(rows))
        about = {"stage": "draw", "rows": rows, "vocab": vocab, "logits": kind, "asks": name}
        results.append(about | {"us": round(1e6 * seconds, 1)})
        results[-1]["us_more"] = round(results[-1]["us"] - results[0]["us"], 1)
        print(json.dumps(results[-1]), flush=True)
    return results


def ngram(rows: int = 64, positions: int = 8192) -> list[dict]:
    """The look-up of `NgramProposer`, in texts of few different ids, which match often."""

    def make(key):
        return jax.random.randint(key, (rows, positions), 0, 50, jnp.int32)

    run = functools.partial(look_up, shortest=2, longest=5, num_drafts=4)
    lengths = jnp.full(rows, positions - 7, jnp.int32)
    seconds = seconds_of(run, make_pools(make, 4 * rows * positions), lengths)
    result = {"stage": "ngram", "rows": rows, "positions": positions, "us": round(1e6 * seconds, 1)}
    print(json.dumps(result), flush=True)
    return [result]


def logprobs(rows: int = 256, vocab: int = 248_320) -> list[dict]:
    """Compute the logprobs of the tokens, of which requests may want 1 or 20."""
    pools = make_pools(functools.partial(flat, rows=rows, vocab=vocab), 4 * rows * vocab)
    seconds = seconds_of(pack_logprobs, pools, jnp.arange(rows, dtype=jnp.int32))
    result = {"stage": "logprobs", "rows": rows, "vocab": vocab, "us": round(1e6 * seconds, 1)}
    print(json.dumps(result), flush=True)
    return [result]


STAGES = {
    "ngram": ngram,
    "logprobs": logprobs,
}  # what is no draw; each prints and returns its results


def main() -> None:
    """Measure, line by line."""
    parser = record.parser(__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 4], help="rows of logits")
    parser.add_argument("--vocabs", nargs="+", type=int, default=[248_320, 151_936])
    parser.add_argument("--logits", nargs="+", choices=LOGITS, default=list(LOGITS))
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--check-only", action="store_true", help="compare and measure nothing")
    args = parser.parse_args()
    results = []
    for stage in [] if args.check_only else args.stages:
        results += STAGES[stage]()
    for rows, vocab, kind in _sizes(args):
        if args.check_only:
            logits = jax.jit(functools.partial(LOGITS[kind], rows=rows, vocab=vocab))
            for name in DRAWS:
                check(name, logits(jax.random.key(0)))
        else:
            results += draws(rows, vocab, kind)
        record.write(args.json, {"results": results})


def _sizes(args: argparse.Namespace) -> list[tuple[int, int, str]]:
    return [(n, vocab, kind) for n in args.rows for vocab in args.vocabs for kind in args.logits]


if __name__ == "__main__":
    main()
