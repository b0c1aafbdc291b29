"""Agents: conversations that grow and share a system prompt.

An agent's first prompt is the system prompt and a text of its own. A later prompt is the whole
conversation with the last output, and the output of a tool. So most of a prompt is a prefix that
the engine has computed before. Requests are sent turn by turn, a number of them at a time; where
one ends, the next one is sent whose agent has its last output.

A request's time includes the preparation of its prompt, some milliseconds for 65,536 ids.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.engine.dummy_llm import Figures, complete, spread
from benchmarks.engine.load_generator import Event, LLMClient, Request, Served
from benchmarks.engine.prefix_parts import Results, Texts, engine
from benchmarks.measure.model_shapes import SHAPES
from jaxspec import LLM, RequestMetrics


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Number of agents and of turns, and tokens of their texts."""

    agents: int
    turns: int
    system: int  # of the prompt that all begin with
    first: int  # of an agent's own text behind it
    more: int  # of what a tool says between two turns
    output: int

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its output."""
        return self.prompt(self.turns - 1) + self.output

    def prompt(self, turn: int) -> int:
        """Return the prompt tokens of a turn."""
        return self.system + self.first + turn * (self.output + self.more)


class Turn(NamedTuple):
    """A request, by agent and number."""

    agent: int
    turn: int


class Agents:
    """The texts of each agent, and the outputs it has received."""

    def __init__(self, sizes: Sizes, vocab: int):
        """Draw all texts with a fixed seed."""
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
        """All requests, turn by turn."""
        order = itertools.product(range(self.sizes.turns), range(self.sizes.agents))
        return [Turn(agent, turn) for turn, agent in order]

    def sample(self, count: int) -> list[Turn]:
        """Return `count` requests, evenly from all turns."""
        turns = self.turns
        return [turns[len(turns) * i // count] for i in range(count)]

    def is_ready(self, turn: Turn) -> bool:
        """Return whether the agent has the output before its turn."""
        return turn.turn == 0 or self._before(turn) in self._heard

    def prompt(self, turn: Turn) -> list[int]:
        """Return the conversation up to a turn that is ready."""
        first, *later = self._said[turn.agent][: turn.turn + 1]
        prompt = list(first)
        for number, text in enumerate(later):
            prompt += self._heard[Turn(turn.agent, number)] + text
        return prompt

    def hear(self, turn: Turn, output: list[int]) -> None:
        """Record the output of a request."""
        self._heard[turn] = output

    def forget(self) -> None:
        self._heard.clear()

    def make_up_answers(self) -> None:
        """Replace all outputs by random ids, so that every request is ready."""
        self._heard = {turn: self._text(self.sizes.output) for turn in self.turns}

    def shared(self, turn: Turn) -> int:
        """Return how many tokens of a prompt are a prefix of an earlier request and its output."""
        if turn.turn:
            return self.sizes.prompt(turn.turn - 1) + self.sizes.output
        return self.sizes.system if turn.agent else 0

    def _before(self, turn: Turn) -> Turn:
        return Turn(turn.agent, turn.turn - 1)

    def _text(self, length: int) -> list[int]:
        return self._draw.integers(0, self._vocab, length).tolist()


class AgentsClient(LLMClient):
    """An `LLM` whose requests are the agents' turns; an index is a position in `turns`."""

    def __init__(self, llm: LLM, agents: Agents, turns: Sequence[Turn]):
        super().__init__(llm)
        self._agents, self._turns = agents, turns

    def is_ready(self, index: int) -> bool:
        return self._agents.is_ready(self._turns[index])

    def send(self, index: int, due: float) -> None:
        """Prepare a request, which is part of its time, and send it."""
        prompt = self._agents.prompt(self._turns[index])
        self.prepare([index], [Request(prompt, self._agents.sizes.output)])
        super().send(index, due)

    def receive(self, until: float | None) -> list[Event]:
        events = super().receive(until)
        for event in events:
            if event.tokens is not None:
                output = self.samples[event.index].request.output
                self._agents.hear(self._turns[event.index], output)
        return events


def speed(served: Served) -> Figures:
    """Return tokens per second, and milliseconds to the first token."""
    prompts = sum(len(sample.request.prompt) for sample in served.samples)
    first = [1000 * seconds for seconds in served.ttft]
    return {
        "requests": len(first),
        "prompt_tokens": prompts,
        "seconds": served.seconds,
        "output_tokens_per_second": served.tokens / served.seconds,
        "total_tokens_per_second": (prompts + served.tokens) / served.seconds,
        "tokens_per_verify": RequestMetrics.total(served.metrics).mean_acceptance_length,
        "ttft_ms": statistics.median(first),
        "ttft_ms_p90": float(np.percentile(first, 90)),
    }


def found(served: Served, agents: Agents, turns: Sequence[Turn]) -> Figures:
    """Return the tokens that prompts share with earlier ones, and those found in the cache."""
    shared = sum(map(agents.shared, turns))
    cached = sum(sample.request.num_cached_tokens for sample in served.samples)
    return {"shared_tokens": shared, "cached_tokens": cached, "of_shared": cached / shared}


def agents(args: argparse.Namespace) -> Results:
    """Serve all requests with a prefix cache, and some of them without."""
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
    """Return the median repeat, with the spread of its tokens per second."""
    keeps = "prefix_cache" in llm.metrics()
    complete(llm, Texts(args).prompts(1, 64), 8)  # finds all warm
    runs = []
    for _ in range(args.repeats):
        if keeps:
            everyone.forget()
            llm.reset_prefix_cache()
        else:
            everyone.make_up_answers()
        run = AgentsClient(llm, everyone, turns).run(len(turns), at_once=args.at_once)
        runs.append(speed(run) | (found(run, everyone, turns) if keeps else {}))
    runs.sort(key=lambda figures: figures["seconds"])
    speeds = [figures["output_tokens_per_second"] for figures in runs]
    figures = runs[len(runs) // 2] | spread("output_tokens_per_second", speeds)
    told = llm.metrics()
    figures |= {name: told[name] for name in ("num_preemptions", "prefix_cache") if name in told}
    sizes = {"num_pages": llm.shapes.num_pages, "num_checkpoints": llm.shapes.num_checkpoints}
    return figures | sizes
