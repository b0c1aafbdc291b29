"""An LLM without a model, whose session gives each request in a row one token per step."""

import dataclasses

from clock import set_clock

from jaxspec.requests.request import Finish, Request


@dataclasses.dataclass(eq=False)
class SteppedSample:
    request: Request


class SteppedLLM:
    """Its steps take a second of `now`, and its tokens are numbers of steps.

    Args:
        rows: Requests that get a token in a step.
        end: Finish reason of its requests.
        most: Tokens after which a request ends at the latest.
    """

    def __init__(self, rows: int = 99, end: Finish = Finish.LENGTH, most: int = 99):
        self.now, self.steps = 100.0, 0
        self.num_there: list[int] = []  # requests in each step
        self.session = self
        self._rows, self._end, self._most = rows, end, most
        self._there: list[SteppedSample] = []

    def set_clock(self, monkeypatch, module) -> None:
        set_clock(monkeypatch, module, monotonic=lambda: self.now, sleep=self._sleep)

    def prepare(self, prompts, params):
        pairs = zip(prompts, params, strict=True)
        return [[SteppedSample(Request(tuple(p["prompt_token_ids"]), x, 0))] for p, x in pairs]

    def add(self, samples) -> None:
        self._there += samples

    @property
    def has_work(self) -> bool:
        return bool(self._there)

    def step(self) -> list[SteppedSample]:
        self.num_there.append(len(self._there))
        self.steps += 1
        self.now += 1
        moved = self._there[: self._rows]
        for sample in moved:
            request = sample.request
            request.tokens.append(20_000 + self.steps)
            request.metrics.record_tokens(1, self.now)
            if request.num_output == min(request.params.max_tokens, self._most):
                request.finish = self._end
        self._there = [sample for sample in self._there if not sample.request.finish]
        return moved

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
