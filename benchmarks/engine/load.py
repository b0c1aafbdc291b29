"""Gigabytes a second that a checkpoint loads at, beside `dd`, and the memory that takes.

    python -m benchmarks.engine.load --gigabytes 20 [--json FILE]

A synthetic checkpoint in shards, whose tensors are those of a published model with as many layers
as the gigabytes allow, is written into a temporary folder. All files are in the page cache when
they are read: by `dd`, one after the other in pieces of a MiB, and by `load_model` in a process of
its own each time, twice: the second time its programs are compiled.

The host's peak is the most that the process held when it had loaded once, less the most that it
held before, and less the weights where the device is the host. It may be 1.2 times the largest
tensor and a GB. The device's excess is what was allocated there at most, less the weights.
"""

import argparse
import dataclasses
import gc
import importlib
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.engine.dummy_llm import timed
from benchmarks.measure import record
from benchmarks.measure.model_shapes import SHAPES
from benchmarks.measure.weights import BLOCK, BY_BLOCK, is_quantised
from jaxspec.models import MODELS, load_model, parse_config
from jaxspec.models.layers.parameters import Placement

Figures = dict[str, Any]
NUM_BYTES = {"BF16": 2, "F8_E4M3": 1}
CASE = "shape", "dtype", "quantization", "one_by_one"  # they identify a result
PERIOD = 4  # every so many layers one is attention
NOISE = np.random.default_rng(0).integers(0, 2**16, 2**25, np.uint16) & 0x3F3F | 0x2020  # > 0


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * NUM_BYTES[self.dtype]

    def in_float8(self) -> Iterator["Tensor"]:
        """Yield the tensors of its published FP8 form."""
        if not is_quantised(self.name, self.shape):
            yield self
            return
        yield dataclasses.replace(self, dtype="F8_E4M3")
        yield Tensor(f"{self.name}_scale_inv", tuple(-(-size // BLOCK) for size in self.shape))


def make(folder: Path, args: argparse.Namespace) -> Figures:
    """Write the checkpoint, and return its sizes."""
    layers = deepest(args)
    config = SHAPES[args.shape].config() | {"num_hidden_layers": layers}
    tensors = tensors_of(config, args)
    if args.quantization:
        config["quantization_config"] = BY_BLOCK
    (folder / "config.json").write_text(json.dumps(config))
    shards = list(in_shards(tensors, args.shard_gigabytes * 1e9))
    for number, shard in enumerate(shards):
        write(folder / file_name(number), shard)
    index = {each.name: file_name(n) for n, shard in enumerate(shards) for each in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return {
        "layers": layers,
        "tensors": len(tensors),
        "shards": len(shards),
        "gigabytes": total(tensors) / 1e9,
        "largest_tensor_gigabytes": max(each.num_bytes for each in tensors) / 1e9,
    }


def deepest(args: argparse.Namespace) -> int:
    """Return the largest number of layers that the model has and `--gigabytes` allows."""
    shape = SHAPES[args.shape]
    sizes = [
        total(tensors_of(shape.config() | {"num_hidden_layers": layers}, args))
        for layers in (PERIOD, 2 * PERIOD)
    ]
    more = (args.gigabytes * 1e9 - sizes[0]) // (sizes[1] - sizes[0])
    return int(min(shape.layers, PERIOD * (1 + max(0, more))))


def tensors_of(config: Figures, args: argparse.Namespace) -> list[Tensor]:
    """Return a model's tensors by layer; experts that are quantised have tensors of their own."""
    one_by_one = args.one_by_one or args.quantization
    module, _, name = MODELS[config["architectures"][0]].partition(":")
    family = getattr(importlib.import_module(module), name)
    model = nnx.eval_shape(lambda: family(parse_config(config), jnp.bfloat16))
    placements: Iterator[Placement] = model.checkpoint()
    chosen = (
        each
        for placement in placements
        for each in (placement.instead() if one_by_one and placement.instead else (placement,))
    )
    tensors = [Tensor(n, shape) for n, shape in {each.name: each.shape for each in chosen}.items()]
    return [part for each in tensors for part in each.in_float8()] if args.quantization else tensors


def total(tensors: Iterable[Tensor]) -> int:
    return sum(each.num_bytes for each in tensors)


def in_shards(tensors: list[Tensor], most: float) -> Iterator[list[Tensor]]:
    """Yield the tensors of each file of about `most` bytes."""
    shard: list[Tensor] = []
    for tensor in tensors:
        if shard and total(shard) + tensor.num_bytes > most:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def file_name(number: int) -> str:
    return f"model-{number + 1:05}.safetensors"


def write(path: Path, tensors: list[Tensor]) -> None:
    header, place = {}, 0
    for tensor in tensors:
        end = place + tensor.num_bytes
        about = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [place, end]}
        header[tensor.name], place = about, end
    text, noise = json.dumps(header).encode(), NOISE.view(np.uint8).data
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, place, len(noise)):
            file.write(noise[: place - start])


def dd(folder: Path) -> float:
    """Return the seconds in which `dd` reads the shards."""
    shards = sorted(folder.glob("*.safetensors"))
    commands = [["dd", f"if={path}", "of=/dev/null", "bs=1M"] for path in shards]
    run = [lambda c=c: subprocess.run(c, check=True, capture_output=True) for c in commands]
    return sum(timed(each)[1] for each in run)


def load(folder: Path, dtype: str) -> Figures:
    """Load the checkpoint twice in this process."""
    jnp.zeros(1).block_until_ready()  # the device is there
    before = most_held()
    seconds, model = loaded(folder, dtype)
    host_peak = most_held() - before
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    device = jax.devices()[0].memory_stats() or {}
    if jax.default_backend() == "cpu":
        host_peak -= weights
    del model
    gc.collect()
    again, _ = loaded(folder, dtype)
    figures = {"seconds": seconds, "again_seconds": again, "host_peak_gigabytes": host_peak / 1e9}
    if "peak_bytes_in_use" in device:
        figures["device_excess_gigabytes"] = (device["peak_bytes_in_use"] - weights) / 1e9
    return figures


def loaded(folder: Path, dtype: str) -> tuple[float, nnx.Module]:
    """Return the seconds until all weights are on the device, and the model."""
    model, seconds = timed(lambda: jax.block_until_ready(load_model(folder, jnp.dtype(dtype))))
    return seconds, model


def most_held() -> int:
    """Return the peak memory of this process in bytes, on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def new_process(arguments: list[str]) -> str:
    """Return the last line that this script prints in a new process, which then has the device."""
    command = [sys.executable, "-m", "benchmarks.engine.load", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def measured(folder: Path, args: argparse.Namespace) -> Figures:
    """Write a checkpoint into `folder` and measure it."""
    about = json.loads(new_process([*sys.argv[1:], "--make", str(folder)]))
    dd(folder)  # into the page cache
    reads = [dd(folder) for _ in range(args.repeats)]
    runs = [
        json.loads(new_process([*sys.argv[1:], "--load", str(folder)])) for _ in range(args.repeats)
    ]
    size, middle = about["gigabytes"], statistics.median
    figures = {name: middle(run[name] for run in runs) for name in runs[0]}
    by_dd, by_load, again = middle(reads), figures["seconds"], figures["again_seconds"]
    return {
        **{name: getattr(args, name) for name in CASE},
        **about,
        **figures,
        "seconds_least": min(run["seconds"] for run in runs),
        "seconds_most": max(run["seconds"] for run in runs),
        "host_peak_allowed_gigabytes": 1.2 * about["largest_tensor_gigabytes"] + 1,
        "dd_gigabytes_per_second": size / by_dd,
        "gigabytes_per_second": size / by_load,
        "of_dd": by_dd / by_load,
        "again_of_dd": by_dd / again,
    }


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-35b-a3b")
    parser.add_argument("--gigabytes", type=float, default=20, help="at most (default 20)")
    parser.add_argument("--shard-gigabytes", type=float, default=4, help="default 4")
    parser.add_argument("--one-by-one", action="store_true", help="a tensor for each expert")
    parser.add_argument("--quantization", choices=["fp8"], help="how the checkpoint is stored")
    parser.add_argument("--dtype", default="bfloat16", help="of the loaded weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make or args.load:
        print(json.dumps(make(args.make, args) if args.make else load(args.load, args.dtype)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = record.rounded(measured(Path(folder), args))
    print(json.dumps(figures, indent=1))
    figures["commit"] = record.machine()["commit"]
    results = record.completed(args.json, [figures], lambda each: [each[name] for name in CASE])
    record.write(args.json, {"results": results})


if __name__ == "__main__":
    main()
