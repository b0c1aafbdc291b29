"""Engines for the law tests: token ids in and out, on the tiny fixtures, with programs shared."""

import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from oracle import Expected, Oracle, expect
from quantised_folders import write_kv_scales
from shortened import write_shortened

from jaxspec.engine.engine import Engine
from jaxspec.models import load_model, unread_model_or_head
from jaxspec.models.base import ModelSpec
from jaxspec.options import SpeculativeConfig
from jaxspec.parallel import ALONE, Group
from jaxspec.plan.step_shapes import SchedulerLimits, StateConfig, StepShapes
from jaxspec.prefix.disk_tier import DiskTier
from jaxspec.prefix.host_tier import HostTier
from jaxspec.proposers import Proposer, make_proposer
from jaxspec.proposers.testing.oracle import OracleProposer
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.warmup import programs, warm_up
from jaxspec.sampling import make_verifier
from jaxspec.scheduler.host_drafter import make_host_drafter, path_length
from jaxspec.scheduler.scheduler import Scheduler

FIXTURES = Path(__file__).parents[1] / "fixtures"
HYBRID = "qwen3_5, one layer of each kind"
SCALED = "the same with scales of keys and values"
ROWS, MAX_LEN = 4, 96
NUM_PAGES = 400  # of every engine's pools, so that engines which may use fewer share programs
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=12)
SNAPSHOT = StateConfig()
REPLAY = StateConfig("replay", window=7)  # so that even short requests fold several times


_shortened = tempfile.TemporaryDirectory(prefix="jaxspec-hybrid-")


@functools.cache
def folder_of(fixture: str) -> Path:
    """Return the folder of a fixture, of `SCALED`, or of `HYBRID`: two of the layers of qwen3_5."""
    if fixture == SCALED:
        folder = shutil.copytree(folder_of(HYBRID), Path(_shortened.name) / "scaled")
        return write_kv_scales(
            folder, {"model.layers.1.": (0.0137, 0.0019), "mtp.layers.0.": (0.02, 0.3)}
        )
    if fixture != HYBRID:
        return FIXTURES / fixture
    return write_shortened(FIXTURES / "qwen3_5", (0, 3), Path(_shortened.name) / "model")


@functools.cache
def model(fixture: str, group: Group = ALONE, whole_experts: bool | None = None):
    float32 = jnp.dtype("float32")
    folder = folder_of(fixture)
    options = {"group": group, "whole_experts": whole_experts, "scales_kv": fixture == SCALED}
    return load_model(folder, float32, **options)


@functools.cache
def drafting(fixture: str, group: Group = ALONE):
    """A model or a head that drafts for another fixture."""
    folder = folder_of(fixture)
    with unread_model_or_head(folder, jnp.dtype("float32"), group=group) as found:
        return found.read()


def abstract(module):
    """Return the model with the shapes of one device, and without values."""
    return module and ModelSpec.of(module, jnp.dtype("float32")).model()


@functools.cache
def oracle(fixture: str) -> Oracle:
    return Oracle(folder_of(fixture))


def expected(
    fixture: str, prompt: tuple[int, ...], params: SamplingParams, seed: int, stops=(), words=()
):
    key = repr(
        (fixture, prompt, params, seed, stops, words)
    )  # parameters may change, so have no hash
    if key not in _expected:
        _expected[key] = expect(oracle(fixture), prompt, params, seed, stops, bad_words=words)
    return _expected[key]


_expected: dict[str, Expected] = {}


def prompts(count: int, seed: int = 0, longest: int = 24) -> list[tuple[int, ...]]:
    """Random prompts of 1 to `longest` bytes."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [tuple(rng.integers(0, 256, length).tolist()) for length in lengths]


def _padded(sequences) -> tuple[tuple[int, ...], ...]:
    """Add sequences that no prompt begins with, so that most engines' tables are of one shape."""
    return (*map(tuple, sequences), *[(-1,) * MAX_LEN] * (16 - len(sequences) % 16))


