"""Laws of requests that travel between engines on different numbers of devices."""

import dataclasses

import numpy as np
import pytest
from harness import GREEDY, HYBRID, REPLAY, SAMPLED, SNAPSHOT
from pairwise import soak
from travellers import Traveller, by_wire

from jaxspec.cache import Recurrent, portable
from jaxspec.options.draft_methods import NgramOptions
from jaxspec.parallel import Group
from jaxspec.runner.portable_blocks import PortableBlocks

pytestmark = pytest.mark.devices
PROMPT = tuple(np.random.default_rng(5).integers(0, 256, 22).tolist())
PAIR, FOUR = Group(2), Group(4)
NGRAM = {"method": "ngram", "options": NgramOptions(1, 2)}
SEEDED = dataclasses.replace(SAMPLED, seed=11)
MTP = {"drafts": 3, "method": "mtp"}
PAIRS = {
    "one and two": (
        HYBRID,
        {"states": SNAPSHOT, **MTP},
        {"group": PAIR, "states": REPLAY, "page_size": 8, "max_in_flight": 0, **MTP},
    ),
    "two and four": (  # which have copies of two key-value heads and of two groups
        "nemotron_h",
        {"group": PAIR, "drafts": 2, "states": REPLAY, **NGRAM},
        {"group": FOUR, "drafts": 1, "states": SNAPSHOT, "page_size": 8, **NGRAM},
    ),
    "one and four": (
        "lfm2",
        {"drafts": 0},
        {"group": FOUR, "drafts": 0, "page_size": 8},
    ),
    "latents": (  # which all devices hold
        "deepseek_v3",
        {"prefixes": "pages", "drafts": 0},
        {"prefixes": "pages", "group": PAIR, "drafts": 2, "page_size": 8, **NGRAM},
    ),
}
EACH = pytest.mark.parametrize(
    "pair", ["one and two", "two and four", soak("one and four"), soak("latents")], indirect=True
)


@pytest.fixture(scope="module")
def made():
    return {}


@pytest.fixture
def pair(request, made):
    fixture, *both = PAIRS[request.param]
    if request.param not in made:
        features = {"feature_sets": (SAMPLED.features,)}
        made[request.param] = [Traveller(fixture, **features, **options) for options in both]
    return made[request.param]


def travels(sender, receiver, params, num_steps):
    """A request goes on elsewhere with all that was computed, and gets the tokens of the oracle."""
    for engine in (sender, receiver):
        engine.prefixes.clear()
    if num_steps:
        sender.session.add([sender.sample(PROMPT, params)])
        for _ in range(num_steps):
            sender.session.step()
        state = by_wire(sender.export_request("x"))
    else:
        state = by_wire(sender.prefill(PROMPT, params))
    hits = receiver.prefixes.counts.num_hits
    got = receiver.finish(state)
    wanted, shapes = state.num_computed, receiver.harness.buckets
    if not shapes.num_checkpoints:
        wanted -= wanted % shapes.page_size  # whole pages, without a state behind them
    assert receiver.prefixes.counts.num_hits - hits == wanted > 0
    receiver.check(state, got.tokens)
    return got


@EACH
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "sampled"])
def test_a_request_goes_on_with_the_same_tokens(pair, params):
    for way in (1, -1):
        for num_steps in (0, 3, 6):
            got = travels(*pair[::way], params, num_steps)
            if pair[0].fixture == HYBRID and not num_steps:  # both draft in the same way
                alone = pair[::way][1].run(PROMPT, params)
                assert got.draft_positions == alone.draft_positions


def _by_rank(whole, local, rank, devices):
    """Of few heads each device takes the one of its number, modulo theirs."""
    starts = np.cumsum((0, *whole))
    return np.concatenate(
        [
            np.arange(own) + start + rank % (size // own) * own
            for size, own, start in zip(whole, local, starts[:-1], strict=True)
        ]
    )


def _one_after_the_other(cut, parts):
    """Each device's part in its turn, with every copy."""
    return parts[0] if cut.axis is None else np.concatenate(parts, cut.axis)


BUGS = {
    "channels device by device": (Recurrent, "segments_of", lambda spec, part: None, "one and two"),
    "copies of a head stored twice": (portable.Cut, "joined", _one_after_the_other, "two and four"),
    "heads modulo their number": (portable, "held", _by_rank, "two and four"),
}


@pytest.mark.parametrize(
    ("name", "pair"),
    [(name, pair) for name, (*_, pair) in BUGS.items()],
    ids=list(BUGS),
    indirect=["pair"],
)
def test_a_planted_bug_is_seen(name, pair, monkeypatch):
    where, attribute, wrong, _ = BUGS[name]
    monkeypatch.setattr(where, attribute, wrong)
    for runner in (engine._runner for engine in pair):
        specs = runner._blueprint.whole_specs()
        planted = PortableBlocks(runner.blocks, specs, runner.group)
        monkeypatch.setitem(vars(runner), "portable", planted)
    with pytest.raises((AssertionError, ValueError)):
        for way in (1, -1):
            travels(*pair[::way], GREEDY, 6)
