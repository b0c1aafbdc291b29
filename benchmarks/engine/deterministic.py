"""Deterministic engines beside others: equal logprobs, and the time that they cost.

    python -m benchmarks.engine.deterministic [--shape qwen3.5-0.8b] [--rows 1 8 64] [--json FILE]

A model with random weights continues prompts of random ids with logprobs, so many at once as each
of `--rows` says; drafts are accepted at given rates (synthetic). A token's time is that of
`--tokens` new tokens less that of 1, over `--tokens` - 1, the median of the repeats. Then `score`
reads the texts of the most rows. `score_difference` is the largest difference between the logprob
of a generated token and its score, and `rows_difference` that between texts of one row and the same
texts among the most rows, where their tokens are the same.
"""

import argparse
import dataclasses
import statistics
from pathlib import Path

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import Figures, Prompts, num_pages, timed
from jaxspec import LLM, RequestOutput, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(dummy_llm.Case):
    """Fields that identify a result."""

    deterministic: bool
    prompt: int
    tokens: int


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)


def make_llm(case: Case, folder: Path, args: argparse.Namespace) -> LLM:
    rows, longest = max(args.rows), case.prompt + case.tokens + 8
    llm = dummy_llm.make_llm(
        case,
        folder,
        deterministic=case.deterministic,
        max_num_seqs=rows,
        max_model_len=longest,
        max_num_batched_tokens=args.prefill_tokens + rows * (1 + int(case.drafts)),
        decode_buckets=sorted(args.rows),
        prefill_buckets=[args.prefill_tokens],
        num_pages=num_pages([longest] * rows),
        gpu_memory_utilization=1.0,
        compilation_cache=args.compilation_cache,
    )
    llm.warm_up([greedy(1), dataclasses.replace(greedy(1), prompt_logprobs=0)])
    return llm


def logprobs_of(output: RequestOutput) -> dict[tuple[int, ...], float]:
    """Return the logprob of each generated token by the ids up to it."""
    [sample], places = output.outputs, {}
    ids = tuple(sample.token_ids)
    for place, (entry, token) in enumerate(zip(sample.logprobs or (), ids, strict=True)):
        places[ids[: place + 1]] = entry[token].logprob
    return places


def difference(some: list[RequestOutput], others: list[RequestOutput]) -> float:
    """Return the largest difference between logprobs of the same tokens after the same text."""
    largest = 0.0
    for one, other in zip(some, others, strict=True):
        own, theirs = logprobs_of(one), logprobs_of(other)
        largest = max([largest, *(abs(own[ids] - theirs[ids]) for ids in own.keys() & theirs)])
    return largest


def score_difference(llm: LLM, prompts: Prompts, outputs: list[RequestOutput]) -> float:
    texts = [
        {"prompt_token_ids": prompt["prompt_token_ids"] + list(output.outputs[0].token_ids)}
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    largest = 0.0
    for output, score in zip(outputs, llm.score(texts, logprobs_mode="raw_logprobs"), strict=True):
        own = list(logprobs_of(output).values())
        pairs = zip(own, score.token_logprobs[-len(own) :], strict=True)
        largest = max([largest, *(abs(a - b) for a, b in pairs if b is not None)])
    return largest


def measure(case: Case, folder: Path, args: argparse.Namespace) -> Figures:
    llm, seconds = timed(lambda: make_llm(case, folder, args))
    figures: Figures = {"start_seconds": seconds}
    prompts = dummy_llm.random_prompts(case.shape, max(args.rows), case.prompt)
    with llm:
        for rows in args.rows:
            some, times = prompts[:rows], []
            for _ in range(args.repeats):
                _, first = timed(lambda some=some: llm.generate(some, greedy(1)))
                _, whole = timed(lambda some=some: llm.generate(some, greedy(case.tokens)))
                times.append(1000 * (whole - first) / (case.tokens - 1))
            figures[f"ms_per_token_{rows}"] = statistics.median(times)
            figures[f"ms_of_prompts_{rows}"] = 1000 * first
        many = llm.generate(prompts, greedy(case.tokens))
        few = [llm.generate([prompt], greedy(case.tokens))[0] for prompt in prompts[: args.alone]]
        figures["rows_difference"] = difference(few, many[: len(few)])
        figures["score_difference"], seconds = timed(lambda: score_difference(llm, prompts, many))
        figures["score_seconds"] = seconds
    return figures


def main() -> None:
    parser = dummy_llm.parser(__doc__ or "")
    parser.set_defaults(shape="qwen3.5-0.8b", repeats=2)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3], choices=range(4))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--alone", type=int, default=2, help="texts that are repeated by themselves"
    )
    parser.add_argument("--prompt", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--tokens", type=int, default=64, help="new ones (default 64)")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="of a step, at most")
    args = parser.parse_args()
    fixed = dummy_llm.fields_given(Case, args)
    cases = [
        Case(**fixed | {"drafts": drafts, "deterministic": is_on, "state_policy": policy})
        for drafts in args.drafts
        for is_on, policy in ((True, "snapshot"), (False, args.state_policy))
    ]
    dummy_llm.run(cases, measure, args)


if __name__ == "__main__":
    main()
