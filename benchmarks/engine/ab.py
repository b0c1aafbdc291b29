"""Speculation changes no output: 20,480 generations with 3 drafts against plain decoding.

    python -m benchmarks.engine.ab [--rounds 40] [--json FILE]

vLLM's issue 45100 asked for this comparison: with drafts and asynchronous scheduling, outputs ended
after 5 tokens where plain decoding went on. The embedded model completes 64 prompts, 8 samples
each, in 40 rounds of other seeds, and once more greedily. Both engines see the same requests. Some
rounds end samples at a stop string or id, because this model rarely ends a text by itself.

The plain engine is the simplest there is: no drafts, each step collected before the next is
planned, pages for all. The other one drafts 3 tokens, plans 2 steps ahead, computes prompts in
chunks, and has pages for half its rows, so that samples are preempted and resumed. The seconds are
those of two different engines on small batches, and no measure of speculation.

Noise is keyed by (seed, position), so sampled tokens must be identical too, up to ties: where the
first difference stands, a third pass scores both tokens, by itself and in float32. They tie if both
scores lie within `TIE` of the best. What comes after a tie is not compared. With any other
difference, such as an early end, the exit status is 1.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.measure import record
from jaxspec import LLM, RequestMetrics, SamplingParams
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.cache import CacheOptions, PoolSizes, Snapshot, allocate
from jaxspec.models import load_model
from jaxspec.models.base import ModelInputs
from jaxspec.regions import NO_SLOT, DecodeRegion, PrefillRegion
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Request
from jaxspec.sampling import Use, gumbel_noise

DRAFTS = 3
GREEDY = {"temperature": 0.0}
SAMPLED: tuple[dict[str, Any], ...] = (  # the sampled rounds, in turn
    {"temperature": 0.8},
    {"temperature": 1.0, "stop": "\n\n"},  # which the host finds in the text
    {"temperature": 0.9, "stop_token_ids": [380]},  # " return", which the device finds
)
LONGEST = 154  # tokens of a prompt
PAGE = 16  # tokens
SHORT = 6  # an output of fewer tokens is short: that had 5
TIE = {"float32": 1e-3, "bfloat16": 0.25}  # by the engines' dtype: how far rounding may move scores
SHOWN = 20  # differences that the file describes

Score = Callable[[Request, Sequence[int]], np.ndarray]  # of all ids, after these output tokens


def fixed_prompts(count: int) -> list[list[int]]:
    """Held-out code of 4 to 154 tokens, of which neighbours differ in length."""
    held_out = json.loads((EMBEDDED_MODEL / "held_out_prompts.json").read_text())
    texts = [a + b for a, b in zip(held_out["prompts"], held_out["greedy"], strict=True)]
    # The second time around a text is another one: it begins later.
    cut = [texts[i % len(texts)][i // len(texts) :] for i in range(count)]
    return [text[: 4 + 37 * i % (LONGEST - 3)] for i, text in enumerate(cut)]


class Arm:
    """One of the two engines, and the totals of its requests."""

    def __init__(self, drafts: int, args: argparse.Namespace):
        pages = args.rows * -(-(LONGEST + args.tokens) // PAGE)
        self._llm = LLM(
            EMBEDDED_MODEL,
            speculative_config={"num_speculative_tokens": drafts} if drafts else None,
            dtype=args.dtype,
            max_model_len=LONGEST + args.tokens,
            max_num_seqs=args.rows,
            max_in_flight=2 if drafts else 0,
            page_size=PAGE,
            num_pages=1 + (pages // 2 if drafts else pages),
            decode_buckets=sorted({args.rows // 4, args.rows} - {0}) if drafts else [args.rows],
            prefill_buckets=[96],
            long_prefill_token_threshold=40 if drafts else None,
            show_progress=False,
            background_compilation=False,
            enable_prefix_caching=False,  # the same prompts come again and again
        )
        self._seconds, self._metrics = 0.0, RequestMetrics()

    def complete(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Request]:
        """Return all samples, prompt by prompt."""
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        groups = self._llm.prepare(inputs, [params] * len(prompts))  # compiles
        samples: list[Sample] = [sample for group in groups for sample in group]
        begin = time.perf_counter()
        for _ in self._llm.session.run(samples):
            pass
        self._seconds += time.perf_counter() - begin
        requests = [sample.request for sample in samples]
        self._metrics = RequestMetrics.total([self._metrics, *(r.metrics for r in requests)])
        return requests

    def figures(self) -> dict[str, Any]:
        metrics, shapes = self._llm.metrics(), self._llm.shapes
        return {
            "drafts": shapes.num_drafts,
            "max_in_flight": metrics["max_in_flight"],
            "rows": shapes.max_num_seqs,
            "num_pages": shapes.num_pages,
            "preemptions": metrics["num_preemptions"],
            "steps": metrics["num_steps"],
            "tokens": self._metrics.num_tokens,
            "tokens_per_verify": round(self._metrics.mean_acceptance_length, 3),
            "seconds": round(self._seconds, 2),
            "tokens_per_second": round(self._metrics.num_tokens / self._seconds, 1),
        }


class Judge:
    """The score of every id after a prefix: one pass over it in float32, without an engine."""

    def __init__(self, longest: int):
        """`longest`: most tokens of a prefix."""
        model = load_model(EMBEDDED_MODEL, jnp.dtype("float32"))
        self._graph, self._weights = nnx.split(model)
        self._pages = -(-longest // PAGE)
        options = CacheOptions(*[jnp.dtype("float32")] * 3, Snapshot())
        sizes = PoolSizes(num_pages=1 + self._pages, page_size=PAGE, num_slots=2, width=1)
        self._pools = allocate(model.cache_specs(options), sizes)

    def __call__(self, request: Request, output: Sequence[int]) -> np.ndarray:
        """Scores (float32 `[vocab]`) by which the token after `output` is chosen: the largest."""
        tokens = [*request.prompt, *output]
        with jax.default_matmul_precision("highest"):
            inputs = self._inputs(tokens)
            logits = _logits(self._graph, self._weights, inputs, self._pools)[len(tokens)]
        if request.params.is_greedy:
            return np.asarray(logits)
        seed = jnp.asarray([request.seed], jnp.uint32).astype(jnp.int32)
        position = jnp.asarray([len(tokens)], jnp.int32)
        noise = gumbel_noise(seed, position, Use.TARGET, len(logits))[0]
        return np.asarray(logits / request.params.temperature + noise)

    def _inputs(self, tokens: Sequence[int]) -> ModelInputs:
        """A decode row that is padding, and `tokens` as the one chunk of a prompt in slot 1."""
        place = np.arange(PAGE * self._pages) - 1
        is_token = (place >= 0) & (place < len(tokens))
        flat = np.zeros(len(place), np.int32)
        flat[is_token] = tokens
        pages = np.zeros((2, self._pages), np.int32)
        pages[1] = 1 + np.arange(self._pages)
        zero, one = (jnp.asarray([value], jnp.int32) for value in (0, 1))
        return ModelInputs(
            tokens=jnp.asarray(flat),
            positions=jnp.asarray(place, jnp.int32),
            kv_slots=jnp.asarray(np.where(is_token, PAGE + place, NO_SLOT), jnp.int32),
            live=jnp.asarray(is_token),
            page_tables=jnp.asarray(pages),
            decode=DecodeRegion(zero, zero, zero, zero, zero),
            prefill=PrefillRegion(one, zero, jnp.asarray([0, len(tokens)], jnp.int32), zero),
            width=1,
        )


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph: Any, weights: Any, inputs: ModelInputs, pools: Any) -> jax.Array:
    model = nnx.merge(graph, weights)
    return model.logits(model.forward(inputs, pools)[0].hidden)


@dataclasses.dataclass
class Tally:
    """Counts of the generations of one kind."""

    params: dict[str, Any]
    generations: int = 0
    identical: int = 0
    ties: int = 0
    largest_tie: float = 0.0
    differing: int = 0
    ended_by_stop: int = 0  # in plain decoding
    short: int = 0  # with drafts
    short_plain: int = 0
    short_with_drafts_alone: int = 0  # each is a difference too, or follows a tie

    def add(self, plain: Request, drafted: Request, score: Score, tie: float) -> float | None:
        """Count a generation, and return its gap of scores if it differs by more than a tie."""
        self.generations += 1
        self.ended_by_stop += plain.finish.reason == "stop"
        is_short, is_short_plain = (r.num_output < SHORT for r in (drafted, plain))
        self.short += is_short
        self.short_plain += is_short_plain
        self.short_with_drafts_alone += is_short and not is_short_plain
        if (plain.tokens, plain.finish) == (drafted.tokens, drafted.finish):
            self.identical += 1
            return None
        gap = score_gap(plain, drafted, score)
        if gap < tie:
            self.ties += 1
            self.largest_tie = max(self.largest_tie, gap)
            return None
        self.differing += 1
        return gap


def score_gap(plain: Request, drafted: Request, score: Score) -> float:
    """Return the distance from the best score to the lower of the first two tokens that differ.

    Infinite where no token differs: one of the two ended early, or for another reason.
    """
    at = first_difference(plain, drafted)
    if at == min(plain.num_output, drafted.num_output):
        return float("inf")
    scores = score(plain, plain.output[:at])
    return float(scores.max() - min(scores[plain.output[at]], scores[drafted.output[at]]))


def first_difference(plain: Request, drafted: Request) -> int:
    """Return the number of equal output tokens before the first difference."""
    pairs = zip(plain.output, drafted.output, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def compare(
    rounds: Sequence[dict[str, Any]], args: argparse.Namespace
) -> tuple[list[Tally], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the tallies by kind of round, the differences, and the figures of both arms."""
    prompts, tie = fixed_prompts(args.prompts), TIE[args.dtype]
    plain, drafted = arms = Arm(0, args), Arm(DRAFTS, args)
    judge = Judge(LONGEST + args.tokens)
    tallies = {str(kind): Tally(kind) for kind in rounds}
    differences = []
    for number, kind in enumerate(rounds):
        params = SamplingParams(n=args.samples, seed=number, max_tokens=args.tokens, **kind)
        tally = tallies[str(kind)]
        order = arms if number % 2 else arms[::-1]
        outputs = {arm: arm.complete(prompts, params) for arm in order}
        pairs = zip(outputs[plain], outputs[drafted], strict=True)
        for index, pair in enumerate(pairs):
            gap = tally.add(*pair, judge, tie)
            if gap is not None:
                differences.append(describe(number, index // args.samples, *pair, gap))
        print(json.dumps({"round": number, **vars(tally)}), flush=True)
    return list(tallies.values()), differences, [arm.figures() for arm in arms]


def describe(
    number: int, prompt: int, plain: Request, drafted: Request, gap: float
) -> dict[str, Any]:
    return {
        "round": number,
        "prompt": prompt,
        "seed": plain.seed,
        "same_tokens": first_difference(plain, drafted),
        "score_gap": gap if np.isfinite(gap) else None,
        "tokens": [plain.num_output, drafted.num_output],
        "finish": [plain.finish.reason, drafted.finish.reason],
    }


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="sampled ones (default 40)")
    parser.add_argument("--prompts", type=int, default=64, help="default 64")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt (default 8)")
    parser.add_argument("--tokens", type=int, default=96, help="most of a sample (default 96)")
    parser.add_argument("--rows", type=int, default=64, help="that run at once (default 64)")
    parser.add_argument("--dtype", choices=sorted(TIE), default="float32")
    parser.add_argument("--no-greedy", action="store_true", help="sampled rounds alone")
    args = parser.parse_args()
    sampled = [SAMPLED[i % len(SAMPLED)] for i in range(args.rounds)]
    rounds = sampled if args.no_greedy else [GREEDY, *sampled]
    tallies, differences, arms = compare(rounds, args)
    names = ("prompts", "samples", "rounds", "tokens", "dtype")
    figures = {
        **{name: getattr(args, name) for name in names},
        "tie": TIE[args.dtype],
        "results": [vars(tally) for tally in tallies],
        "arms": arms,
        "differences": differences[:SHOWN],
    }
    print(json.dumps({"arms": arms, "differences": differences[:SHOWN]}), flush=True)
    record.write(args.json, figures)
    if any(tally.differing for tally in tallies):
        sys.exit("Speculation changed an output.")


if __name__ == "__main__":
    main()
