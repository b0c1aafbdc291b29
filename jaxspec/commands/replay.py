"""`python -m jaxspec replay FILE`: run a recorded flight again and report the first difference."""

import argparse
import dataclasses
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxspec import device
from jaxspec.api.loading import load_runner
from jaxspec.checks import shown
from jaxspec.flight import Flight, Step
from jaxspec.flight.about import (
    OWN,
    check_plugin,
    check_processors,
    check_speculation,
    check_weights,
    digest_of,
    is_here,
)
from jaxspec.flight.blocks import ReplayedBlocks
from jaxspec.flight.file import read
from jaxspec.options.engine_options import EngineConfig
from jaxspec.plan.plan import (
    AfterForwardPass,
    PlacesRows,
    Program,
    StepOutput,
    output_layout,
    plan_layout,
)
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.output import PendingOutput

_IN_FLIGHT = 2  # dispatches queued before the oldest is compared
# A replay records nothing and compiles only the programs of the flight.
_OPTIONS = {"flight_recorder": "off", "background_compilation": False}


@dataclasses.dataclass(frozen=True)
class Parting:
    """The first difference between a flight and its replay."""

    step: int  # index of the dispatch
    row: int
    request: int  # index, in the order in which requests got a row
    field: str  # name of a field of `StepOutput`
    recorded: list[int]  # values of the field in the dispatch's steps
    replayed: list[int]


@dataclasses.dataclass(frozen=True)
class TokenParting:
    """First output token of a request that differs."""

    request: int
    index: int  # in the output tokens since the request got a row
    recorded: int
    replayed: int


@dataclasses.dataclass(frozen=True)
class Replay:
    flight: Flight
    num_compared: int  # dispatches whose outputs were compared
    num_requests: int
    parting: Parting | None
    token_partings: list[TokenParting]
    failure: str | None  # error that ended the replay, if any

    @property
    def is_equal(self) -> bool:
        """True if the replay completed and all compared outputs are bitwise equal."""
        return self.parting is None and self.failure is None


def replay(
    path: str | Path,
    model: str | Path | None = None,
    revision: str | None = None,
    model_plugin: str | None = None,
) -> Replay:
    """Run the steps of a flight again on the default device and compare their outputs.

    Args:
        path: file written by a flight recorder.
        model: folder or hub id of the checkpoint; None means the recorded folder.
        revision: revision of the hub id.
        model_plugin: module that registers the model's architecture; that of the file is ignored.

    Raises:
        FileNotFoundError: the flight or the model does not exist.
        ValueError: the file is no flight, the checkpoint differs, this version plans other shapes,
            or a step reads a block that no earlier step of the flight wrote.
    """
    flight = read(Path(path))
    try:
        runner = _runner(flight, model, revision, model_plugin)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"The engine of a flight must fit this device, and it does not: {error!s:.300}. Replay "
            "it on a device like the one it was recorded on."
        ) from error
    comparison, pieces = _Comparison(flight), ReplayedBlocks(flight.steps, flight.shapes)
    waiting: deque[tuple[Step, PendingOutput]] = deque()
    failure = None
    try:
        for program in dict.fromkeys(step.program for step in flight.steps):
            runner.warm_up(program)
        if flight.state is not None:
            runner.restore(flight.state)
        for step in flight.steps:
            waiting.append((step, runner.dispatch(pieces.plan(step))))
            if len(waiting) > _IN_FLIGHT:
                comparison.add(*_collect(waiting))
        while waiting:
            comparison.add(*_collect(waiting))
    except jax.errors.JaxRuntimeError as error:
        failure = f"{type(error).__name__}: {error}"
    return Replay(
        flight=flight,
        num_compared=comparison.num_compared,
        num_requests=comparison.num_requests,
        parting=comparison.parting,
        token_partings=comparison.token_partings(),
        failure=failure,
    )


def _collect(waiting: deque[tuple[Step, PendingOutput]]) -> tuple[Step, StepOutput]:
    step, pending = waiting.popleft()
    return step, pending.result()


