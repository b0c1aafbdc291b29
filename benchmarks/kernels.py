"""How near the kernels come to the memory's speed, by op and shape of the published models.

    python benchmarks/kernels.py [--ops gdn_step] [--json FILE]

Device time of a call. Calls are chained through the donated pool inside one program, call i on
layer i of so many layers that none finds its states in the L2 cache (60 MB). A sample is the time
of many enqueued programs less that of a few, over the calls between: what Python, the first launch
and the wait cost drops out. Bytes are those that must move, each input and output once; the
yardstick is the faster of XLA's copy and its addition on 1 GiB, measured before and after. To add
an op, write a generator of `Case` and put it into `OPS`.
"""

import argparse
import dataclasses
import functools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.pallas import dispatch
from jaxspec.pallas.gdn_step import gdn_step, gdn_step_reference
from jaxspec.pallas.paged_attention import paged_attention, paged_attention_reference

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from shapes import ATTENTION, GDN  # noqa: E402

FEW, SAMPLES = 2, 9
SECONDS = 0.02  # of device time in a sample, about
POOLS = 2**30  # bytes that a round over all layers touches at least
MAX_LAYERS, CALLS = 128, 16  # the kernel's programs go at least once round the layers
REFERENCE_CALLS = 4  # it compiles slowly; at one row it may find its states in the cache


@dataclasses.dataclass
class Case:
    """One op at one shape. `run(pool, layer, *operands)` gives its output and the new pool."""

    op: str
    about: dict  # what the results say of the shape
    run: Callable
    reference: Callable
    pool: Callable[[int], Any]  # arrays of so many layers
    layer_bytes: int  # of the pool, that one call touches
    operands: tuple
    total_bytes: int


def gdn_step_cases() -> Iterator[Case]:
    """Sizes of the decode rectangle on Qwen3.5-9B's heads, and the other models at one size."""
    sizes = [("float32", rows, width) for width in (4, 1) for rows in (64, 256, 8, 1)]
    sizes += [("float32", 64, 8), ("float16", 64, 4)]
    sizes += [("bfloat16", rows, width) for width in (4, 1) for rows in (64, 256, 1)]
    for model, shape in GDN.items():
        for dtype, rows, width in sizes:
            if model == "qwen3.5-9b" or (rows, width) == (64, 4):
                yield _gdn_step_case(model, shape, jnp.dtype(dtype), rows, width)


