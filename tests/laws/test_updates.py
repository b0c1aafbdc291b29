"""Laws of updates: nothing that earlier weights computed is read under others, and versions say so.

Outputs after an update are those of an engine that is made from the new weights, with drafts and
without; a request that is updated in mid-generation equals one of a synchronous engine without
drafts that is updated at the same token. Bugs that other engines had are planted at the end.
"""

import asyncio
import dataclasses
import gc
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import changed, rolled, tensors_of

from jaxspec import LLM, AsyncLLM, SamplingParams, transfer
from jaxspec.prefix.cache import PrefixCache
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.scheduler.scheduler import Scheduler

LONG = True
SIZES = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "decode_buckets": [4],
    "prefill_buckets": [32],
    "max_model_len": 96,
    "page_size": 4,
    "num_pages": 150,
    "enable_prefix_caching": True,
    "show_progress": False,
}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "draft_head_dtype": "float8_e4m3fn"}
SAMPLED = SamplingParams(temperature=0.7, seed=5, max_tokens=20, logprobs=0)
GREEDY = dataclasses.replace(SAMPLED, temperature=0.0)
RANDOM = np.random.default_rng(1)
PROMPTS = [{"prompt_token_ids": RANDOM.integers(5, 250, n).tolist()} for n in (21, 9, 13, 4)]
PARAMS = [SAMPLED, GREEDY, dataclasses.replace(SAMPLED, seed=6), dataclasses.replace(GREEDY)]


@pytest.fixture(scope="module")
def old(short_model):
    return tensors_of(short_model)


@pytest.fixture(scope="module")
def new(old):
    """Other ids for the same texts, and a trunk that is a little different."""
    return changed(rolled(old), share=0.02)


@pytest.fixture(scope="module")
def llm(short_model):
    """Drafts with an 8-bit copy of the head, two steps in flight, snapshots."""
    with LLM(short_model, **SIZES, speculative_config=MTP, state_policy="snapshot") as llm:
        llm.session.scheduler.prefixes.min_uncached = 1  # short prompts have cached states, too
        yield llm


@pytest.fixture(scope="module")
def fresh(short_model, new, llm):
    """The same engine, made from the new weights; it compiles nothing."""
    options = SIZES | {"speculative_config": MTP, "state_policy": "snapshot"}
    with LLM(short_model, weights=new, weight_version="new", **options) as llm:
        llm.session.scheduler.prefixes.min_uncached = 1
        yield llm


@pytest.fixture(scope="module")
def oracle(short_model):
    """One request at a time, synchronous, without drafts, from replayed states."""
    options = SIZES | {"speculative_config": None, "max_in_flight": 0, "state_policy": "replay"}
    with LLM(short_model, **options | {"enable_prefix_caching": False}) as llm:
        yield llm


def told(output):
    sample = output.outputs[0]
    places = zip(sample.token_ids, sample.logprobs, strict=True)
    logprobs = [place[token].logprob for token, place in places]
    return sample.token_ids, logprobs, sample.metrics.accepted_per_position