def _runner(
    flight: Flight, model: str | Path | None, revision: str | None, model_plugin: str | None
) -> ModelRunner:
    options = {name: each for name, each in flight.about["options"].items() if name not in OWN}
    named = options.pop("model")
    check_speculation(options.get("speculative_config"))
    check_processors(options.pop("logits_processors", None))
    check_weights(flight.about.get("weight_version"))
    recorded = options.pop("model_plugin", None)
    if model_plugin is None:
        check_plugin(recorded)
    options["model_plugin"] = model_plugin
    if model is not None:
        options["revision"] = revision  # ignore the flight's revision: the file is untrusted
    if model is None and named is not None and not is_here(named):
        raise ValueError(
            f"A flight must be replayed with a checkpoint that lies here, and it was recorded with "
            f"{shown(named)}. Name the folder, or the hub id, with --model."
        )
    try:
        config = EngineConfig.of(model or named, options | _OPTIONS)
    except TypeError as error:
        raise ValueError(
            f"A flight must have the options of this version, and: {error} Replay it with the "
            f"version that wrote it, {flight.about['versions'].get('jaxspec')}."
        ) from error
    loaded = load_runner(config, progress=False)
    if (digest := digest_of(loaded.folder)) != flight.about["checkpoint"]:
        raise ValueError(
            f"A flight must be replayed with the checkpoint that it was recorded with, "
            f"{flight.about['checkpoint'][:12]}, and {loaded.folder} is another one, "
            f"{digest[:12]}. Name the folder with --model."
        )
    here, there = dataclasses.asdict(loaded.runner.shapes), dataclasses.asdict(flight.shapes)
    here |= {"vocab_size": loaded.model.vocab_size}
    there |= {"vocab_size": flight.about["vocab_size"]}
    if wrong := [name for name in here if here[name] != there[name]]:
        raise ValueError(
            f"This version plans other shapes than the flight has, in {', '.join(wrong)}. Replay "
            "it with the version that wrote it."
        )
    return loaded.runner


class _Comparison:
    """Compares outputs step by step, following each request from row to row."""

    def __init__(self, flight: Flight):
        self._shapes, self._is_comparable = flight.shapes, not flight.hashed
        # Request index by row.
        self._requests: list[int | None] = [None] * flight.shapes.max_num_seqs
        self._tokens: list[tuple[list[int], list[int]]] = []  # by request: recorded, replayed
        self._step = -1
        self.num_compared, self.num_requests = 0, 0
        self.parting: Parting | None = None

    def add(self, step: Step, output: StepOutput) -> None:
        self._step += 1
        if not isinstance(step.program, PlacesRows):
            return
        fields = plan_layout(step.program, self._shapes).unpack(step.packed)
        if not isinstance(step.program, AfterForwardPass):  # the first half has placed its rows
            self._follow(fields)
        if step.output is None or not self._is_comparable:
            return
        self.num_compared += 1
        recorded = StepOutput.unpack(step.output, output_layout(self._shapes.num_drafts))
        num_decode = int(fields["num_decode"])
        first = step.program.decode_rows if isinstance(step.program, Program) else 0
        chunks = first + np.arange(np.count_nonzero(fields["prefill_lens"]))
        rows = [*range(num_decode), *range(num_decode, num_decode + len(chunks))]
        places = [*range(num_decode), *chunks.tolist()]  # index of each row in the output
        for row, place in zip(rows, places, strict=True):
            self._compare(row, place, recorded, output)

    def _follow(self, fields: dict[str, np.ndarray]) -> None:
        before = self._requests
        for row in fields["prev_positions"]:
            if row >= 0 and before[row] is None:
                before[row] = self._next_request()  # it ran before the state was copied
        self._requests = [before[i] if i >= 0 else None for i in fields["prev_positions"]]
        for row in fields["new_row_index"]:
            if row >= 0:
                self._requests[row] = self._next_request()

    def _next_request(self) -> int:
        self._tokens.append(([], []))
        self.num_requests += 1
        return self.num_requests - 1

    def _compare(self, row: int, place: int, recorded: StepOutput, replayed: StepOutput) -> None:
        request = self._requests[row]
        if request is None:
            raise ValueError(f"A plan of the flight gives tokens to row {row}, which is empty.")
        for output, tokens in zip((recorded, replayed), self._tokens[request], strict=True):
            given = output.tokens[:, place].ravel()
            tokens += given[given >= 0].tolist()
        for name in output_layout(self._shapes.num_drafts).fields:
            values = getattr(recorded, name)
            if self.parting is None and not np.array_equal(
                values[:, place], getattr(replayed, name)[:, place]
            ):
                pair = (
                    output[:, place].ravel().tolist()
                    for output in (values, getattr(replayed, name))
                )
                self.parting = Parting(self._step, row, request, name, *pair)

    def token_partings(self) -> list[TokenParting]:
        found = []
        for request, pair in enumerate(self._tokens):
            for index, (recorded, replayed) in enumerate(zip(*pair, strict=False)):
                if recorded != replayed:
                    found.append(TokenParting(request, index, recorded, replayed))
                    break
        return found


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 if the replay is equal, else 1. Raises as `replay`."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec replay",
        description="Run the steps of a flight again, and report the first difference.",
    )
    parser.add_argument("file", type=Path, help="file of a flight recorder")
    parser.add_argument(
        "--model", help="the checkpoint's folder, or its hub id (default: the recorded path)"
    )
    parser.add_argument("--revision", help="revision of the hub id (default: main)")
    parser.add_argument("--model-plugin", help="module that registers the model's architecture")
    args = parser.parse_args(argv)
    result = replay(args.file, args.model, args.revision, args.model_plugin)
    print(report(result))
    return 0 if result.is_equal else 1


