"""A user's own proposer: the laws hold whatever it drafts, and misuse is one clear error."""

import dataclasses
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from harness import FIXTURES, GREEDY, REPLAY, SAMPLED, Harness, prompts

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.cache import TokenHistory
from jaxspec.commands.replay import replay
from jaxspec.flight.file import read
from jaxspec.options.draft_methods import CustomOptions
from jaxspec.pallas.paging.slot_mapping import slot_mapping
from jaxspec.proposers import Drafts, Proposer
from jaxspec.sampling import draw_draft

README = Path(jaxspec.__file__).parent / "proposers" / "README.md"
SMALL = {"max_num_seqs": 2, "decode_buckets": [2], "prefill_buckets": [32], "max_model_len": 96}


def example():
    """The class that the README shows."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(block[: block.index("options = ")], namespace)
    return namespace["RepeatProposer"]


RepeatProposer = example()


@dataclasses.dataclass(frozen=True)
class LastTimeProposer(Proposer):
    """Drafts what followed the newest token when it came last; it keeps a pool and has a table."""

    num_drafts: int

    @classmethod
    def from_config(cls, config, model):
        return cls(config.num_drafts)

    def cache_specs(self, options):
        return (TokenHistory(),)

    def init_tables(self, model, drafter=None):
        return jnp.arange(model.vocab_size, dtype=jnp.int32)

    def propose(self, model, inputs, pools, tables):
        history, slots = pools["tokens"], inputs.slots
        newest = slot_mapping(
            inputs.model.page_tables,
            slots,
            inputs.num_computed,
            slots > 0,
            page_size=inputs.page_size,
        )
        history = TokenHistory.write(history, inputs.model.kv_slots, inputs.model.tokens)
        history = TokenHistory.write(history, newest, inputs.last_token)
        seen = TokenHistory.read(history, inputs.model.page_tables, slots)
        place = jnp.arange(seen.shape[1])[None, :]
        before = (seen == inputs.last_token[:, None]) & (place < inputs.num_computed[:, None])
        last = jnp.max(jnp.where(before, place, -1), axis=1)
        ahead = last[:, None] + 1 + jnp.arange(inputs.num_drafts)[None, :]
        drafts = tables[jnp.take_along_axis(seen, jnp.minimum(ahead, seen.shape[1] - 1), axis=1)]
        drafts = jnp.where(ahead <= inputs.num_computed[:, None], drafts, -1)
        count = jnp.where(inputs.should_draft & (last >= 0), inputs.num_drafts, 0)
        return Drafts(drafts, count, None), pools | {"tokens": history}


@dataclasses.dataclass(frozen=True)
class Wrong(Proposer):
    """Drafts as it is told, right or wrong."""

    what: Any = None
    num_drafts: int = 2
    is_probabilistic: bool = False

    def propose(self, model, inputs, pools, tables):
        shape = inputs.slots.shape[0], inputs.num_drafts
        count = jnp.full(shape[0], inputs.num_drafts, jnp.int32)
        return self.what(Drafts(jnp.zeros(shape, jnp.int32), count, None), pools)


def make(proposer, drafts=2, **options):
    return Harness(drafts=drafts, method="custom", options=CustomOptions(proposer), **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "params", "options"),
    [
        (RepeatProposer, GREEDY, {"max_in_flight": 0, "chunk": 1}),
        (LastTimeProposer, SAMPLED, {"max_in_flight": 3, "chunk": 7, "states": REPLAY}),
        (LastTimeProposer, GREEDY, {"num_pages": 16}),
        (
            LastTimeProposer,
            GREEDY,
            {"steps_per_dispatch": 2, "draft_buckets": (0, 1, 3), "drafts": 3},
        ),
    ],
    ids=["synchronous", "replay", "preemption", "several numbers"],
)
def test_drafts_of_ones_own_change_no_output(kind, params, options, monkeypatch):
    """Laws 1, 3 and 4."""
    engine = make(kind(options.get("drafts", 2)), feature_sets=(params.features,), **options)
    if "draft_buckets" in options:
        rng = np.random.default_rng(0)
        chooser = engine.scheduler.adaptive_drafts
        monkeypatch.setattr(chooser, "choose", lambda *_: int(rng.choice([0, 1, 3])))
    for seed, prompt in enumerate([(1, 2, 3) * 5, (9,) * 11, *prompts(4), (5, 6) * 6]):
        engine.add(prompt, params, seed)
        engine.step()
    assert engine.run().check() <= 1
    assert sum(request.metrics.num_draft_tokens for request in engine.requests) > 0
    assert engine.engine.metrics.num_dropped_drafts == 0


@pytest.mark.soak
def test_the_example_of_the_documents_runs(monkeypatch, short_model):
    monkeypatch.setattr("jaxspec.api.loading.EMBEDDED_MODEL", short_model)
    (block,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(block, README, "exec"), {"__name__": __name__})


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("ids", [(400, 3), (-2, 3), (0, 2**31 - 1), (-(2**31), 300)])
def test_ids_that_the_vocabulary_lacks_are_dropped_and_counted(ids):
    def drafted(drafts, pools):
        tokens = jnp.broadcast_to(jnp.array(ids, jnp.int32), drafts.tokens.shape)
        return dataclasses.replace(drafts, tokens=tokens), pools

    engine = make(Wrong(drafted))
    for prompt in prompts(5):
        engine.add(prompt)
    engine.run().check()
    dropped = engine.engine.metrics.num_dropped_drafts
    drafted_at = engine.engine.acceptance.drafted_per_position
    wrong = [not -1 <= i < engine.vocab_size for i in ids]
    assert dropped == sum(n for n, is_wrong in zip(drafted_at, wrong, strict=True) if is_wrong) > 0


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("count", [-5, -1, 9])
def test_a_number_of_drafts_that_cannot_be_is_clipped(count):
    def drafted(drafts, pools):
        return dataclasses.replace(
            drafts, num_drafts=jnp.full_like(drafts.num_drafts, count)
        ), pools

    engine = make(Wrong(drafted))
    engine.add((1, 2, 3))
    engine.run().check()
    assert (engine.engine.acceptance.num_drafts > 0) == (count > 0)


@pytest.mark.soak
def test_placeholders_are_no_mistake():
    def drafted(drafts, pools):
        return dataclasses.replace(drafts, tokens=jnp.full_like(drafts.tokens, -1)), pools

    engine = make(Wrong(drafted))
    engine.add((1, 2, 3))
    engine.run().check()
    assert engine.engine.acceptance.num_draft_tokens > 0
    assert engine.engine.metrics.num_dropped_drafts == 0


def with_tokens(change):
    return lambda drafts, pools: (dataclasses.replace(drafts, tokens=change(drafts.tokens)), pools)


def with_count(change):
    return lambda drafts, pools: (
        dataclasses.replace(drafts, num_drafts=change(drafts.num_drafts)),
        pools,
    )


def with_logits(shape, dtype=jnp.float32):
    return lambda drafts, pools: (
        dataclasses.replace(drafts, logits=jnp.zeros(shape, dtype)),
        pools,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (with_tokens(lambda x: x[:, :1]), r"tokens of .* int32 \[2, 2\], got int32 \[2, 1\]"),
        (with_tokens(lambda x: x[0]), r"int32 \[2, 2\], got int32 \[2\]"),
        (
            with_tokens(lambda x: x.astype(jnp.float32)),
            r"tokens .* int32 \[2, 2\], got float32 \[2, 2\]",
        ),
        (with_tokens(lambda x: x.astype(jnp.int8)), r"tokens .* got int8 \[2, 2\]"),
        (with_tokens(lambda x: None), r"tokens .* got NoneType"),
        (with_count(lambda x: 2), r"num_drafts .* int32 \[2\], got int"),
        (with_count(lambda x: x[:1]), r"num_drafts .* int32 \[2\], got int32 \[1\]"),
        (with_count(lambda x: x > 0), r"num_drafts .* got bool \[2\]"),
        (with_logits((2, 2, 7)), r"logits .* float32 \[2, 2, 264\], got float32 \[2, 2, 7\]"),
        (with_logits((2, 2, 264), jnp.float16), r"logits .* got float16 \[2, 2, 264\]"),
        (lambda drafts, pools: drafts, r"must return a pair, Drafts and pools, got Drafts"),
        (lambda drafts, pools: (drafts.tokens, pools), r"got \(int32 \[2, 2\], dict\)"),
        (lambda drafts, pools: (drafts, None), r"return the pools .* differ in 'NoneType'"),
        (lambda drafts, pools: (drafts, pools | {"mine": 3}), r"differ in \['mine'\]"),
        (lambda drafts, pools: (drafts, {k: v for k, v in pools.items() if k != "kv"}), "kv"),
    ],
)
def test_arrays_that_cannot_be_drafts_are_refused_before_anything_is_queued(what, message):
    config = {"method": "custom", "proposer": Wrong(what)}
    with LLM(FIXTURES / "qwen3_5", speculative_config=config, **SMALL) as llm:
        for _ in range(2):
            with pytest.raises(ValueError, match=message) as caught:
                llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2))
            assert "\n" not in str(caught.value)
            assert not llm.session.has_work


@pytest.mark.soak
def test_drawn_drafts_need_their_logits():
    config = {
        "method": "custom",
        "proposer": Wrong(lambda *drafted: drafted, is_probabilistic=True),
        "draft_sample_method": "probabilistic",
    }
    with LLM(FIXTURES / "qwen3_5", speculative_config=config, **SMALL) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=2)
        llm.generate({"prompt_token_ids": [1, 2]}, greedy)  # which reads none
        with pytest.raises(ValueError, match=r"logits .* float32 \[2, 2, 264\], got NoneType"):
            llm.generate(
                {"prompt_token_ids": [1, 2]}, SamplingParams(temperature=1.0, max_tokens=2)
            )


@dataclasses.dataclass(frozen=True)
class Drawn(Proposer):
    """Drafts drawn from one distribution for all."""

    num_drafts: int = 2
    is_probabilistic: bool = True

    def propose(self, model, inputs, pools, tables):
        rows = inputs.slots.shape[0]
        logits = jnp.zeros((rows, model.vocab_size)).at[:, :9].set(4.0)
        position = inputs.num_computed + 1
        tokens = [
            draw_draft(logits, inputs.sampling, position + i, i) for i in range(inputs.num_drafts)
        ]
        drafts = jnp.stack(tokens, axis=1)
        logits = jnp.broadcast_to(logits[:, None], (*drafts.shape, model.vocab_size))
        return Drafts(drafts, jnp.where(inputs.should_draft, 2, 0), logits), pools


@pytest.mark.soak
def test_drafts_may_be_drawn():
    config = {
        "method": "custom",
        "proposer": Drawn(),
        "draft_sample_method": "probabilistic",
    }
    with LLM(FIXTURES / "qwen3_5", speculative_config=config, **SMALL) as llm:
        (output,) = llm.generate(
            {"prompt_token_ids": [1, 2]}, SamplingParams(temperature=1.0, max_tokens=40)
        )
        assert len(output.outputs[0].token_ids) == 40 and output.metrics.num_accepted_tokens > 0


@dataclasses.dataclass(frozen=True)
class Loose:
    """It follows the protocol without the class."""

    num_drafts: int = 2

    def propose(self, model, inputs, pools, tables):
        raise NotImplementedError


class Unnamed(Proposer):
    """It has no `from_config`."""

    num_drafts = 2

    def propose(self, model, inputs, pools, tables):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"proposer": Loose()}, "must be an instance of a subclass of jaxspec.proposers.Proposer"),
        ({"proposer": RepeatProposer(2), "num_speculative_tokens": 3}, "got 3 and 2 of .*Repeat"),
        ({"proposer": Drawn()}, "draft_sample_method is 'greedy', and is_probabilistic .* True"),
        (
            {"proposer": RepeatProposer(2), "draft_sample_method": "probabilistic"},
            "draft_sample_method is 'probabilistic', and is_probabilistic of .* is False",
        ),
        ({"proposer": "no_such_module:A"}, "must be there to import, and is not: No module named"),
        ({"proposer": f"{__name__}:Nobody"}, "must be there to import, and is not: .*'Nobody'"),
        ({"proposer": f"{__name__}:Unnamed"}, "must have a classmethod from_config"),
    ],
)
def test_a_proposer_that_does_not_fit_is_refused_as_inspect_says(config, message):
    options = {"speculative_config": {"method": "custom", **config}, **SMALL}
    with pytest.raises(ValueError, match=message) as caught:
        LLM(FIXTURES / "qwen3_5", **options)
    refused = jaxspec.inspect(FIXTURES / "qwen3_5", **options).refused
    assert [*refused] == [str(caught.value)]


@pytest.mark.soak
def test_a_class_is_found_by_its_name_and_metrics_count_what_is_dropped():
    config = {"method": "custom", "proposer": f"{__name__}:RepeatProposer"}
    assert __name__ in sys.modules
    with LLM(FIXTURES / "qwen3_5", speculative_config=config, **SMALL) as llm:
        llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=20))
        metrics = llm.metrics()
    assert metrics["acceptance"]["custom"]["drafted_per_position"][0] > 0
    assert metrics["num_dropped_drafts"] == 0


@dataclasses.dataclass(frozen=True)
class Unpicklable(Proposer):
    """It holds what can be neither pickled nor copied, as a user's objects may."""

    num_drafts: int = 1
    held: Any = ()

    def propose(self, model, inputs, pools, tables):
        return RepeatProposer.propose(self, model, inputs, pools, tables)


@pytest.mark.soak
def test_a_flight_tells_its_class_and_brings_none_in(tmp_path):
    config = {"method": "custom", "proposer": Unpicklable(held=threading.Lock())}
    with LLM(FIXTURES / "qwen3_5", speculative_config=config, **SMALL) as llm:
        llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=4))
        path = llm.save_flight(tmp_path / "flight")
    told = read(path).about["options"]["speculative_config"]
    assert json.dumps(told) and told["options"] == {"proposer": f"{__name__}:Unpicklable"}
    with pytest.raises(ValueError, match="with a proposer of jaxspec's own, and this one was"):
        replay(path)
