"""Time of the sums over a group's devices, between the matmuls of a model.

    python -m benchmarks.kernels.group_sums [--tensor-parallel-size 2] [--rows 1 8 64] [--json FILE]

A program has a chain of 64 sums. In `alone` each is only added and normalized; in `layer` the
feed-forward layer of the 9B, as one device has it, makes the next one. Three programs do the same:
`fused` with `reduce_add_norm`, `psum` with all-reduces, and `none`, in which a device adds its own
part. `us` is the time of a link of the chain, the least of three repeats of 20 launches; `equal`
says whether the first two gave the same bits. Elsewhere than on GPUs `fused` is a psum, too.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import record
from jaxspec import parallel
from jaxspec.pallas.matmul.feed_forward import feed_forward
from jaxspec.pallas.norm import mailbox
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.mailbox import Mailbox, MailboxArgs
from jaxspec.pallas.norm.residual import OfDevices
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.parallel import Group
from jaxspec.runner.programs import XLA_OPTIONS
from jaxspec.weight import Dense

HIDDEN, INNER = 4096, 12288
LINKS, WEIGHTS, LAUNCHES, REPEATS = 64, 4, 20, 3
PROGRAMS = "fused", "psum", "none"


@dataclasses.dataclass(frozen=True)
class Chain:
    """A case: what the file has one result of."""

    devices: int
    kind: str  # "alone" or "layer"
    rows: int


def step_of(program: str, chain: Chain, box: Mailbox) -> Callable[..., Any]:
    def step(mailbox_args: MailboxArgs, stream: Any, pending: Any, scale: Any, weights: Any) -> Any:
        norm = Norm(scale, 1e-6, zero_centred=True)
        fused = program == "fused"
        with mailbox.use(box, mailbox_args) if fused else contextlib.nullcontext():
            for link in range(LINKS):
                parts = pending if program == "none" else OfDevices(pending)
                if chain.kind == "alone":
                    stream, pending = add_norm(stream, parts, norm)
                else:
                    up, down = map(Dense, weights[link % WEIGHTS])
                    stream, pending = feed_forward(stream, parts, norm, up, down)
        # As in a step: one collective of XLA, for which it joins the launches of the devices.
        return stream, parallel.gather(stream[:1, :1], axis=0)

    return step


def arguments(chain: Chain, box: Mailbox, group: Group) -> tuple[Any, ...]:
    """Return the group's arrays; devices differ in `pending` and in the weights."""
    rng, split = np.random.default_rng(0), INNER // group.size

    def each(shape: tuple[int, ...], scale: float, is_shared: bool = False) -> jax.Array:
        draws = 1 if is_shared else group.size
        drawn = [rng.standard_normal(shape, np.float32) * scale for _ in range(draws)]
        arrays = [
            jax.device_put(drawn[rank % draws].astype(jnp.bfloat16), device)
            for rank, device in enumerate(group.devices)
        ]
        return group.stacked(arrays)

    shapes = ((HIDDEN, 2 * split), (split, HIDDEN))
    count = WEIGHTS if chain.kind == "layer" else 0
    weights = [tuple(each(shape, 0.01) for shape in shapes) for _ in range(count)]
    rows = chain.rows, HIDDEN
    scale = each((HIDDEN,), 0.1, is_shared=True)
    return box.allocate(group), each(rows, 1, is_shared=True), each(rows, 1), scale, weights


def microseconds(program: Callable[..., Any], args: tuple[Any, ...]) -> float:
    jax.block_until_ready([program(*args) for _ in range(3)])
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        outs = [program(*args) for _ in range(LAUNCHES)]
        jax.block_until_ready(outs)
        seconds.append(time.perf_counter() - started)
    return 1e6 * min(seconds) / LAUNCHES / LINKS


def measured(chain: Chain, group: Group) -> record.Figures:
    box = Mailbox(group.size, HIDDEN)
    args = arguments(chain, box, group)
    programs = {
        name: jax.jit(
            group.on_each(step_of(name, chain, box), equal=(False, True)),
            compiler_options=XLA_OPTIONS,
        )
        for name in PROGRAMS
    }
    fused, psum = (np.asarray(programs[name](*args)[0]) for name in ("fused", "psum"))
    us = {name: microseconds(program, args) for name, program in programs.items()}
    return {"us": us, "equal": bool((fused == psum).all())}


def main() -> None:
    options = record.parser(__doc__ or "")
    options.add_argument("--tensor-parallel-size", type=int, default=2, metavar="N")
    options.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    options.add_argument("--kinds", nargs="+", default=["alone", "layer"])
    args = options.parse_args()
    group = Group.of(args.tensor_parallel_size)
    for kind in args.kinds:
        for rows in args.rows:
            chain = Chain(group.size, kind, rows)
            record.keep(args.json, chain, measured(chain, group))


if __name__ == "__main__":
    main()