def _gdn_step_case(model, shape, dtype, rows, width):
    rng = np.random.default_rng(0)
    key = (rows, width, shape.key_heads, shape.key_dim)
    value = (rows, width, shape.value_heads, shape.value_dim)
    q, k = (rng.normal(size=key).astype(np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=value).astype(np.float32)
    g = -rng.exponential(size=value[:3]).astype(np.float32)
    beta = rng.random(size=value[:3]).astype(np.float32)
    slots = 1 + rng.permutation(rows).astype(np.int32)
    offset = rng.integers(0, width, size=rows).astype(np.int32)
    length = np.full(rows, width, np.int32)
    operands = (q, k, v, g, beta, slots, offset, length)
    state = (shape.value_heads, shape.value_dim, shape.key_dim)

    def pool(layers):
        # Every slot holds the same random state: the speed does not depend on which.
        one = jax.random.normal(jax.random.key(0), state, jnp.float32).astype(dtype)
        return jnp.broadcast_to(one, (layers, 1 + rows, width, *state)) + jnp.zeros((), dtype)

    def run(op, pool, layer, q, k, v, g, beta, *index):
        return op(q, k, v, g, beta, pool, layer, *index)

    state_bytes = rows * math.prod(state) * dtype.itemsize
    return Case(
        op="gdn_step",
        about={
            "model": model,
            "heads": str(shape),
            "dtype": dtype.name,
            "rows": rows,
            "width": width,
        },
        run=functools.partial(run, gdn_step),
        reference=functools.partial(run, gdn_step_reference),
        pool=pool,
        layer_bytes=state_bytes * width,
        operands=tuple(jnp.asarray(x) for x in operands),
        total_bytes=state_bytes * (1 + width) + sum(x.nbytes for x in operands) + v.nbytes,
    )


def paged_attention_cases() -> Iterator[Case]:
    """Many rows and one long one for all models; more sizes on the heads of two."""
    sizes = [(64, 4096, 4), (1, 32768, 4)]
    more = [(64, 4096, 1), (64, 1024, 4), (8, 4096, 4), (1, 4096, 4)]
    for model, shape in ATTENTION.items():
        detailed = model in ("qwen3-8b", "qwen3.5-35b-a3b")
        for rows, context, width in sizes + more * detailed:
            yield _paged_attention_case(model, shape, rows, context, width)
        if detailed:
            yield _paged_attention_case(model, shape, 64, 4096, 4, page_size=64)
            yield _paged_attention_case(model, shape, 64, 4096, 4, dtype="float32")


def _paged_attention_case(model, shape, rows, context, width, page_size=16, dtype="bfloat16"):
    rng = np.random.default_rng(0)
    pages = rows * context // page_size
    tables = 1 + rng.permutation(pages).reshape(rows, -1)
    tables = np.concatenate((np.zeros_like(tables[:1]), tables))
    slots = 1 + rng.permutation(rows)
    start, count = np.full(rows, context - width), np.full(rows, width)
    dtype = jnp.dtype(dtype)
    page = (page_size, shape.kv_heads, shape.head_dim)
    layer_bytes = 2 * rows * context * shape.kv_heads * shape.head_dim * dtype.itemsize

    def pool(layers):
        """The pool, and the queries: a call's output, so that the calls follow each other."""
        keys = jax.random.split(jax.random.key(0))
        queries = (rows, width, shape.heads, shape.head_dim)
        kv = (layers, 2, 1 + pages, *page)
        return tuple(jax.random.normal(*x, dtype) for x in zip(keys, (kv, queries), strict=True))

    def run(op, pool, layer, *index):
        kv, queries = pool
        out = op(queries, kv, layer, *index)
        return out, (kv, out)

    return Case(
        op="paged_attention",
        about={
            "model": model,
            "heads": str(shape),
            "dtype": dtype.name,
            "rows": rows,
            "context": context,
            "width": width,
            "page_size": page_size,
        },
        run=functools.partial(run, paged_attention),
        reference=functools.partial(run, paged_attention_reference),
        pool=pool,
        layer_bytes=layer_bytes,
        operands=tuple(jnp.asarray(x, jnp.int32) for x in (tables, slots, start, count)),
        total_bytes=layer_bytes,
    )


OPS = {"gdn_step": gdn_step_cases, "paged_attention": paged_attention_cases}


def chain(run: Callable, layers: int, calls: int) -> Callable:
    """One program of `calls` calls, one after the other on the pool, each on the next layer."""

    def program(pool, *operands):
        out = None
        for call in range(calls):
            out, pool = run(pool, call % layers, *operands)
        return out, pool

    return jax.jit(program, donate_argnums=0)


def samples(program: Callable, pool: jax.Array, operands: tuple) -> list[float]:
    """Seconds a program takes on the device."""

    def seconds(count):
        nonlocal pool
        begin = time.perf_counter()
        for _ in range(count):
            out, pool = program(pool, *operands)
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    for _ in range(2):  # compiles, then records the command buffer
        seconds(1)
    between = min(200, max(4, round(SECONDS / seconds(1))))
    seconds(FEW + between)  # the clocks rise
    return [(seconds(FEW + between) - seconds(FEW)) / between for _ in range(SAMPLES)]


def copy_bandwidth() -> float:
    """Bytes read and written a second, from one GiB to another."""
    x = jnp.ones(2**28, jnp.float32)
    programs = jax.jit(jnp.copy), jax.jit(lambda x: x + 1)
    return max(
        2 * x.nbytes / statistics.median(samples(lambda x, p=p: (p(x), x), x, ())) for p in programs
    )


def measure(case: Case) -> dict:
    """What the results say of one case."""
    layers = min(MAX_LAYERS, max(2, math.ceil(POOLS / case.layer_bytes)))
    times = {}
    for name, run, calls in (
        ("kernel", case.run, max(layers, CALLS)),
        ("reference", case.reference, REFERENCE_CALLS),
    ):
        program = chain(run, layers, calls)
        times[name] = [x / calls for x in samples(program, case.pool(layers), case.operands)]
    middle = statistics.median(times["kernel"])
    return {
        "op": case.op,
        **case.about,
        "us": round(1e6 * middle, 2),
        "us_least": round(1e6 * min(times["kernel"]), 2),
        "us_most": round(1e6 * max(times["kernel"]), 2),
        "bytes": case.total_bytes,
        "tb_per_s": round(case.total_bytes / middle / 1e12, 3),
        "reference_us": round(1e6 * statistics.median(times["reference"]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("The kernels run on a GPU, and this machine has none that JAX sees.")
    copies, results = [copy_bandwidth()], []
    for op in args.ops:
        for case in OPS[op]():
            results.append(measure(case))
            print(json.dumps(results[-1]), flush=True)
    copies.append(copy_bandwidth())
    for result in results:
        result["of_copy"] = round(result["tb_per_s"] * 1e12 / max(copies), 3)
    about = {
        "device": jax.devices()[0].device_kind,
        "runtime": jax.devices()[0].client.platform_version,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%F"),
        "copy_tb_per_s": [round(copy / 1e12, 3) for copy in copies],
        "implementations": dispatch.implementations(),
    }
    print(json.dumps(about), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