def outputs(llm, prompts=PROMPTS, params=PARAMS):
    return [told(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def check_like_fresh(llm, fresh, new, **options):
    """Also where prefixes of the old weights were cached, and on those of the new ones."""
    one = PROMPTS[:1], PARAMS[:1]
    outputs(llm, *one)
    before = llm.weight_version
    update = llm.update_weights(new, **options)
    assert update.version == llm.weight_version != before
    fresh.reset_prefix_cache()
    for _ in range(2):  # the second time on cached prefixes
        assert outputs(llm, *one) == outputs(fresh, *one)
    want = outputs(fresh)
    assert outputs(llm) == want
    assert sum(sum(accepted) for _, _, accepted in want) > 20


def test_outputs_are_those_of_an_engine_made_from_the_weights(llm, fresh, old, new):
    """L1: tokens, logprobs, accepted drafts; prefixes of the old weights are not read (L6)."""
    llm.update_weights(old)
    hits = llm.metrics()["prefix_cache"]["num_hits"]
    check_like_fresh(llm, fresh, new)
    assert llm.metrics()["prefix_cache"]["num_hits"] > hits


# In mid-generation


def run(llm, prompts, params, after, act):
    """The samples of prompts, of which `after` collected steps ran before `act`."""
    samples = [sample for group in llm.prepare(prompts, params) for sample in group]
    llm.session.add(samples)
    for number in itertools.count(1):
        if not llm.session.has_work:
            return samples
        llm.session.step()
        if number == after:
            act()
    return samples


def spans(sample):
    return [(span.version, span.start, span.end) for span in sample.output().weight_versions]


def check_spans(sample, versions):
    """L5: contiguous, in order, and they cover the tokens."""
    found = spans(sample)
    ends = [0, *(end for _, _, end in found)]
    assert [start for _, start, _ in found] == ends[:-1] and ends[-1] == sample.request.num_output
    assert all(start < end for _, start, end in found)
    names = [version for version, _, _ in found]
    assert names == [each for each in versions if each in names]


def boundary(sample, version):
    """The number of tokens of earlier weights."""
    return next((start for name, start, _ in spans(sample) if name == version), None)


def continued(oracle, prompt, params, boundary, old, new):
    """Tokens of an engine that is updated after so many tokens; None means never."""
    oracle.update_weights(old)
    ((sample,),) = oracle.prepare([prompt], [params])
    oracle.session.add([sample])
    while boundary is not None and len(sample.request.output) < boundary:
        oracle.session.step()
    if boundary is not None:
        assert len(sample.request.output) == boundary
        oracle.update_weights(new)
    while oracle.session.has_work:
        oracle.session.step()
    return sample.request.output


def check_keep(llm, oracle, old, new, after):
    """L3, L5: the first tokens are the old weights', the others the new ones' on old caches."""
    llm.update_weights(old)
    llm.reset_prefix_cache()
    before = llm.weight_version
    samples = run(llm, PROMPTS, PARAMS, after, lambda: llm.update_weights(new))
    version, places = llm.weight_version, set()
    for sample, prompt, params in zip(samples, PROMPTS, PARAMS, strict=True):
        check_spans(sample, [before, version])
        place = boundary(sample, version)
        places.add(place)
        want = continued(oracle, prompt, params, place, old, new)
        assert sample.request.output == want
    assert places - {0, None}


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("after", [4, 7])
def test_running_requests_continue_with_the_new_weights(llm, oracle, old, new, after):
    check_keep(llm, oracle, old, new, after)


def check_recompute(llm, fresh, old, new, after, prompts=PROMPTS, params=PARAMS):
    """L4: what follows equals an engine of the new weights that is given the text so far."""
    llm.update_weights(old)
    llm.reset_prefix_cache()
    before = llm.weight_version
    update = lambda: llm.update_weights(new, mode="recompute")  # noqa: E731
    samples = run(llm, prompts, params, after, update)
    for sample in samples:
        check_spans(sample, [before, llm.weight_version])
        request, place = sample.request, boundary(sample, llm.weight_version)
        if place is None:  # it ended before the update
            continue
        left = request.params.max_tokens - place
        asked = dataclasses.replace(request.params, n=1, max_tokens=left)
        so_far = {"prompt_token_ids": [*request.prompt, *request.output[:place]]}
        fresh.reset_prefix_cache()
        ((again,),) = fresh.prepare([so_far], [asked])
        again.request.seed = request.seed
        run_all(fresh, [again])
        assert request.output[place:] == again.request.output
        given, want = logprobs_of(sample)[place:], logprobs_of(again)
        np.testing.assert_allclose(given, want, atol=1e-4)
    check_prefixes(llm, fresh)


def run_all(llm, samples):
    llm.session.add(samples)
    while llm.session.has_work:
        llm.session.step()


def logprobs_of(sample):
    output = sample.output()
    places = zip(output.token_ids, output.logprobs, strict=True)
    return [place[token].logprob for token, place in places]


def check_prefixes(llm, fresh):
    """L6: nothing that is cached now is of the old weights."""
    fresh.reset_prefix_cache()
    for one, other in zip(outputs(llm), outputs(fresh), strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose(one[1], other[1], atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("after", [3, 6])
def test_running_requests_are_computed_again(llm, fresh, old, new, after):
    check_recompute(llm, fresh, old, new, after)


FORKED = dataclasses.replace(SAMPLED, n=4, max_tokens=8)
LONG_PROMPT = {"prompt_token_ids": RANDOM.integers(5, 250, 60).tolist()}


def check_forks(llm, fresh, old, new):
    check_recompute(llm, fresh, old, new, 1, [LONG_PROMPT], [FORKED])


@pytest.mark.soak
def test_samples_that_wait_for_a_fork_start_with_the_new_weights(llm, fresh, old, new):
    check_forks(llm, fresh, old, new)


def test_all_requests_are_aborted(llm, old, new):
    llm.update_weights(old)
    samples = run(llm, PROMPTS, PARAMS, 4, lambda: llm.update_weights(new, mode="abort"))
    assert {sample.request.finish.reason for sample in samples} == {"abort"}
    pages = llm.session.scheduler.pages
    llm.reset_prefix_cache()
    assert pages.num_free == llm.shapes.num_pages - 1


def hold_in_the_middle(session):
    """Let no request go on after its fourth token, until the event that is returned is set."""
    step, go_on = session.step, threading.Event()

    def held():
        step()
        if any(len(request.output) >= 4 for request in session.scheduler.running):
            assert go_on.wait(60)

    session.step = held
    return go_on


@pytest.mark.soak
def test_streams_of_tasks_continue_or_end(short_model, old, new, llm):
    async def main():
        options = SIZES | {"speculative_config": MTP, "state_policy": "snapshot"}
        async with AsyncLLM(short_model, **options) as engine:
            last, go_on = {}, hold_in_the_middle(engine._engine.session)
            for mode in ("keep", "abort"):
                async for output in engine.generate(PROMPTS[0], SAMPLED):
                    if engine.weight_version != mode:
                        await engine.update_weights(new, version=mode, mode=mode)
                        go_on.set()
                    last[mode] = output.outputs[0]
                go_on.clear()
            assert [each.finish_reason for each in last.values()] == ["length", "abort"]
            versions = [[s.version for s in each.weight_versions] for each in last.values()]
            assert versions[0] == ["0", "keep"] and versions[1] == ["keep"]
            end = last["keep"].weight_versions[-1].end
            assert end == len(last["keep"].token_ids) == SAMPLED.max_tokens
            go_on.set()
            assert (await engine.generate(PROMPTS[1], SAMPLED).__anext__()).outputs

    asyncio.run(asyncio.wait_for(main(), 200))


# Exported requests


def exported(llm, num_tokens=6):
    """The state of a request with so many tokens."""
    ((sample,),) = llm.prepare([PROMPTS[0]], [SAMPLED], ["travels"])
    llm.session.add([sample])
    while len(sample.request.output) < num_tokens:
        llm.session.step()
    return llm.export_request("travels")


def check_states(llm, old, new):
    llm.update_weights(old)
    state = exported(llm)
    assert state.num_computed > 0 and state.weight_starts == ((llm.weight_version, 0),)
    assert transfer.RequestState.from_bytes(state.to_bytes()).weight_starts == state.weight_starts
    stream = llm.import_request(state)
    llm.update_weights(new)  # its arrays are of the old weights by now
    tokens = [token for delta in stream for token in delta.token_ids]
    assert llm.metrics()["prefix_cache"]["num_pages"] >= 0 and len(tokens) > 0
    with pytest.raises(ValueError, match="fingerprint"):
        llm.import_request(state)
    return tokens


def test_exported_requests_are_of_their_weights(llm, fresh, old, new):
    tokens = check_states(llm, old, new)
    check_prefixes(llm, fresh)
    state = exported(llm)
    assert fresh.import_request(state) is not None  # the same weights
    assert tokens


# Errors, leaks and programs


def test_a_refused_update_changes_nothing(llm, fresh, old, new):
    """L9; each error names the argument."""
    llm.update_weights(new)
    version, weights = llm.weight_version, list(map(id, llm._runner.weights))
    some = dict(list(new.items())[1:])
    deleted = {name: jnp.array(each) for name, each in new.items()}
    deleted["mtp.norm.weight"].delete()
    nan = new | {"model.norm.weight": new["model.norm.weight"] * jnp.nan}
    refused = [
        {"weights": some},
        {"weights": deleted},
        {"weights": nan, "check_finite": True},
        {"weights": new, "version": version},
        {"weights": new, "version": ""},
        {"weights": new, "version": "a" * 129},
        {"weights": new, "version": 17},
        {"weights": new, "mode": "wait"},
        {"weights": new, "keep": "mtp.*"},
        {"weights": new, "drafter": new},
        {"weights": None},
        {"weights": {}},
        {"weights": 3},
        {"weights": [("model.norm.weight", new["model.norm.weight"])] * 2, "keep": ["*"]},
        {"weights": {"model.norm.weight": [1.0]}, "keep": ["*"]},
        {"weights": new, "check_finite": 1},
    ]
    for options in refused:
        with pytest.raises(ValueError, match=r"\w{4}.{20}"):
            llm.update_weights(**options)
    assert (llm.weight_version, list(map(id, llm._runner.weights))) == (version, weights)
    with pytest.raises(RuntimeError, match="step"):
        llm.session.in_turn(lambda: llm.update_weights(new))
    with pytest.raises(RuntimeError, match="update"):  # as of another thread
        llm._updating.hold(lambda: llm.update_weights(new))
    assert llm.weight_version == version
    check_prefixes(llm, fresh)


def test_an_update_that_breaks_off_stops_the_engine(llm, fresh, new, monkeypatch):
    """Until it is completed (L9)."""

    def fail(self, model, drafter):
        def cut(before):
            yield next(iter(model(before)))
            raise MemoryError("planted")

        return real(self, cut, drafter)

    real = ModelRunner.replace_weights
    version = llm.weight_version
    monkeypatch.setattr(ModelRunner, "replace_weights", fail)
    with pytest.raises(MemoryError):
        run(llm, PROMPTS, PARAMS, 3, lambda: llm.update_weights(new))
    monkeypatch.setattr(ModelRunner, "replace_weights", real)
    assert llm.weight_version == version and not llm.session.has_work
    for call in (lambda: outputs(llm), lambda: llm.update_weights(new, keep=["mtp.*"])):
        with pytest.raises(RuntimeError, match="update"):
            call()
    llm.update_weights(new)
    check_prefixes(llm, fresh)


@pytest.mark.soak
def test_updates_compile_nothing_and_leak_nothing(llm, old, new):
    """L2; own leaves, arrays of NumPy and an iterator are trees, too."""
    leaves = zip(llm.weight_specs("own"), llm._runner.weights, strict=True)
    own = {name: jnp.array(each) for name, each in leaves}
    host = {name: np.asarray(each) for name, each in new.items()}
    trees = [old, new, own, host]
    for tree in (*trees, new.items(), old):
        llm.update_weights(tree)
    outputs(llm)
    compiled = []

    def listen(name, seconds, **_):
        compiled.extend([name] if "backend_compile" in name else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    gc.collect()
    before = len(jax.live_arrays())
    for number in range(40):
        llm.update_weights(trees[number % 4])
        if number % 20 == 0:
            outputs(llm)
    llm.update_weights(iter(old.items()))
    jax.monitoring.unregister_event_duration_listener(listen)
    gc.collect()
    assert len(jax.live_arrays()) <= before and compiled == []


# Planted bugs: each is seen by a law above


@pytest.fixture
def planted(llm, monkeypatch):
    """Sets an attribute; afterwards the engine is whole again."""
    yield monkeypatch.setattr
    monkeypatch.undo()
    llm.session.abort(())
    llm.update_weights(llm.export_weights())
    llm.reset_prefix_cache()


def test_stale_tables_are_seen(llm, fresh, old, new, planted):
    """P1, P3: drafts of the 8-bit copy of the old head are all rejected."""
    llm.update_weights(old)
    tables = llm._runner._drafter_tables

    def keep(runner, proposer):
        runner._drafter_tables = tables

    planted(ModelRunner, "_renew_tables", keep)
    with pytest.raises(AssertionError):
        check_like_fresh(llm, fresh, new)


def test_kept_prefixes_are_seen(llm, fresh, old, new, planted):
    """P4."""
    llm.update_weights(old)
    planted(PrefixCache, "renew", lambda self, fingerprint: None)
    with pytest.raises(AssertionError):
        check_like_fresh(llm, fresh, new)


def test_a_kept_fingerprint_is_seen(llm, old, new, planted):
    """P6."""
    llm.update_weights(old)
    planted(ModelRunner, "fingerprint", llm._runner.fingerprint)
    with pytest.raises(pytest.fail.Exception):
        check_states(llm, old, new)


@pytest.mark.soak
def test_a_version_noted_when_a_step_is_collected_is_seen(llm, oracle, old, new, planted):
    """P11."""

    def collect(self, step, output):
        return real(self, dataclasses.replace(step, weight_version=self.weight_version), output)

    real = Scheduler.collect
    planted(Scheduler, "collect", collect)
    with pytest.raises(AssertionError):
        check_keep(llm, oracle, old, new, 4)


def test_prefixes_dropped_before_requests_are_preempted_are_seen(llm, fresh, old, new, planted):
    """P13: preempted requests cache their prefixes again, if they are still followed."""

    def renew(self, version, fingerprint):
        followed = dict(self.prefixes._at)
        real(self, version, fingerprint)
        self.prefixes._at.update(followed)
        preempt_all(self)

    real, preempt_all = Scheduler.renew_weights, Scheduler.preempt_all
    planted(Scheduler, "renew_weights", renew)
    planted(Scheduler, "preempt_all", lambda self: None)
    with pytest.raises(AssertionError):
        check_recompute(llm, fresh, old, new, 6)


def test_samples_forked_from_a_parent_of_the_old_weights_are_seen(llm, fresh, old, new, planted):
    """P17."""

    def preempt_all(self):
        for request in reversed(self.running.copy()):
            if not self._forked_samples.of(request):
                self.preempt(request)

    def renew(self, version, fingerprint):
        self.weight_version = version
        self.prefixes.renew(fingerprint)

    planted(Scheduler, "preempt_all", preempt_all)
    planted(Scheduler, "renew_weights", renew)
    with pytest.raises(AssertionError):
        check_forks(llm, fresh, old, new)


@pytest.mark.soak
def test_weights_swapped_between_two_halves_of_a_step_are_seen(llm, oracle, old, new, planted):
    """P14: as if a step in flight had read some leaves before the update, and the others after."""

    def swap(self, model, drafter):
        if self is not llm._runner:  # the oracle's are swapped whole
            return real(self, model, drafter)

        def head(before):
            return ((index, value) for index, value in model(before) if index == of_head)

        real(self, head, drafter)
        llm._halves = model

    names = list(llm.weight_specs("own"))
    of_head = next(index for index, name in enumerate(names) if name.startswith("trunk.lm_head"))
    real, late = ModelRunner.replace_weights, []

    def dispatch(self, plan):
        if self is llm._runner and getattr(llm, "_halves", None) is not None:
            late.append(1)
            if len(late) == 2:
                real(self, llm._halves, lambda before: iter(()))
                llm._halves = None
        return real_dispatch(self, plan)

    real_dispatch = ModelRunner.dispatch
    planted(ModelRunner, "replace_weights", swap)
    planted(ModelRunner, "dispatch", dispatch)
    with pytest.raises(AssertionError):
        check_keep(llm, oracle, old, new, 4)
    llm._halves = None
