"""What the benchmarks of kept prefixes run: engines, and texts that no two requests share."""

import argparse
import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import RATES, Figures, num_pages
from benchmarks.measure.model_shapes import SHAPES
from jaxspec import LLM

KEPT = 8  # prompts that a small engine has pages for
Prompt = list[int]
Results = Iterator[tuple[str, dict[str, int], Figures]]  # a case's name, the sizes of its work


@contextlib.contextmanager
def engine(args: argparse.Namespace, **sizes: Any) -> Iterator[LLM]:
    """An engine with its programs while the block runs; options by hand come last."""
    speculation = {
        "num_speculative_tokens": args.drafts,
        "synthetic_acceptance_rates": list(RATES[: args.drafts]),
    }
    with dummy_llm.model_folder(args.shape) as folder:
        make = functools.partial(
            LLM,
            folder,
            load_format="dummy",
            background_compilation=False,
            speculative_config=speculation if args.drafts else None,
            compilation_cache=args.compilation_cache,
            show_progress=False,
            **sizes | dict(args.options),
        )
        llm, _ = dummy_llm.started(make)
    try:
        yield llm
    finally:
        llm.close()
        gc.collect()  # the weights, before others are drawn


def small_engine(
    args: argparse.Namespace, **options: Any
) -> contextlib.AbstractContextManager[LLM]:
    """An engine for prompts that come alone, and whose prefixes stay."""
    longest = longest_prompt(args) + 1
    sizes = {"max_num_seqs": 4, "decode_buckets": [1, 4], "max_model_len": longest}
    pages = {"num_pages": num_pages([longest] * KEPT)}
    return engine(args, **sizes | pages | {"enable_prefix_caching": True} | options)


def longest_prompt(args: argparse.Namespace) -> int:
    return max(args.prompt, args.shared + max(args.suffixes))


class Texts:
    """Random ids, no two texts alike."""

    def __init__(self, args: argparse.Namespace):
        """Draw ids of the shape's vocabulary."""
        self._vocab, self._draw = SHAPES[args.shape].vocab, np.random.default_rng(0)

    def __call__(self, length: int) -> Prompt:
        return self._draw.integers(0, self._vocab, length).tolist()

    def prompts(self, count: int, length: int) -> dummy_llm.Prompts:
        """Some as the LLM takes them."""
        return [{"prompt_token_ids": self(length)} for _ in range(count)]
