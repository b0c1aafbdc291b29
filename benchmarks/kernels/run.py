"""Kernels' share of the memory's bandwidth, by op and shape of the published models.

    python -m benchmarks.kernels.run [--ops gdn_step] [--no-reference] [--no-public] [--json FILE]

Device time of a call. Calls are chained through the donated pool inside one program, call i on
layer i of so many layers that none finds its states in the L2 cache (60 MB), and that several times
over, so that the device takes longer than the host, whose part grows with what a program puts out.
A sample is the time of many enqueued programs less that of a few, over the calls between: what
Python, the first launch and the wait cost drops out. Bytes are those that must move, each input and
output once; the yardstick is the faster of XLA's copy and its addition on 1 GiB, measured before
and after each op, whose results are then written. A FILE that exists keeps what it says of other
ops. The cases are in `cases/`.

Beside them stand public Triton kernels of the same work (`public/`), timed alike, where
torch and their packages (vllm, mamba_ssm, fla-core) are installed: of several the fastest. Torch
gets the memory that JAX leaves, by default a quarter; XLA_PYTHON_CLIENT_MEM_FRACTION=0.5 leaves it
more.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import Case
from benchmarks.kernels.cases.table import OPS
from benchmarks.measure import record
from jaxspec.pallas import dispatch

FEW, SAMPLES = 2, 9
SECONDS = 0.02  # of device time in a sample, about
POOLS = 2**30  # bytes that a round over all layers touches at least
MAX_LAYERS, CALLS = 128, 16  # the kernel's programs go at least once round the layers
ROUNDS, LONG_ENOUGH = 16, 0.003  # of a program: at most, and seconds at the speed below
SPEED, LEAST = 4e12, 1.5e-6  # bytes a second, and seconds of a call
REFERENCE_CALLS = 4  # it compiles slowly; at one row it may find its states in the cache


def chain(run: Callable, layers: int, calls: int, rounds: int, writes: bool = True) -> Callable:
    """One program of `rounds` times `calls` calls, one after the other, each on the next layer.

    The pool orders those that write it. For others a barrier does, which also keeps XLA from
    taking two of them for the same; all they put out in a round is returned, or they would not run.
    What the program before returned is donated: a graph whose outputs lie elsewhere each time is to
    be updated.
    """

    def around(_, carry):
        pool, operands, _ = carry
        outs = []
        for call in range(calls):
            out, pool = run(pool, call % layers, *operands)
            if not writes:
                operands, out = jax.lax.optimization_barrier((operands, out))
            outs.append(out)
        return pool, operands, outs[-1:] if writes else outs

    def program(pool, before, *operands):
        if before is None:  # to learn what is put out
            before = around(0, (pool, operands, None))[-1]
        pool, _, outs = jax.lax.fori_loop(0, rounds, around, (pool, operands, before))
        return pool, outs

    return jax.jit(program, donate_argnums=(0, 1), keep_unused=True)


def samples(program: Callable, pool: Any, operands: tuple) -> list[float]:
    """Seconds a program takes on the device."""
    sizes = jax.eval_shape(lambda *args: program(*args)[1], pool, None, *operands)
    carry = pool, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sizes)

    def seconds(count):
        nonlocal carry
        begin = time.perf_counter()
        for _ in range(count):
            carry = program(*carry, *operands)
        jax.block_until_ready(carry)
        return time.perf_counter() - begin

    return each(seconds)


def each(seconds: Callable[[int], float]) -> list[float]:
    """The seconds of one program, where `count` of them take `seconds(count)`."""
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
        2 * x.nbytes / statistics.median(samples(lambda x, _, p=p: (x, p(x)), x, ()))
        for p in programs
    )


def public(case: Case, layers: int, calls: int) -> dict:
    """Return the result of the fastest public kernel for the case, if there is one."""
    if not record.installed("torch"):
        return {}
    # Not at the top: it needs torch.
    from benchmarks.kernels.public import recurrent as public_kernels

    programs = public_kernels.programs(case, layers, calls)
    times = {name: statistics.median(each(program)) / calls for name, program in programs}
    name = min(times, key=times.get, default=None)
    return {"public_us": round(1e6 * times[name], 2), "public": name} if name else {}


def measure(case: Case, with_reference: bool = True, with_public: bool = True) -> dict:
    """Return the result of one case. References compile slowly."""
    layers = min(MAX_LAYERS, max(2, math.ceil(POOLS / case.layer_bytes)))
    kernel_calls = case.calls or max(layers, CALLS)
    times = {}
    for name, run, calls in (
        ("kernel", case.run, kernel_calls),
        ("reference", case.reference, case.calls or REFERENCE_CALLS),
    ):
        if run is None or (name == "reference" and not with_reference):
            continue
        least = calls * max(case.total_bytes / SPEED, LEAST)
        rounds = min(ROUNDS, math.ceil(LONG_ENOUGH / least))
        program = chain(run, layers, calls, rounds, writes=case.writes)
        programs = samples(program, case.pool(layers), case.operands)
        times[name] = [seconds / calls / rounds for seconds in programs]
    middle = statistics.median(times["kernel"])
    result = {
        "op": case.op,
        **case.about,
        "us": round(1e6 * middle, 2),
        "us_least": round(1e6 * min(times["kernel"]), 2),
        "us_most": round(1e6 * max(times["kernel"]), 2),
        "bytes": case.total_bytes,
        "tb_per_s": round(case.total_bytes / middle / 1e12, 3),
    }
    if case.flops:
        result["tflop_per_s"] = round(case.flops / middle / 1e12, 1)
    if "reference" in times:
        result["reference_us"] = round(1e6 * statistics.median(times["reference"]), 2)
    if with_public:
        result |= public(case, layers, kernel_calls)
    return result


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--no-reference", dest="reference", action="store_false")
    parser.add_argument("--no-public", dest="public", action="store_false")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("The kernels run on a GPU, and this machine has none that JAX sees.")
    about = {**record.machine(), "runtime": jax.devices()[0].client.platform_version}
    implementations = record.read(args.json).get("implementations", {})
    copy = 0.0
    for op in args.ops:
        measured, copy = [], max(copy, copy_bandwidth())
        for case in OPS[op]():
            result = measure(case, args.reference, args.public)
            result["of_copy"] = round(result["tb_per_s"] * 1e12 / copy, 3)
            result["copy_tb_per_s"] = round(copy / 1e12, 3)
            result["commit"] = about["commit"]
            measured.append(result)
            print(json.dumps(result), flush=True)
        about["implementations"] = implementations | dispatch.implementations()
        results = record.completed(args.json, measured, lambda each: each["op"])
        record.write(args.json, {**about, "results": results})


if __name__ == "__main__":
    main()