class Harness:
    """An engine, and the requests it was given. Every finished request is checked by `check`."""

    def __init__(
        self,
        fixture: str = HYBRID,
        *,
        drafts: int = 0,
        accuracy: tuple[float, ...] | None = None,
        continuations=(),
        vary: bool = False,
        probabilistic: bool = False,
        method: str = "mtp",
        options=None,  # of the method
        rejection: str = "standard",
        synthetic: tuple[float, ...] | None = None,
        max_in_flight: int = 2,
        steps_per_dispatch: int = 1,
        chunk: int | None = None,
        num_pages: int = NUM_PAGES,
        page_size: int = 4,
        feature_sets=(GREEDY.features,),
        decode_rows=(ROWS,),
        prefill_tokens=(64,),
        states: StateConfig = SNAPSHOT,
        kv_dtype=None,
        draft_buckets: tuple[int, ...] = (),
        drafter: str | None = None,  # another fixture
        prefixes: str = "off",  # `SchedulerLimits.prefix_caching`
        num_checkpoints: int = 6,
        interval: int | None = None,
        host_bytes: int = 0,
        block_pages: int = 4,
        folder: Path | None = None,  # of files of pieces
        group: Group = ALONE,
        whole_experts: bool | None = None,
    ):
        speculation = None
        if drafts:
            speculation = SpeculativeConfig(
                method,
                drafts,
                "probabilistic" if probabilistic else "greedy",
                rejection,
                synthetic_acceptance_rates=synthetic,
                options=options,
            )
        self.buckets = StepShapes(
            max_num_seqs=ROWS,
            max_model_len=MAX_LEN,
            page_size=page_size,
            num_pages=num_pages,
            num_drafts=drafts,
            decode_rows=decode_rows,
            prefill_tokens=prefill_tokens,
            max_prefill_seqs=3,
            steps_per_dispatch=steps_per_dispatch,
            draft_buckets=draft_buckets,
            vocab_size=model(fixture).vocab_size,
            path_length=path_length(speculation, max_in_flight, steps_per_dispatch),
            num_checkpoints=num_checkpoints if prefixes in ("align", "all") else 0,
            block_pages=block_pages,
        )
        self.limits = SchedulerLimits(
            max_num_batched_tokens=200,
            long_prefill_token_threshold=chunk,
            prefix_caching=prefixes,
            checkpoint_interval=interval,
            host_bytes=host_bytes,
        )
        self.fixture = fixture
        self.vocab_size = model(fixture).vocab_size
        self.proposer: Proposer | None = None
        if accuracy is not None:
            self.proposer = OracleProposer(
                num_drafts=drafts,
                vocab_size=self.vocab_size,
                vary_num_drafts=vary,
                sequences=_padded(continuations),
                accuracy=accuracy,
            )
        elif speculation is not None:
            given = drafter and drafting(drafter, group)
            model_spec = given and ModelSpec.of(given, jnp.dtype("float32"))
            self.proposer = make_proposer(speculation, model(fixture), model_spec)
        given = drafter and drafting(drafter, group)
        shared = model(fixture, group, whole_experts) if group.size > 1 else model(fixture)
        blueprint = Blueprint.of(
            abstract(shared),
            dataclasses.replace(self.buckets, num_pages=max(num_pages, NUM_PAGES)),
            self.proposer,
            dtype=jnp.dtype("float32"),
            verifier=make_verifier(speculation),
            states=states,
            kv_dtype=kv_dtype,
            drafter=abstract(given),
            group=group,
        )
        self.runner = ModelRunner(shared, blueprint, drafter=given)
        compiled = programs(self.buckets, self.limits, feature_sets)
        warm_up(self.runner, compiled)
        drafts_on_host = make_host_drafter(speculation)
        pieces, tier = self.runner.blocks, None
        if host_bytes:
            kinds = (False, True) if self.buckets.num_checkpoints else (False,)
            like = {kind: pieces.arrays(is_state=kind) for kind in kinds}
            disk = folder and DiskTier(folder, 2**30, self.runner.fingerprint, page_size, like)
            tier = HostTier(self.buckets, host_bytes, pieces, disk)
        self.scheduler = Scheduler(self.buckets, self.limits, drafter=drafts_on_host, tier=tier)
        self.scheduler.programs.add(compiled if feature_sets else ())
        self.engine = Engine(self.scheduler, self.runner, max_in_flight=max_in_flight)
        self.requests: list[Request] = []
        self.emitted: dict[Request, list[int]] = {}
        self.num_ties = 0

    def add(
        self, prompt, params=GREEDY, seed: int = 0, stop_ids=(), bad_words=(), salt=None
    ) -> list[Request]:
        """Queue `params.n` samples; sample i draws with noise of `seed + i`."""
        samples: list[Request] = []
        for index in range(params.n):
            key = self.proposer.request_key(prompt, seed + index) if self.proposer else 0
            parent = samples[0] if samples else None
            samples.append(
                Request(
                    tuple(prompt),
                    params,
                    seed + index,
                    tuple(stop_ids),
                    key,
                    parent,
                    tuple(bad_words),
                    cache_salt=salt,
                )
            )
        self.scheduler.check(samples)
        self.scheduler.add(samples)
        self.requests += samples
        self.emitted.update((sample, []) for sample in samples)
        return samples

    def step(self) -> None:
        for progress in self.engine.step():
            self.emitted[progress.request] += progress.given.tokens
            assert self.emitted[progress.request] == progress.request.output

    def run(self) -> "Harness":
        while self.engine.has_work:
            self.step()
        return self

    def check(self) -> int:
        """Every request that was not aborted gave what the oracle says; returns the ties met."""
        for request in self.requests:
            if request.finish == Finish.ABORT:
                continue
            assert request.finish in (Finish.STOP, Finish.LENGTH), request.finish
            want = expected(
                self.fixture,
                request.prompt,
                request.params,
                request.seed,
                request.stop_ids,
                request.bad_words,
            )
            what = f"{self.fixture} prompt {request.prompt[:5]}... seed {request.seed}"
            self.num_ties += want.check(request.output, what)
        return self.num_ties


def continuations(fixture: str, requests) -> list[tuple[int, ...]]:
    """Whole sequences of (prompt, params, seed): what the oracle proposer drafts from."""
    return [
        (*prompt, *expected(fixture, tuple(prompt), params, seed).tokens)
        for prompt, params, seed in requests
    ]


def heard_drafts(engine, requests):
    """(tokens, drafts) of every step of each request, of an engine that waits for its steps."""
    heard = []
    for prompt, params, seed in requests:
        engine.add(prompt, params, seed)
    while engine.engine.has_work:
        engine.step()
        rows = engine.runner.state.rows
        for request in engine.scheduler.running:
            count = int(rows.num_drafts[request.row])
            # None is verified behind the end.
            count = min(count, request.max_len - len(request.tokens))
            if count > 0:
                drafts = np.asarray(rows.drafts[request.row]).tolist()[:count]
                heard.append((list(request.tokens), drafts))
    return heard
