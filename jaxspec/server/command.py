"""`python -m jaxspec serve MODEL`: command line of the HTTP server."""

import argparse
import asyncio
import dataclasses
import functools
import signal
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.follow import follow
from jaxspec.options import engine_options as engine
from jaxspec.options.arguments import CommandParser, add_speculation, speculation_of
from jaxspec.server.http.http_server import event_loop, set_up_log
from jaxspec.server.http.request_ids import LOG
from jaxspec.server.options import OPTIONS, ServerOptions
from jaxspec.server.run import serve

_EPILOG = """\
example:
  python -m jaxspec serve Qwen/Qwen3.5-0.8B --max-num-seqs 64
  curl localhost:8000/v1/completions -H "content-type: application/json" \\
       -d '{"prompt": "def fibonacci(n):", "max_tokens": 32}'

exit status: 0 ended by a signal; 1 the engine failed; 2 invalid arguments or input
"""
_OF_ENGINE = {
    name: field
    for name, field in engine.OPTIONS.items()
    if name not in ("model", "speculative_config", "show_progress", *OPTIONS)
}
_OF_ASYNC_LLM = (
    "reasoning_parser",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "queue_timeout",
    "stream_interval",
)


def main(words: Sequence[str]) -> int:
    args = parser().parse_args(words)
    options, llm_options = options_of(args)
    if llm_options.get("node_rank"):
        return _follow(args.model, _engine_options(args))
    with asyncio.Runner(loop_factory=event_loop) as runner:
        make_llm = functools.partial(AsyncLLM, args.model, **llm_options)
        return runner.run(serve(make_llm, options))


def options_of(args: argparse.Namespace) -> tuple[ServerOptions, dict[str, Any]]:
    """Return the options of the server, and those of its `AsyncLLM` without the model.

    Raises:
        ValueError: an option of the server or of speculation is invalid.
    """
    options = ServerOptions(**_given(args, OPTIONS))
    engine_options = _engine_options(args)
    config = engine.EngineConfig.of(args.model, engine_options)
    if config.nnodes > 1:  # the other nodes have ended, too
        options = dataclasses.replace(options, exit_on_failure=True)
    llm_options: dict[str, Any] = {
        **engine_options,
        **{name: getattr(options, name) for name in _OF_ASYNC_LLM},
    }
    return options, llm_options


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {**_given(args, _OF_ENGINE), "speculative_config": speculation_of(args)}


def _follow(model: str | None, engine_options: dict[str, Any]) -> int:
    """Run a node without an HTTP server until node 0 ends the group.

    The first SIGTERM is ignored: node 0, which gets one as well, first finishes its requests.
    """

    def wait(*_: object) -> None:
        LOG.info("This node ends with node 0. A second signal ends it at once.")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    set_up_log()
    signal.signal(signal.SIGTERM, wait)
    follow(model, **engine_options)
    return 0


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="python -m jaxspec serve",
        usage="python -m jaxspec serve [options] [MODEL]",
        description="Serve a model over HTTP with OpenAI's and Anthropic's APIs\n"
        "(docs/serving.md). The port opens once the model is loaded and compiled.",
        epilog=_EPILOG,
    )
    made.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder with config.json and safetensors, a GGUF file, or a Hugging Face hub id "
        "(default: the embedded model)",
    )
    group = made.add_argument_group("the server")
    for field in OPTIONS.values():
        _add(group, field)
    group = made.add_argument_group("the engine (docs/options.md)")
    for field in _OF_ENGINE.values():
        _add(group, field)
    add_speculation(group)
    return made


def _given(args: argparse.Namespace, fields: dict[str, Any]) -> dict[str, Any]:
    found = {name: getattr(args, name) for name in fields}
    return {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}


def _add(group: Any, field: dataclasses.Field) -> None:
    """Add an option with the type, help and default of its dataclass field."""
    default, kinds = field.default, set(kinds_of(field.type))
    shown = field.metadata["none"] if default in (None, ()) else str(default)
    how: dict[str, Any] = {"metavar": _METAVARS.get(field.name, "VALUE"), "type": str}
    if bool in kinds:
        how = {"action": argparse.BooleanOptionalAction}
    elif tuple in kinds:
        how, shown = {"metavar": "TEXT", "action": "append"}, f"{shown or 'none'}; may be repeated"
    elif Sequence in kinds or typing.get_origin(field.type) is Sequence:
        how = {"metavar": "N,N,...", "type": _sizes}
    elif int in kinds or float in kinds:
        how = {"metavar": "N", "type": _number}
    how |= _AS_IN_VLLM.get(field.name, {})
    help = f"{field.metadata['help']} (default: {shown})".replace("%", "%%")
    name = f"--{field.name.replace('_', '-')}"
    names = [name, *_SHORT.get(field.name, ())]
    how["default"] = default or [] if tuple in kinds else default
    group.add_argument(*names, help=help, **how)


_SHORT = {"tensor_parallel_size": ["-tp"], "data_parallel_size": ["-dp"]}  # as in vLLM
_AS_IN_VLLM = {"logits_processors": {"metavar": "PLACE", "action": "extend", "nargs": "+"}}
_METAVARS = {"host": "ADDRESS", "api_key_file": "FILE"}


def kinds_of(kind: Any) -> Iterator[Any]:
    """Yield the types that `kind` is a union of, without type arguments."""
    origin = typing.get_origin(kind)
    if origin in (Sequence, tuple):
        yield origin
    elif origin is None:
        yield kind
    else:
        for part in typing.get_args(kind):
            yield from kinds_of(part)


def _number(word: str) -> int | float | str:
    """Parse a number; words such as "auto" are returned for the option to validate."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _sizes(word: str) -> list[int]:
    return [int(part) for part in word.split(",")]
