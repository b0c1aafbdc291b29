"""Speculation changes no output: 20,480 generations with 3 drafts against plain decoding.

    python -m benchmarks.engine.ab [--rounds 40] [--json FILE]
    python -m benchmarks.engine.ab --shape qwen3.5-27b --tensor-parallel-size 4 --tokens 512 \
        --rows 256 --dtype bfloat16 --seconds 500 --json FILE

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

With `--shape` the model has published sizes and random weights, and its own draft head drafts. Only
two ids are allowed, and only these are drafted, so drafts are accepted by chance. Samples end at a
text of nine words, or at a third id that a bias makes rare. The plain engine scores both tokens of
a first difference, in its own dtype.

FILE is written after each round, and a later call adds the rounds that it lacks. No round begins
after `--seconds`. With two groups of devices, one runs `--share 0 2` and the other `--share 1 2`,
each into a FILE of its own.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.engine import dummy_llm
from benchmarks.measure import record
from benchmarks.measure.model_shapes import SHAPES
from benchmarks.measure.words import word, write_words
from jaxspec import LLM, RequestMetrics, SamplingParams
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.cache import CacheOptions, PoolSizes, Snapshot, allocate
from jaxspec.models import load_model
from jaxspec.models.base import ModelInputs
from jaxspec.regions import NO_SLOT, DecodeRegion, PrefillRegion
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import PROCESSED
from jaxspec.sampling import Use, gumbel_noise

DRAFTS = 3
GREEDY = {"temperature": 0.0}
SAMPLED: tuple[dict[str, Any], ...] = (  # the sampled rounds, in turn
    {"temperature": 0.8},
    {"temperature": 1.0, "stop": "\n\n"},  # which the host finds in the text
    {"temperature": 0.9, "stop_token_ids": [380]},  # " return", which the device finds
)
IDS, RARE_ID = [40, 41], 42  # that a model with random weights may generate
STOP = "".join(f" {word(IDS[i])}" for i in (0, 1, 1, 0, 1, 0, 0, 0, 1))
OF_IDS: dict[str, Any] = {"allowed_token_ids": IDS}
RARE: dict[str, Any] = {"allowed_token_ids": [*IDS, RARE_ID], "logit_bias": {RARE_ID: -6.0}}
SAMPLED_OF_IDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, **OF_IDS},
    {"temperature": 1.0, "stop": STOP, **OF_IDS},
    {"temperature": 0.9, "stop_token_ids": [RARE_ID], **RARE},
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


def random_prompts(count: int, vocab: int) -> list[list[int]]:
    """Random ids of the same lengths."""
    rng = np.random.default_rng(0)
    lengths = (4 + 37 * i % (LONGEST - 3) for i in range(count))
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model of both engines, and the prompts and parameters of its rounds."""

    folder: Path
    prompts: list[list[int]]
    greedy: dict[str, Any]
    sampled: tuple[dict[str, Any], ...]
    options: dict[str, Any]  # of both engines
    speculation: dict[str, Any]
    chunk: int = 96  # prompt tokens of a step of plain decoding

    def rounds(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        """Return the parameters of all rounds by their number."""
        sampled = [self.sampled[i % len(self.sampled)] for i in range(args.rounds)]
        return sampled if args.no_greedy else [self.greedy, *sampled]


@contextlib.contextmanager
def subject(args: argparse.Namespace) -> Iterator[Subject]:
    """Yield the embedded model, or the shape that is asked for."""
    drafts = {"num_speculative_tokens": DRAFTS}
    if args.shape is None:
        prompts = fixed_prompts(args.prompts)
        yield Subject(EMBEDDED_MODEL, prompts, GREEDY, SAMPLED, {}, drafts)
        return
    vocab = SHAPES[args.shape].vocab
    with dummy_llm.model_folder(args.shape) as folder:
        write_words(folder, vocab)
        options = {"load_format": "dummy", "tensor_parallel_size": args.tensor_parallel_size}
        yield Subject(
            folder,
            random_prompts(args.prompts, vocab),
            GREEDY | OF_IDS,
            SAMPLED_OF_IDS,
            options | {"compilation_cache": args.compilation_cache},
            drafts | {"draft_vocab": IDS},
            chunk=512,  # which the judge needs, too
        )


class Arm:
    """One of the two engines, and the totals of its requests."""

    def __init__(self, drafts: int, model: Subject, args: argparse.Namespace):
        pages = args.rows * -(-(LONGEST + args.tokens) // PAGE)
        self.llm = LLM(
            model.folder,
            speculative_config=model.speculation if drafts else None,
            dtype=args.dtype,
            max_model_len=LONGEST + args.tokens,
            max_num_seqs=args.rows,
            max_in_flight=2 if drafts else 0,
            page_size=PAGE,
            num_pages=1 + (pages // 2 if drafts else pages),
            decode_buckets=sorted({args.rows // 4, args.rows} - {0}) if drafts else [args.rows],
            prefill_buckets=[96 if drafts else model.chunk],
            long_prefill_token_threshold=40 if drafts else None,
            show_progress=False,
            background_compilation=False,
            enable_prefix_caching=False,  # the same prompts come again and again
            **model.options,
        )
        self._seconds, self._steps, self._metrics = 0.0, 0, RequestMetrics()

    def complete(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Request]:
        """Return all samples, prompt by prompt."""
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        groups = self.llm.prepare(inputs, [params] * len(prompts))  # compiles
        samples: list[Sample] = [sample for group in groups for sample in group]
        before, begin = self.llm.metrics()["num_steps"], time.perf_counter()
        for _ in self.llm.session.run(samples):
            pass
        self._seconds += time.perf_counter() - begin
        self._steps += self.llm.metrics()["num_steps"] - before
        requests = [sample.request for sample in samples]
        self._metrics = RequestMetrics.total([self._metrics, *(r.metrics for r in requests)])
        return requests

    def figures(self) -> dict[str, Any]:
        metrics, shapes = self.llm.metrics(), self.llm.shapes
        return {
            "drafts": shapes.num_drafts,
            "max_in_flight": metrics["max_in_flight"],
            "rows": shapes.max_num_seqs,
            "num_pages": shapes.num_pages,
            "preemptions": metrics["num_preemptions"],
            "steps": self._steps,
            "tokens": self._metrics.num_tokens,
            "tokens_per_verify": round(self._metrics.mean_acceptance_length, 3),
            "seconds": round(self._seconds, 2),
            "tokens_per_second": round(self._metrics.num_tokens / self._seconds, 1),
            "commit": record.machine()["commit"],
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
        noise = noise_of(request, len(tokens), len(logits))
        return np.asarray(logits / request.params.temperature + noise)

    def read(self, pairs: Sequence[tuple[Request, Request]]) -> None:
        """Do nothing: each prefix is scored when it is asked for."""

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


class EngineJudge:
    """The scores of the allowed ids where outputs first differ, by an engine without drafts."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._scores: dict[tuple[int, int], np.ndarray] = {}  # by request and output tokens

    def read(self, pairs: Sequence[tuple[Request, Request]]) -> None:
        """Compute the scores for all pairs whose tokens differ, in one batch."""
        places = [(*pair, first_difference(*pair)) for pair in pairs]
        differ = [each for each in places if each[2] < min(r.num_output for r in each[:2])]
        prompts = [
            {"prompt_token_ids": [*plain.prompt, *plain.output[:at]]} for plain, _, at in differ
        ]
        params = [
            SamplingParams(
                max_tokens=1,
                temperature=plain.params.temperature or 1.0,
                allowed_token_ids=plain.params.allowed_token_ids,
                logit_bias=plain.params.logit_bias,
                logprobs=len(plain.params.allowed_token_ids),
                logprobs_mode=PROCESSED,
            )
            for plain, _, _ in differ
        ]
        outputs = self._llm.generate(prompts, params) if differ else []
        self._scores = {}
        for (plain, _, at), output in zip(differ, outputs, strict=True):
            (found,) = output.outputs[0].logprobs or ()
            scores = np.full(self._llm.vocab_size, -np.inf, np.float32)
            for token, logprob in found.items():
                scores[token] = logprob.logprob
            if not plain.params.is_greedy:
                scores += noise_of(plain, len(plain.prompt) + at, len(scores))
            self._scores[id(plain), at] = scores

    def __call__(self, request: Request, output: Sequence[int]) -> np.ndarray:
        """Return the scores that `read` computed."""
        return self._scores[id(request), len(output)]


def noise_of(request: Request, position: int, vocab: int) -> np.ndarray:
    """Return the noise by which the token at `position` is drawn."""
    seed = jnp.asarray([request.seed], jnp.uint32).astype(jnp.int32)
    at = jnp.asarray([position], jnp.int32)
    return np.asarray(gumbel_noise(seed, at, Use.TARGET, vocab)[0])


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


@dataclasses.dataclass
class Found:
    """Rounds of a file, and those that a call adds."""

    rounds: list[int] = dataclasses.field(default_factory=list)
    results: list[Tally] = dataclasses.field(default_factory=list)
    arms: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # two per call
    differences: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, file: Path | None, about: dict[str, Any]) -> "Found":
        """Return the rounds of a file with the same sizes; nothing if there is none.

        Raises:
            ValueError: the file has rounds of other sizes.
        """
        known = record.read(file)
        if "completed" not in known:
            return cls()
        about = json.loads(json.dumps(about))
        if wrong := [name for name, value in about.items() if known.get(name) != value]:
            raise ValueError(
                f"{file} has rounds with another {wrong[0]}, {known.get(wrong[0])!r}. Name another "
                "file, or repeat its options."
            )
        tallies = [Tally(**each) for each in known["results"]]
        return cls(known["completed"], tallies, known["arms"], known["differences"])

    def write(self, file: Path | None, about: dict[str, Any]) -> None:
        results = [vars(tally) for tally in self.results]
        rest = {"arms": self.arms, "differences": self.differences[:SHOWN]}
        record.write(file, {**about, "completed": self.rounds, "results": results, **rest})

    def tally(self, kind: dict[str, Any]) -> Tally:
        """Return the counts of a kind of rounds, by its parameters as a file has them."""
        params = json.loads(json.dumps(kind))
        for tally in self.results:
            if tally.params == params:
                return tally
        self.results.append(Tally(params))
        return self.results[-1]


def compare(
    model: Subject,
    numbers: Sequence[int],
    args: argparse.Namespace,
    found: Found,
    save: Callable[[], None],
) -> None:
    """Run the rounds of these numbers while there is time: add each to `found`, and save it."""
    rounds, tie, end = model.rounds(args), TIE[args.dtype], time.monotonic() + args.seconds
    plain, drafted = arms = Arm(0, model, args), Arm(DRAFTS, model, args)
    judge = Judge(LONGEST + args.tokens) if args.shape is None else EngineJudge(plain.llm)
    before = found.arms
    for number in numbers:
        if time.monotonic() > end:
            break
        kind = rounds[number]
        params = SamplingParams(n=args.samples, seed=number, max_tokens=args.tokens, **kind)
        tally = found.tally(kind)
        order = arms if number % 2 else arms[::-1]
        outputs = {arm: arm.complete(model.prompts, params) for arm in order}
        pairs = list(zip(outputs[plain], outputs[drafted], strict=True))
        judge.read(pairs)
        for index, pair in enumerate(pairs):
            gap = tally.add(*pair, judge, tie)
            if gap is not None:
                found.differences.append(describe(number, index // args.samples, *pair, gap))
        found.rounds.append(number)
        found.arms = before + [arm.figures() for arm in arms]
        print(json.dumps({"round": number, **vars(tally)}), flush=True)
        save()


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
    parser.add_argument("--shape", choices=SHAPES, help="random weights, not the embedded model")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="with --shape")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="in which rounds begin")
    parser.add_argument("--share", type=int, nargs=2, metavar=("I", "N"), default=[0, 1])
    parser.add_argument("--compilation-cache", type=Path, metavar="FOLDER", help="with --shape")
    args = parser.parse_args()
    names = ("prompts", "samples", "rounds", "tokens", "rows", "dtype", "no_greedy", "shape")
    about = {name: getattr(args, name) for name in (*names, "tensor_parallel_size", "share")}
    about["tie"] = TIE[args.dtype]
    first, step = args.share
    if refused := "completed" in record.read(args.json) and record.refusal(args.json):
        parser.error(refused)
    with subject(args) as model:
        try:
            found = Found.read(args.json, about)
        except ValueError as error:
            parser.error(str(error))
        every = range(first, len(model.rounds(args)), step)
        numbers = [number for number in every if number not in found.rounds]
        if numbers:
            compare(model, numbers, args, found, lambda: found.write(args.json, about))
    found.write(args.json, about)
    print(json.dumps({"arms": found.arms, "differences": found.differences[:SHOWN]}), flush=True)
    print(f"{len(every) - len(found.rounds)} rounds are left.", flush=True)
    if any(tally.differing for tally in found.results):
        sys.exit("Speculation changed an output.")


if __name__ == "__main__":
    main()
