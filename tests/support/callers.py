"""Callers of a session: what they ask for, what they get, and what they must get."""

import dataclasses
import sys

from fake_device import expected_output

from jaxspec.requests.outputs import Sample, TextDelta
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.requests.stop_strings import StopStrings

# Prompts by number; some begin others.
PROMPTS = [tuple((3 * i + 1) % 50 for i in range(length)) for length in (1, 2, 5, 9, 14)]


class Letters:
    """A text stream: one letter a token, but some letters come with a later token or the end."""

    def __init__(self):
        self._held = ""

    def push(self, ids):
        text = ""
        for token in ids:
            self._held += "abcdefg"[token % 7]
            if token % 5:
                text, self._held = text + self._held, ""
        return text

    def flush(self):
        text, self._held = self._held, ""
        return text


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a caller asks for: the same again gives the same again."""

    prompt: int
    max_tokens: int
    n: int = 1
    seed: int = 1
    min_tokens: int = 0
    # The first sample meets it with this token: a stop id, or a stop string of so many letters.
    ends_at: int | None = None
    letters: int = 0

    def requests(self, first_key: int) -> list[Request]:
        """Samples of one prompt, known to the device by keys from `first_key` on."""
        params = SamplingParams(max_tokens=self.max_tokens, min_tokens=self.min_tokens)
        stop_ids, stops = (), ()
        if self.ends_at is not None:
            alone = Request(PROMPTS[self.prompt], params, self.seed)
            tokens, _ = expected_output(alone)
            end = min(self.ends_at, len(tokens) - 1) + 1
            if self.letters:
                text = Letters().push(tokens)[:end]
                stops = (text[-self.letters :],) if text else ()
            else:
                stop_ids = (tokens[end - 1],)
        params = dataclasses.replace(params, stop=stops)
        group: list[Request] = []
        for i in range(self.n):
            parent = group[0] if group else None
            key, seed = first_key + i, self.seed + 10 * i
            group.append(Request(PROMPTS[self.prompt], params, seed, stop_ids, key, parent))
        return group


def expected(request: Request) -> tuple[list[int], Finish, str]:
    """What one token at a time gives: tokens, why they end, and their text.

    It ends before a stop string, which counts behind `min_tokens`, and before a stop id.
    """
    tokens, finish = expected_output(request)
    shown = tokens[:-1] if finish is Finish.STOP else tokens
    stream, text = Letters(), ""
    pieces = [stream.push([token]) for token in shown] + [stream.flush()]
    counts = [*range(1, len(shown) + 1), len(tokens)]
    for count, piece in zip(counts, pieces, strict=True):
        before, text = len(text), text + piece
        for stop in request.params.stop:
            start = text.find(stop, max(0, before + 1 - len(stop)))
            if start >= 0 and min(count, len(shown)) > request.params.min_tokens:
                return tokens[:count], Finish.STOP, text[:start]
    return tokens, finish, text


class Watched:
    """A sample, and what may become of it."""

    def __init__(self, request: Request, name: str):
        stops = request.params.stop
        self.sample = Sample(request, Letters(), StopStrings(stops) if stops else None)
        self.sample.request_id = name
        self.request = request
        self.may_abort = False
        self.may_be_out = True  # it may never have come in

    def check_end(self):
        """It got what it gets alone, or the beginning of that."""
        tokens, finish, text = expected(self.request)
        output, seen = self.request.output, self.sample.text
        if self.request.finish in (Finish.STOP, Finish.LENGTH):
            assert (output, self.request.finish, seen) == (tokens, finish, text)
        else:
            assert output == tokens[: len(output)] and text.startswith(seen)
        if self.request.finish == Finish.RUNNING:
            assert self.may_be_out and not output
        if self.request.finish == Finish.ABORT:
            assert self.may_abort, "aborted, but nobody asked for that"
        if self.request.finish != Finish.ERROR:  # its books may be those of half a step
            metrics = self.request.metrics
            assert metrics.num_tokens == len(output)
            assert metrics.num_accepted_tokens <= metrics.num_draft_tokens


class Caller:
    """Somebody in the middle of `Session.run` or `Session.stream`."""

    def __init__(self, watched: list[Watched], generator, *, is_stream=False):
        self.watched, self.generator, self.is_stream = watched, generator, is_stream
        self.deltas: list[TextDelta] = []
        self.has_begun = self.has_ended = False

    def advance(self):
        """To the next step of a run, or the next piece of a stream."""
        self.has_begun = True
        given = next(self.generator, None)
        self.has_ended = given is None
        if isinstance(given, TextDelta):
            self.deltas.append(given)

    def close(self):
        """Stop in the middle."""
        self.generator.close()

    def drop(self):
        """Let go of the generator, which then closes.

        Python can raise an error of that nowhere, so it is raised here.
        """
        lost, before = [], sys.unraisablehook
        sys.unraisablehook = lambda unraisable: lost.append(unraisable.exc_value)
        try:
            self.generator = None
        finally:
            sys.unraisablehook = before
        if lost:
            raise lost.pop()

    def check_deltas(self):
        """All that a stream gave, after its end."""
        if not self.deltas:
            return
        (watched,) = self.watched
        text = "".join(delta.text for delta in self.deltas)
        tokens = [token for delta in self.deltas for token in delta.token_ids]
        reasons = [delta.finish_reason for delta in self.deltas]
        assert not any(reasons[:-1])
        if reasons[-1]:
            assert (text, tokens) == (watched.sample.text, watched.request.output)
            assert reasons[-1] == watched.request.finish.reason
        else:
            assert watched.sample.text.startswith(text)
            assert watched.request.output[: len(tokens)] == tokens