def report(result: Replay) -> str:
    """Format the result of a replay as a few lines of text."""
    flight, about = result.flight, result.flight.about
    start = {
        "empty": "an empty engine",
        "idle": "a moment in which no request ran (what lay in its pools is not in the file)",
        "copy": "a copy of its state",
    }[flight.start]
    lines = [
        f"{len(flight.steps)} dispatches of {result.num_requests} requests from {start}, recorded "
        f"on {_bare(about['device'])} with jax {_bare(about['versions']['jax'])}, ran again on "
        f"{device.default_device().device_kind} with jax {jax.__version__}."
    ]
    if flight.failure:
        lines.append(f"The recorded engine failed after them with {_bare(flight.failure, 1000)}")
    if result.failure:
        lines.append(f"The replay failed: {result.failure}")
    elif flight.failure:
        lines.append("The replay did not fail.")
    if flight.hashed:
        lines.append(
            "Their token ids were left out, and made-up ones ran in their place. So programs, "
            "rows, pages and slots were repeated; tokens, drafts and states can't be."
        )
    elif not result.num_compared and result.failure is None:
        lines.append("The flight has no outputs, so nothing could be compared.")
    elif result.parting is None:
        lines.append(f"All {result.num_compared} outputs are equal, bit for bit.")
    else:
        lines += _differences(result, result.parting)
    return "\n".join(lines)


def _bare(text: str, length: int = 80) -> str:
    """Return text of a file, shortened and with control characters escaped."""
    return shown(text, length)[1:-1]


def _differences(result: Replay, parting: Parting) -> list[str]:
    lines = [
        f"They part first at dispatch {parting.step}, row {parting.row}, which is request "
        f"{parting.request}: {parting.field} was {parting.recorded} and is {parting.replayed}."
    ]
    for found in result.token_partings[:10]:
        lines.append(
            f"Request {found.request} has token {found.replayed} in place of {found.recorded} at "
            f"output token {found.index}."
        )
    equal = result.num_requests - len(result.token_partings)
    lines.append(
        f"{equal} of {result.num_requests} requests have equal tokens as far as both runs went. "
        "Another device or version rounds otherwise, so near ties may fall the other way."
    )
    return lines
