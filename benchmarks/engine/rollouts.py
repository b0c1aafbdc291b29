"""Speed of rollouts: samples with log-probabilities, weight updates, sleep.

    python -m benchmarks.engine.rollouts [--shape qwen3.5-9b] [--drafts 0 3] [--json FILE]

A part has an engine and a result of its own. In "samples", a model with random weights samples
several texts for each of many prompts, without logprobs and with the sampled token's; drafts are
accepted at given rates (synthetic). In "weights", its weights are replaced by random ones, from the
device's memory and from the host's, and it sleeps on both levels. Each act is done once before it
is timed, which compiles its programs; the times are medians, pauses the longest. A call of
`update_weights` ends when the parameters are there; its pause is the time in which no step is
dispatched. The peak of memory is that of the updates from the device, over what the engine and the
given tensors hold.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import Figures, num_pages, timed
from jaxspec import LLM, RequestMetrics, SamplingParams

SCALE = 0.01  # of the random weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(dummy_llm.Case):
    """Fields that identify a result."""

    part: str
    prompts: int
    samples: int  # of each prompt
    prompt: int
    tokens: int
    rows: int


def make_llm(case: Case, folder: Path, args: argparse.Namespace) -> LLM:
    longest = case.prompt + case.tokens
    return dummy_llm.make_llm(
        case,
        folder,
        max_num_seqs=case.rows,
        max_model_len=longest,
        max_num_batched_tokens=args.prefill_tokens + case.rows * (1 + case.drafts),
        decode_buckets=[case.rows],
        prefill_buckets=[args.prefill_tokens],
        num_pages=num_pages([longest] * case.rows),
        gpu_memory_utilization=1.0,
        compilation_cache=args.compilation_cache,
    )


def rollouts(llm: LLM, case: Case, repeats: int) -> Figures:
    """Time the samples of all prompts, without logprobs and with them."""
    prompts = dummy_llm.random_prompts(case.shape, case.prompts, case.prompt)
    figures: Figures = {}
    for name, logprobs in (("", None), ("logprobs_", 0)):
        params = SamplingParams(
            n=case.samples,
            temperature=1.0,
            max_tokens=case.tokens,
            ignore_eos=True,
            logprobs=logprobs,
            detokenize=False,
        )
        llm.generate(prompts, dataclasses.replace(params, max_tokens=8))
        runs = [timed(lambda params=params: llm.generate(prompts, params)) for _ in range(repeats)]
        total = case.prompts * case.samples * case.tokens
        speeds = [total / seconds for _, seconds in runs]
        figures |= dummy_llm.spread(f"{name}tokens_per_second", speeds)
        requests = [output.metrics for outputs, _ in runs for output in outputs]
        figures[f"{name}tokens_per_step"] = RequestMetrics.total(requests).mean_acceptance_length
    cost = 1 - figures["logprobs_tokens_per_second"] / figures["tokens_per_second"]
    return {**figures, "logprobs_cost": cost}


def random_tree(llm: LLM) -> dict[str, jax.Array]:
    """Return tensors on the device for the leaves of the engine's model."""
    specs = llm.weight_specs("own")
    keys = jax.random.split(jax.random.key(0), len(specs))
    return {
        name: (SCALE * jax.random.normal(key, spec.shape, jnp.bfloat16)).astype(spec.dtype)
        for key, (name, spec) in zip(keys, specs.items(), strict=True)
    }


def renewals(llm: LLM, _: Case, repeats: int) -> Figures:
    """Time updates from the device and from the host, a pause, and sleep on both levels."""
    tree = random_tree(llm)
    host = {name: np.asarray(each) for name, each in tree.items()}
    held, num_bytes = bytes_in_use(), sum(each.nbytes for each in host.values())
    figures = {"weight_gb": num_bytes / 1e9}
    figures |= update_times("device", llm, tree, repeats)
    if held is not None:  # the peak is the process's, so an earlier one may hide this one
        figures["peak_of_updates"] = peak_bytes() / held
    figures |= update_times("host", llm, host, repeats)
    figures["host_gb_per_s"] = num_bytes / 1e6 / figures["update_host_ms"]
    figures |= times("pause", llm.pause, llm.resume, repeats)
    figures |= times("sleep_1", llm.sleep, llm.wake_up, repeats)

    def wake() -> None:
        llm.update_weights(tree)
        llm.wake_up()

    return figures | times("sleep_2", lambda: llm.sleep(level=2), wake, repeats)


def update_times(name: str, llm: LLM, tree: dict[str, Any], repeats: int) -> Figures:
    llm.update_weights(tree)
    updates = [timed(lambda: llm.update_weights(tree)) for _ in range(repeats)]
    return {
        **dummy_llm.spread(f"update_{name}_ms", [1000 * seconds for _, seconds in updates]),
        f"update_{name}_pause_ms": 1000 * max(update.seconds for update, _ in updates),
    }


def times(name: str, act: Callable[[], Any], undo: Callable[[], Any], repeats: int) -> Figures:
    """Time `act`, and `undo` after it."""
    act()
    undo()
    pairs = [(timed(act)[1], timed(undo)[1]) for _ in range(repeats)]
    begin, end = zip(*pairs, strict=True)
    return {
        **dummy_llm.spread(f"{name}_ms", [1000 * seconds for seconds in begin]),
        **dummy_llm.spread(f"after_{name}_ms", [1000 * seconds for seconds in end]),
    }


def bytes_in_use() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use")


def peak_bytes() -> int:
    return jax.devices()[0].memory_stats()["peak_bytes_in_use"]


PARTS = {"samples": rollouts, "weights": renewals}


def measure(case: Case, folder: Path, args: argparse.Namespace) -> Figures:
    llm, setting_up = dummy_llm.started(lambda: make_llm(case, folder, args), "sampled")
    with llm:
        return {**setting_up, **PARTS[case.part](llm, case, args.repeats)}


def main() -> None:
    parser = dummy_llm.parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3], choices=range(4))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16, help="of each prompt (default 16)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default 512)")
    parser.add_argument("--tokens", type=int, default=512, help="of each sample (default 512)")
    parser.add_argument("--rows", type=int, default=256, help="samples that decode at once")
    parser.add_argument("--prefill-tokens", type=int, default=2048, help="of a step, at most")
    args = parser.parse_args()
    fixed = dummy_llm.fields_given(Case, args)
    vocab = {drafts: args.draft_vocab if drafts else None for drafts in args.drafts}
    cases = [
        Case(**fixed | {"part": part, "drafts": drafts, "draft_vocab": each})
        for part in args.parts
        for drafts, each in vocab.items()
    ]
    dummy_llm.run(cases, measure, args)


if __name__ == "__main__":
    main()
