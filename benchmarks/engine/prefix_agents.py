"""Agents that take turns: conversations that grow, and share what they begin with.

Every agent's first prompt is one system prompt, which all have, and a text of its own. A later
prompt is the whole conversation, the last output included, and what a tool has said since. So most
of a prompt is what an engine has seen before. The agents' requests are sent turn by turn: so many
are served at a time, and where one ends the next one comes whose agent has its last answer.

A request's time begins before its prompt is put together and checked, which takes some milliseconds
for 65,536 ids, and as long where nothing is kept.
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import Figures, complete, spread
from benchmarks.engine.prefix_engines import Results, Texts, engine
from benchmarks.measure.model_shapes import SHAPES
from jaxspec import LLM, RequestMetrics
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Finish


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many agents there are, and how many tokens their texts have."""

    agents: int
    turns: int
    system: int  # of the prompt that all begin with
    first: int  # of an agent's own text behind it
    more: int  # of what a tool says between two turns
    output: int

    @property
    def longest(self) -> int:
        """The most of a prompt and its output."""
        return self.prompt(self.turns - 1) + self.output

    def prompt(self, turn: int) -> int:
        """Those of a turn's prompt."""
        return self.system + self.first + turn * (self.output + self.more)


class Turn(NamedTuple):
    """A request: which one of which agent."""

    agent: int
    turn: int


