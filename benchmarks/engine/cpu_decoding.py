"""Speed of the embedded model on a CPU: beside transformers, with drafts, with more rows.

    python -m benchmarks.engine.cpu_decoding [--json benchmarks/results/cpu_decoding.json]

In float32, on held-out prompts of 96 tokens, no end of text. All is warmed up, the cases take turns
in every repeat, and a figure is the median of the repeats with the least and the most. 5 minutes on
2 quiet cores; a busy one ruins it.

Decoding is one request at a time, and measured alike for everyone: the seconds of completions of N
tokens less the median of those of 1 token, over N - 1. transformers is its plain cached `generate`,
on one thread and on all cores: so small a model may be faster on one (extra `parity`; left out when
it is not installed).

Scaling is one LLM a number of rows, its programs made for exactly these rows: the steps from when
every row has its first token until one row has N. Drafts stand more often in one prompt than in
another, so with drafts compare milliseconds rather than tokens.
"""

import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure import record
from benchmarks.report import tables
from jaxspec import LLM, RequestMetrics, SamplingParams
from jaxspec.api.loading import EMBEDDED_MODEL

NUM_DRAFTS = (0, 3)


class Jaxspec:
    """Completions by an LLM with one row, at one temperature."""

    def __init__(self, llm: LLM, temperature: float):
        self._llm, self._temperature = llm, temperature
        self._metrics: list[RequestMetrics] = []

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        asked = {"temperature": self._temperature, "max_tokens": tokens}
        params = SamplingParams(**asked, ignore_eos=True, seed=0)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], params)
        self._metrics.append(output.metrics)
        return output.outputs[0].token_ids

    def about(self) -> dict[str, Any]:
        verified = RequestMetrics.total(self._metrics).mean_acceptance_length
        return {
            "engine": "jaxspec",
            "temperature": self._temperature,
            "drafts": self._llm.shapes.num_drafts,
            "tokens_per_verify": round(verified, 3),
        }


class Transformers:
    """Greedy completions by transformers, of the embedded model or another one."""

    def __init__(self, threads: int, model: str | Path = EMBEDDED_MODEL, **options: Any):
        import torch
        import transformers

        self._torch, self._threads = torch, threads
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, **options
        )

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        self._torch.set_num_threads(self._threads)
        ids = self._torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    def about(self) -> dict[str, Any]:
        return {"engine": "transformers", "temperature": 0.0, "threads": self._threads}


def make_llm(rows: int, drafts: int) -> LLM:
    return LLM(
        speculative_config={"num_speculative_tokens": drafts} if drafts else None,
        dtype="float32",
        max_num_seqs=rows,
        decode_buckets=[rows],
        prefill_buckets=[96 * min(rows, 4)],
        show_progress=False,
        background_compilation=False,
        enable_prefix_caching=False,  # the same prompts come again and again
    )


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of `values`."""
    figures = {"": statistics.median(values), "_least": min(values), "_most": max(values)}
    return {name + suffix: round(value, 3) for suffix, value in figures.items()}


def decoding(
    cases: Sequence[Jaxspec | Transformers], prompts: Sequence[list[int]], tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Return each case's tokens per second, and the number of prompts with the first case's ids."""
    rates: list[list[float]] = [[] for _ in cases]
    for case in cases:
        case.complete(prompts[0], tokens)
    for _ in range(repeats):
        calls: list[list[tuple[float, float, list[int]]]] = [[] for _ in cases]
        for prompt, (case, own) in itertools.product(prompts, zip(cases, calls, strict=True)):
            begin = time.perf_counter()
            case.complete(prompt, 1)
            first = time.perf_counter()
            completion = case.complete(prompt, tokens)
            own.append((first - begin, time.perf_counter() - first, completion))
        for rate, own in zip(rates, calls, strict=True):
            firsts, wholes, _ = zip(*own, strict=True)
            seconds = sum(wholes) - len(prompts) * statistics.median(firsts)
            rate.append(len(prompts) * (tokens - 1) / seconds)
    results = []
    for case, rate, own in zip(cases, rates, calls, strict=True):
        same = sum(a[2] == b[2] for a, b in zip(own, calls[0], strict=True))
        results.append({**case.about(), **spread("tokens_per_second", rate), "same_ids": same})
    return results


def scaling(
    batches: Sequence[int], prompts: Sequence[list[int]], tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """Return tokens per second of all rows and milliseconds per step, by rows and drafts."""
    llms = {key: make_llm(*key) for key in itertools.product(batches, NUM_DRAFTS)}
    runs: dict[tuple[int, int], list[tuple[float, float]]] = {key: [] for key in llms}
    for (rows, _), llm in llms.items():
        steady_steps(llm, prompts[:rows], 2)
    for _, (key, llm) in itertools.product(range(repeats), llms.items()):
        runs[key].append(steady_steps(llm, prompts[: key[0]], tokens))
    results = []
    for (rows, drafts), measured in runs.items():
        rates, times = zip(*measured, strict=True)
        speed = {**spread("tokens_per_second", rates), **spread("ms_per_step", times)}
        results.append({"rows": rows, "drafts": drafts, **speed})
    return results


def steady_steps(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> tuple[float, float]:
    """Return tokens per second and milliseconds per step while all rows decode."""
    # More than are counted: near the end of a row the host holds its steps back.
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 16, ignore_eos=True)
    groups = llm.prepare([{"prompt_token_ids": p} for p in prompts], [params] * len(prompts))
    samples = [sample for (sample,) in groups]
    llm.session.add(samples)

    def counts() -> list[int]:
        return [sample.request.num_output for sample in samples]

    while not all(counts()):
        llm.session.step()
    before, steps, begin = sum(counts()), 0, time.perf_counter()
    while max(counts()) < tokens or not steps:
        llm.session.step()
        steps += 1
    seconds = time.perf_counter() - begin
    given = sum(counts()) - before
    llm.session.abort(samples)
    return given / seconds, 1000 * seconds / steps


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=12, help="for decoding (default 12)")
    parser.add_argument("--tokens", type=int, default=128, help="N (default 128)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    prompts = json.loads((EMBEDDED_MODEL / "held_out_prompts.json").read_text())["prompts"]
    some = prompts[: args.prompts]
    llms = [make_llm(1, drafts) for drafts in NUM_DRAFTS]
    greedy: list[Jaxspec | Transformers] = [Jaxspec(llm, 0.0) for llm in llms]
    if record.installed("torch") and record.installed("transformers"):
        greedy = [Transformers(threads) for threads in sorted({1, os.cpu_count() or 1})] + greedy
    sampled = [Jaxspec(llm, 0.8) for llm in llms]
    figures = {
        "prompts": len(some),
        "tokens": args.tokens,
        "repeats": args.repeats,
        "greedy": decoding(greedy, some, args.tokens, args.repeats),
        "sampled": decoding(sampled, some, args.tokens, args.repeats),
        "scaling": scaling(args.rows, prompts, args.tokens, args.repeats),
    }
    print(tables.shown(figures, "decoding", "drafts", "scaling"))
    record.write(args.json, figures)


if __name__ == "__main__":
    main()
