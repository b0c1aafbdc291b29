"""SmolLM2-135M-Instruct on a CPU: against transformers, and what n-gram drafts give on real text.

    python -m benchmarks.engine.real_model [--json benchmarks/results/real_model_cpu.json]

The model comes from the package index (`benchmarks.measure.real_model`), and both engines read the
same GGUF file. All is in float32 and greedy; prompts are conversations of one message.

Decoding is one request at a time, without an end of text: the seconds of a completion of N tokens
less those of 1 token, over N - 1. The cases take turns prompt by prompt. Of each prompt a case's
quickest run counts, because other work on the machine only ever adds time. transformers (extra
`parity`) is its plain cached `generate`, on one thread and on all cores.

Acceptance is that of all 20 prompts, up to 128 tokens or the model's own end. Nothing of it is
timed.
"""

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.engine.acceptance import figures
from benchmarks.engine.cpu_decoding import Jaxspec, Transformers
from benchmarks.measure import real_model, record
from benchmarks.report import tables
from jaxspec import LLM, SamplingParams

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}
MOST_TOKENS = 128
_Case = Jaxspec | Transformers


def make_llm(path: Path, drafts: dict[str, Any] | None) -> LLM:
    sizes = {"max_num_seqs": 1, "decode_buckets": [1], "prefill_buckets": [256]}
    options = {**sizes, "max_model_len": 512, "dtype": "float32", "show_progress": False}
    options["background_compilation"] = False
    return LLM(path, speculative_config=drafts, **options)


def decoding(
    cases: Sequence[_Case], prompts: Sequence[list[int]], tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Return each case's tokens per second, and the number of prompts with the first case's ids."""
    firsts: dict[tuple[int, int], list[float]] = {}
    wholes: dict[tuple[int, int], list[float]] = {}
    ids: dict[tuple[int, int], list[int]] = {}
    for case in cases:
        case.complete(prompts[0], 2)
    for _, (number, prompt), (place, case) in itertools.product(
        range(repeats), enumerate(prompts), enumerate(cases)
    ):
        begin = time.perf_counter()
        case.complete(prompt, 1)
        middle = time.perf_counter()
        ids[place, number] = case.complete(prompt, tokens)
        firsts.setdefault((place, number), []).append(middle - begin)
        wholes.setdefault((place, number), []).append(time.perf_counter() - middle)
    results = []
    for place, case in enumerate(cases):
        keys = [(place, number) for number in range(len(prompts))]
        first = sum(min(firsts[key]) for key in keys)
        seconds = sum(min(wholes[key]) for key in keys) - first
        results.append(
            {
                **case.about(),
                "tokens_per_second": round(len(prompts) * (tokens - 1) / seconds, 2),
                "first_token_seconds": round(first / len(prompts), 4),
                "same_ids": sum(ids[key] == ids[0, key[1]] for key in keys),
            }
        )
    return results


def acceptance(llm: LLM) -> list[dict[str, Any]]:
    """Return the acceptance of drafts by kind of prompt, and of all prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS)
    by_kind = {
        kind: [output.metrics for one in several for output in llm.chat(one, params)]
        for kind, several in real_model.conversations().items()
    }
    by_kind["all"] = [metrics for several in by_kind.values() for metrics in several]
    return [
        {
            "prompts": kind,
            "count": len(several),
            "tokens": sum(metrics.num_tokens for metrics in several),
            **figures(several),
        }
        for kind, several in by_kind.items()
    ]


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=4, help="for decoding (default 4)")
    parser.add_argument("--tokens", type=int, default=32, help="N (default 32)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    path = real_model.smollm2()
    plain, drafting = make_llm(path, None), make_llm(path, DRAFTS)
    cases: list[_Case] = [Jaxspec(llm, 0.0) for llm in (plain, drafting)]
    if record.installed("torch") and record.installed("transformers"):
        threads = sorted({1, os.cpu_count() or 1})
        options = {"gguf_file": path.name}
        cases = [Transformers(count, path.parent, **options) for count in threads] + cases
    turns = itertools.zip_longest(*real_model.conversations().values())  # a kind after the other
    some = [one for turn in turns for one in turn if one is not None][: args.prompts]
    prompts = [plain.tokenizer.chat(one) for one in some]
    results = {
        "model": path.name,
        "sha256": real_model.SHA256,
        "prompts": len(prompts),
        "tokens": args.tokens,
        "repeats": args.repeats,
        "note": "Cases take turns; of each prompt a case's quickest run counts.",
        "decoding": decoding(cases, prompts, args.tokens, args.repeats),
        "drafts": DRAFTS,
        "most_tokens": MOST_TOKENS,
        "acceptance": acceptance(drafting),
    }
    print(tables.shown(results, "real model", "n-gram drafts of a real model"))
    record.write(args.json, results)


if __name__ == "__main__":
    main()
