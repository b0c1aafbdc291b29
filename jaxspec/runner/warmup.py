"""Warm-up: compiles programs before the requests that need them, so nothing compiles later."""

from collections.abc import Iterable

from tqdm import tqdm

from jaxspec.config import Buckets, Variant
from jaxspec.plan import Program
from jaxspec.runner.model_runner import ModelRunner


def programs(buckets: Buckets, variants: Iterable[Variant]) -> list[Program]:
    """Every program that steps of these sampling variants can need."""
    return [Program(*shape, variant) for variant in variants for shape in buckets.shapes()]


def warm_up(runner: ModelRunner, variants: Iterable[Variant], *, progress: bool = False) -> None:
    """Compile what `variants` need and is not compiled yet, behind a progress bar."""
    missing = [p for p in programs(runner.buckets, variants) if not runner.is_warm(p)]
    if not missing:
        return
    for program in tqdm(missing, desc="compiling", unit="program", disable=not progress):
        runner.warm_up(program)
    if runner.buckets.max_num_seqs > 1:
        runner.warm_up_fork()