class Agents:
    """What each agent says, and has heard so far."""

    def __init__(self, sizes: Sizes, vocab: int):
        """Draw all texts, the same each time."""
        self.sizes = sizes
        self._draw = np.random.default_rng(0)
        self._vocab = vocab
        system = self._text(sizes.system)
        own = [sizes.first] + [sizes.more] * (sizes.turns - 1)
        self._said = [[self._text(each) for each in own] for _ in range(sizes.agents)]
        for texts in self._said:
            texts[0] = system + texts[0]
        self._heard: dict[Turn, list[int]] = {}

    @property
    def turns(self) -> list[Turn]:
        """All requests in the order in which they are sent, if no answer is late."""
        order = itertools.product(range(self.sizes.turns), range(self.sizes.agents))
        return [Turn(agent, turn) for turn, agent in order]

    def sample(self, count: int) -> list[Turn]:
        """So many of all requests, from all turns alike."""
        turns = self.turns
        return [turns[len(turns) * i // count] for i in range(count)]

    def is_ready(self, turn: Turn) -> bool:
        """Whether the agent has the answer that its request goes on from."""
        return turn.turn == 0 or self._before(turn) in self._heard

    def prompt(self, turn: Turn) -> list[int]:
        """The conversation up to a turn that is ready."""
        first, *later = self._said[turn.agent][: turn.turn + 1]
        prompt = list(first)
        for number, text in enumerate(later):
            prompt += self._heard[Turn(turn.agent, number)] + text
        return prompt

    def hear(self, turn: Turn, output: list[int]) -> None:
        """A request got its answer."""
        self._heard[turn] = output

    def forget(self) -> None:
        """All agents begin anew."""
        self._heard.clear()

    def make_up_answers(self) -> None:
        """Random ids in their place, so that every request is ready."""
        self._heard = {turn: self._text(self.sizes.output) for turn in self.turns}

    def shared(self, turn: Turn) -> int:
        """Tokens of a prompt that requests sent earlier began with."""
        if turn.turn:
            return self.sizes.prompt(turn.turn - 1) + self.sizes.output
        return self.sizes.system if turn.agent else 0

    def _before(self, turn: Turn) -> Turn:
        return Turn(turn.agent, turn.turn - 1)

    def _text(self, length: int) -> list[int]:
        return self._draw.integers(0, self._vocab, length).tolist()


@dataclasses.dataclass(frozen=True)
class Served:
    """One run of requests."""

    begin: float
    samples: dict[Turn, Sample]  # in the order in which they were sent

    @property
    def metrics(self) -> list[RequestMetrics]:
        return [sample.request.metrics for sample in self.samples.values()]

    @property
    def seconds(self) -> float:
        return RequestMetrics.total(self.metrics).last_token_time - self.begin


def serve(llm: LLM, agents: Agents, turns: Sequence[Turn], at_once: int) -> Served:
    """Send the requests, at most so many at a time, and step until all have ended.

    Raises:
        RuntimeError: a request ended early.
    """
    waiting, running, sent = list(turns), dict[Sample, Turn](), dict[Turn, Sample]()
    begin = time.monotonic()
    while waiting or running:
        ready = (turn for turn in waiting if agents.is_ready(turn))
        while len(running) < at_once and (turn := next(ready, None)):
            waiting = [each for each in waiting if each != turn]
            sent[turn] = sample = _send(llm, agents, turn)
            running[sample] = turn
        for sample in llm.session.step():
            if sample.request.finish:
                agents.hear(running.pop(sample), sample.request.output)
    if any(sample.request.finish != Finish.LENGTH for sample in sent.values()):
        raise RuntimeError(f"A row ended early: {[s.request.finish for s in sent.values()]}.")
    return Served(begin, sent)


def _send(llm: LLM, agents: Agents, turn: Turn) -> Sample:
    """Queue a request, whose time counts from before its prompt is read."""
    now = time.monotonic()
    prompt = {"prompt_token_ids": agents.prompt(turn)}
    ((sample,),) = llm.prepare([prompt], [dummy_llm.greedy(agents.sizes.output)])
    sample.request.metrics.arrival_time = now
    llm.session.add([sample])
    return sample


def speed(served: Served) -> Figures:
    """Tokens a second, and milliseconds to the first token."""
    prompts = sum(len(sample.request.prompt) for sample in served.samples.values())
    output = sum(metrics.num_tokens for metrics in served.metrics)
    first = [1000 * metrics.ttft for metrics in served.metrics]
    return {
        "requests": len(first),
        "prompt_tokens": prompts,
        "seconds": served.seconds,
        "output_tokens_per_second": output / served.seconds,
        "total_tokens_per_second": (prompts + output) / served.seconds,
        "tokens_per_verify": RequestMetrics.total(served.metrics).mean_acceptance_length,
        "ttft_ms": statistics.median(first),
        "ttft_ms_p90": float(np.percentile(first, 90)),
    }


def found(served: Served, agents: Agents) -> Figures:
    """How much of the prompts others had begun with, and how much of that was not computed."""
    shared = sum(agents.shared(turn) for turn in served.samples)
    cached = sum(sample.request.num_cached_tokens for sample in served.samples.values())
    return {"shared_tokens": shared, "cached_tokens": cached, "of_shared": cached / shared}


def agents(args: argparse.Namespace) -> Results:
    """All requests with kept prefixes, and some of them without."""
    names = (field.name for field in dataclasses.fields(Sizes))
    sizes = Sizes(**{name: getattr(args, name) for name in names})
    everyone = Agents(sizes, SHAPES[args.shape].vocab)
    about = dataclasses.asdict(sizes) | {"at_once": args.at_once}
    room = {"max_num_seqs": args.at_once, "max_model_len": -(-sizes.longest // 1024) * 1024}
    with engine(args, **room, enable_prefix_caching=True) as llm:
        yield "with", about, repeated(llm, args, everyone, everyone.turns)
    some = everyone.sample(args.cold_requests or len(everyone.turns))
    with engine(args, **room, enable_prefix_caching=False) as llm:
        yield "without", about, repeated(llm, args, everyone, some)


def repeated(
    llm: LLM, args: argparse.Namespace, everyone: Agents, turns: Sequence[Turn]
) -> Figures:
    """The repeat in the middle, with the spread of its tokens a second."""
    keeps = "prefix_cache" in llm.metrics()
    complete(llm, Texts(args).prompts(1, 64), 8)  # finds all warm
    runs = []
    for _ in range(args.repeats):
        if keeps:
            everyone.forget()
            llm.reset_prefix_cache()
        else:
            everyone.make_up_answers()
        run = serve(llm, everyone, turns, args.at_once)
        runs.append(speed(run) | (found(run, everyone) if keeps else {}))
    runs.sort(key=lambda figures: figures["seconds"])
    speeds = [figures["output_tokens_per_second"] for figures in runs]
    figures = runs[len(runs) // 2] | spread("output_tokens_per_second", speeds)
    told = llm.metrics()
    figures |= {name: told[name] for name in ("num_preemptions", "prefix_cache") if name in told}
    sizes = {"num_pages": llm.shapes.num_pages, "num_checkpoints": llm.shapes.num_checkpoints}
    return figures | sizes
