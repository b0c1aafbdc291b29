"""The same tokens with drafts and without, and by kernels and by XLA: in float32, up to ties."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.acceptance.features import DEFAULTS, EVERYTHING, GREEDY, TWO_IDS, params_of
from benchmarks.acceptance.job import EXACT_ON_DEVICES, Row, Rows
from benchmarks.acceptance.models import (
    ALL_MODELS,
    EXACT_CHUNK,
    NGRAM,
    config_of,
    drafts_of,
    exact_options,
    folder_of,
)
from benchmarks.measure.weights import (
    write_float4_weights,
    write_float8_weights,
    write_int4_weights,
    write_weights,
)
from jaxspec import LLM, RequestMetrics, SamplingParams
from jaxspec.pallas import dispatch
from jaxspec.requests.logprobs import token_logprobs
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import RAW

TIE = 1e-3  # of two logits, where either token may come
TIE_IN_BFLOAT16 = 5e-2
_LARGER = 1.25  # an error that is larger has another cause than rounding activations
PROMPTS, MOTIF, TOKENS = 24, 12, 32
IsTie = Callable[[Request, Sequence[int], int], bool]


def exact(rows: Rows) -> None:
    """Compare greedy requests, sampled ones and ones with all features: a row per comparison.

    Without drafts a request asks for none, and in models with all parts the engine has none. Other
    models have requests with all features only, which need two programs instead of six.
    """
    job, model = rows.job, ALL_MODELS[rows.job.model]
    config = config_of(job.model, is_small=job.is_small, exact=True)
    comparisons = {"drafts and none": ("drafts", "without"), "kernels and XLA": ("without", "xla")}
    with folder_of(job.model, config) as folder:

        def arm(drafts: dict[str, Any] | None, cache: str | None = job.cache) -> Arm:
            options = exact_options(cache and Path(cache), speculative_config=drafts)
            return Arm(folder, rows, options)

        arms = {}
        with arm(drafts_of(job.model, folder)) as engine:
            arms["drafts"] = engine.run()
            arms["without"] = engine.run(num_speculative_tokens=0)
            gap = functools.partial(engine.generate_and_score, arms["drafts"])
            rows.measure("generate and score", gap)
        if model.has_all:
            with arm(None) as engine:
                arms["without"] = engine.run()
            with arm(NGRAM) as engine:
                arms["n-gram"] = engine.run()
            comparisons["n-gram drafts and none"] = ("n-gram", "without")
        with references(), arm(None, cache=None) as engine:
            arms["xla"] = engine.run()
            for name, pair in comparisons.items():
                requests = [arms[each] for each in pair]
                rows.measure(name, functools.partial(compare, *requests, engine.prefers))


def deterministic(rows: Rows) -> None:
    """Compare log-probabilities with scores, which have the same bits in a deterministic engine."""
    job = rows.job
    config = config_of(job.model, is_small=job.is_small, exact=True)
    with folder_of(job.model, config) as folder:
        drafts = drafts_of(job.model, folder)
        others = {"dtype": "bfloat16", "deterministic": True, "speculative_config": drafts}
        with Arm(folder, rows, exact_options(Path(job.cache), **others)) as engine:
            gap = functools.partial(engine.generate_and_score, engine.run())
            rows.measure("generate and score", gap)


def exact_on_devices(rows: Rows) -> None:
    """Compare the tokens of a tensor-parallel group with those of one device."""
    arms = {"tensor_parallel_size": EXACT_ON_DEVICES[rows.job.part]}, {"tensor_parallel_size": 1}
    _two_arms(rows, "devices and one", write_weights, *arms)


def exact_in_float8(rows: Rows) -> None:
    """Compare folders in FP8: by blocks, per row, and rounded by blocks at load."""
    by_row = functools.partial(write_float8_weights, by_row=True)
    _exact_as_published(rows, {"blocks": write_float8_weights, "per row": by_row})
    with _written(rows, write_weights) as folder:
        _held(rows, "rounded at load", folder, quantization="fp8")


def exact_in_4_bits(rows: Rows) -> None:
    """Compare folders in 4 bits: integers in groups, and NVFP4."""
    _exact_as_published(rows, {"integers": write_int4_weights, "nvfp4": write_float4_weights})


def _exact_as_published(rows: Rows, folders: dict[str, Callable[[Path], object]]) -> None:
    """Compare weights that are held as published with dequantised ones.

    Both round activations to bfloat16, so their tokens differ after ties; their log-probabilities
    are as near to those in float32.
    """
    for name, write in folders.items():
        with _written(rows, write) as folder:
            held, scores = _held(rows, name, folder), {}
            for dtype in "bfloat16", "float32":
                with _arm(rows, folder, dtype=dtype, quantization="dequantise") as engine:
                    scores[dtype] = engine.scores()
            compared = functools.partial(compare_scores, held, **scores)
            rows.measure(f"{name}: held and dequantised", compared)


def _held(rows: Rows, name: str, folder: Path, **options: Any) -> np.ndarray:
    """Compare tokens with drafts and without, in bfloat16, which the kernels need.

    Return `Arm.scores`.
    """
    with _arm(rows, folder, dtype="bfloat16", **options) as engine:
        rows.add(f"{name}: held", held_gb=engine.held_bytes / 1e9)
        drafted, plain = engine.run(), engine.run(num_speculative_tokens=0)
        both = functools.partial(compare, drafted, plain, engine.prefers)
        rows.measure(f"{name}: drafts and none", both)
        return engine.scores()


def _two_arms(rows: Rows, name: str, write: Callable[[Path], object], *arms: Any) -> None:
    """Compare the tokens of two engines on one folder; the second one judges ties."""
    with _written(rows, write) as folder:
        found = []
        for arm in arms:
            with _arm(rows, folder, **arm) as engine:
                found.append(engine.run())
                if arm is arms[-1]:
                    rows.measure(name, functools.partial(compare, *found, engine.prefers))


@contextlib.contextmanager
def _written(rows: Rows, write: Callable[[Path], object]) -> Iterator[Path]:
    """Yield a folder of the model with weights, which the folder of an assistant has in 16 bits."""
    job = rows.job
    config = config_of(job.model, is_small=job.is_small, exact=True)
    with folder_of(job.model, config) as folder:
        write(folder)
        if assistant := drafts_of(job.model, folder).get("model"):
            write_weights(Path(assistant))
        yield folder


def _arm(rows: Rows, folder: Path, **others: Any) -> "Arm":
    drafts = drafts_of(rows.job.model, folder)
    options = {"load_format": "auto", "speculative_config": drafts, **others}
    return Arm(folder, rows, exact_options(Path(rows.job.cache), **options))


@dataclasses.dataclass
class Tokens:
    """The requests of one arm by kind, and their metrics."""

    requests: dict[str, list[Request]]
    metrics: RequestMetrics


class Arm:
    """An engine in float32, or in bfloat16 for weights in 8 or 4 bits."""

    def __init__(self, folder: Path, rows: Rows, options: dict[str, Any]):
        self._has_all = ALL_MODELS[rows.job.model].has_all
        self._tie = TIE if options["dtype"] == "float32" else TIE_IN_BFLOAT16
        self._largest_gap = 0.0 if options.get("deterministic") else self._tie
        self._llm = LLM(folder, **options)

    def __enter__(self) -> "Arm":
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.close()

    @property
    def held_bytes(self) -> int:
        """Bytes of weights that are held as published, without scales in float32."""
        dtypes = "float8_e4m3fn", "uint16"
        weights = self._llm._runner._weights
        return sum(each.nbytes for each in weights if each.dtype.name in dtypes)

    def run(self, **others: Any) -> Tokens:
        """Complete all prompts; `others` are of `SamplingParams`.

        The programs of these requests are compiled, and no others.
        """
        self._llm.warm_up([params[0] for params in self._kinds().values()])
        prompts = _prompts(self._llm.vocab_size)
        kinds = {
            kind: [dataclasses.replace(each, **others) for each in params]
            for kind, params in self._kinds().items()
        }
        requests = {kind: self._complete(prompts, params) for kind, params in kinds.items()}
        every = [request.metrics for request in itertools.chain(*requests.values())]
        return Tokens(requests, RequestMetrics.total(every))

    def scores(self) -> np.ndarray:
        """Return the log-probabilities of all tokens of the prompts, but the first of each."""
        scores = self._llm.score(_prompts(self._llm.vocab_size))
        return np.concatenate([score.token_logprobs[1:] for score in scores])

    def generate_and_score(self, tokens: Tokens) -> Row:
        """Compare log-probabilities of generated tokens with the scores of the same texts."""
        requests = tokens.requests["all"]
        texts = [{"prompt_token_ids": [*each.prompt, *each.output]} for each in requests]
        scores = self._llm.score(texts, logprobs_mode=RAW)
        gaps = np.concatenate(
            [
                np.abs(token_logprobs(request.logprobs) - score.token_logprobs[-TOKENS:])
                for request, score in zip(requests, scores, strict=True)
            ]
        )
        row: Row = {"largest_difference": float(gaps.max()), "mean_difference": float(gaps.mean())}
        if row["largest_difference"] > self._largest_gap:
            row["error"] = f"Logprobs differ from scores by {row['largest_difference']:.2g}"
        return row

    def prefers(self, request: Request, ids: Sequence[int], place: int) -> bool:
        """Return whether a bias of a tie to the first of two ids makes it the token at `place`.

        Penalties, masks and top-p take part: an id may tie with the last one that top-k keeps.
        """
        biases = dict(request.params.logit_bias or {})
        for id, bias in zip(ids, (self._tie, -self._tie), strict=True):
            biases[id] = biases.get(id, 0.0) + bias
        params = dataclasses.replace(request.params, logit_bias=biases, num_speculative_tokens=None)
        (again,) = self._complete([{"prompt_token_ids": list(request.prompt)}], [params])
        return again.output[: place + 1] == [*request.output[:place], ids[0]]

    def _kinds(self) -> dict[str, list[SamplingParams]]:
        """Return parameters by kind; with two allowed ids many drafts are accepted."""
        defaults = SamplingParams(temperature=0.7, top_k=20, top_p=0.95)
        kinds = {"all": EVERYTHING, "two ids": TWO_IDS}
        if self._has_all:
            kinds |= {"greedy": GREEDY, "sampled": DEFAULTS}
        return {
            name: [
                dataclasses.replace(each, seed=seed)
                for seed, each in enumerate(params_of(kind, PROMPTS, TOKENS, defaults))
            ]
            for name, kind in kinds.items()
        }

    def _complete(self, prompts: list, params: list[SamplingParams]) -> list[Request]:
        groups = self._llm.prepare(prompts, params)
        samples = [sample for group in groups for sample in group]
        for _ in self._llm.session.run(samples):
            pass
        return [sample.request for sample in samples]


def compare(one: Tokens, other: Tokens, is_tie: IsTie) -> Row:
    """Count identical outputs, those that differ after a tie, and others."""
    row: Row = {"generations": 0, "identical": 0, "ties": 0, "differing": 0}
    for kind, requests in one.requests.items():
        for number, (a, b) in enumerate(zip(requests, other.requests[kind], strict=True)):
            row["generations"] += 1
            pairs = zip(a.output, b.output, strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if same == len(a.output) == len(b.output):
                row["identical"] += 1
            elif same < min(len(a.output), len(b.output)) and is_tie(
                b, (a.output[same], b.output[same]), same
            ):
                row["ties"] += 1
            else:
                row["differing"] += 1
                row["error"] = f"Tokens differ: {kind} sample {number}, token {same}"
    drafted = one.metrics
    return row | {"drafts_accepted": drafted.num_accepted_tokens, "verifies": drafted.num_drafts}


def compare_scores(held: np.ndarray, bfloat16: np.ndarray, float32: np.ndarray) -> Row:
    """Return the errors of weights as published, and of dequantised ones in bfloat16."""
    errors = [float(np.sqrt(np.mean((each - float32) ** 2))) for each in (held, bfloat16)]
    row: Row = dict(zip(("held_error", "dequantised_error"), errors, strict=True))
    if errors[0] > _LARGER * errors[1] + TIE:
        row["error"] = f"Weights as published have an error of {errors[0]}, others {errors[1]}"
    return row


@contextlib.contextmanager
def references() -> Iterator[None]:
    """Run every op as XLA within the block, without the compiled programs that have kernels."""
    kernels_here = dispatch.kernels_here
    dispatch.kernels_here = lambda: (False, "references are asked for")
    jax.config.update("jax_enable_compilation_cache", False)
    jax.clear_caches()
    try:
        yield
    finally:
        dispatch.kernels_here = kernels_here
        jax.config.update("jax_enable_compilation_cache", True)


def _prompts(vocab: int) -> list[dict[str, list[int]]]:
    """Return random prompts; every second one repeats a few ids."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(EXACT_CHUNK // 4, 2 * EXACT_CHUNK, PROMPTS)
    texts = [rng.integers(0, vocab, length).tolist() for length in lengths]
    repeated = [(text[:MOTIF] * len(text))[: len(text)] for text in texts]
    return [
        {"prompt_token_ids": (text, again)[i % 2]}
        for i, (text, again) in enumerate(zip(texts, repeated, strict=True))
    ]
