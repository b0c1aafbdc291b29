"""Engines of the law tests with the calls by which requests travel, held against the oracle."""

from types import SimpleNamespace

from harness import HYBRID, MAX_LEN, Harness, expected

from jaxspec.api.inputs import InputProcessor
from jaxspec.api.logits_processors import LogitsProcessors
from jaxspec.api.request_transfer import TransferEngine
from jaxspec.engine.session import Session
from jaxspec.requests.request import Finish
from jaxspec.scheduler.ready_programs import StepNeeds
from jaxspec.transfer import RequestState


class Traveller(TransferEngine):
    """A `TransferEngine` around a `Harness`."""

    def __init__(self, fixture=HYBRID, **options):
        options = {"num_pages": 120, "prefixes": "all"} | options
        options.setdefault("num_checkpoints", 0 if options["prefixes"] == "pages" else 12)
        self.harness = Harness(fixture, **options)
        self.fixture, self._runner = fixture, self.harness.runner
        self.vocab_size = self.harness.vocab_size
        self.session, self.limits = Session(self.harness.engine), self.harness.limits
        self.prefixes = self.harness.scheduler.prefixes
        proposer = self.harness.proposer
        self._request_key = proposer.request_key if proposer else lambda prompt, seed: 0
        self.inputs = InputProcessor(
            None, vocab_size=self.harness.vocab_size, max_model_len=MAX_LEN, eos_ids=(), seed=0
        )
        self._compiler, self._processors = SimpleNamespace(ensure=self._can_run), LogitsProcessors()

    def _can_run(self, feature_sets):
        needs = (StepNeeds(1, 0, each, num_drafts=0) for each in feature_sets)
        assert all(map(self.harness.scheduler.programs.can_run, needs))

    def sample(self, prompt, params, name="x"):
        ((sample,),) = self.prepare([list(prompt)], [params], [name])
        return sample

    def stream(self, prompt, params, name="x"):
        """The sample, and its pieces as they come."""
        sample = self.sample(prompt, params, name)
        return sample.request, self.session.stream(sample)

    def run(self, prompt, params):
        """A request that this engine computes alone and cold."""
        self.prefixes.clear()
        request, pieces = self.stream(prompt, params)
        assert list(pieces)
        self.prefixes.clear()
        return request

    def finish(self, state):
        """Import a request and run it to its end."""
        return told(self.import_request(state))

    def check(self, state, tokens):
        """All of a request's tokens are those that the oracle says; the ties met."""
        want = expected(self.fixture, state.prompt_token_ids, state.params, state.seed)
        return want.check([*state.token_ids, *tokens], f"{self.fixture} {state.request_id}")


def told(pieces):
    """What the pieces of one sample say together."""
    pieces = list(pieces)
    return SimpleNamespace(
        tokens=[token for piece in pieces for token in piece.token_ids],
        draft_positions=[place for piece in pieces for place in piece.draft_positions],
        text="".join(piece.text for piece in pieces),
        finish=pieces[-1].finish_reason if pieces else None,
        metrics=pieces[-1].metrics if pieces else None,
        logprobs=[each for piece in pieces for each in piece.logprobs or ()],
    )


def by_wire(state):
    """The state as another process would read it."""
    return RequestState.from_bytes(state.to_bytes())


def all_is_free(traveller):
    """Nothing runs, and no page, slot or checkpoint is lost."""
    scheduler, shapes = traveller.harness.scheduler, traveller.harness.buckets
    assert not scheduler.has_work and not traveller.session._samples
    assert scheduler.pages.num_free == shapes.num_pages - 1
    traveller.prefixes.clear()
    assert sorted(scheduler.pages._free) == list(range(1, shapes.num_pages))
    free_slots = traveller.prefixes.store.free_slots
    assert sorted(free_slots) == list(range(1, 1 + shapes.num_checkpoints))
    assert len(scheduler._free_slots) == shapes.max_num_seqs


def is_abort(request):
    return request.finish is Finish.ABORT
