"""Logits processors of an engine: import, checks, and the arguments of requests."""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.checks import integer, shown
from jaxspec.grammar import TokenFilter
from jaxspec.requests.logits_processors import (
    MAX_PARAMS,
    MAX_WINDOW,
    AnyProcessor,
    HostLogitsProcessor,
    LogitsProcessor,
    Prefix,
    ProcessorParams,
    check_entry,
    place_of,
    uses,
)
from jaxspec.requests.request import Request


class LogitsProcessors(NamedTuple):
    """Logits processors of an engine.

    Attributes:
        device: Those compiled into the steps, in the order of their application.
        host: Those called on the host.
    """

    device: tuple[LogitsProcessor, ...] = ()
    host: tuple[HostLogitsProcessor, ...] = ()

    @staticmethod
    def of(entries: Sequence[AnyProcessor] | None, vocab_size: int) -> "LogitsProcessors":
        """Return the processors of the option `logits_processors`.

        Args:
            entries: Instances, classes and places; None means none.
            vocab_size: Number of token ids of the model.

        Raises:
            ValueError: a place can't be imported, a processor has invalid `params` or an invalid
                `window`, two processors have a parameter of the same name, or one on the device
                can't be traced or does not return logits.
        """
        made = [_made(entry) for entry in entries or ()]
        owners = dict[str, str]()
        for processor in made:
            for name in _checked_params(processor):
                if name in owners:
                    raise ValueError(
                        "Logits processors of an engine must have different params, got "
                        f"{shown(name)} of both {owners[name]} and {processor.name}. Rename one."
                    )
                owners[name] = processor.name
        device = tuple(each for each in made if isinstance(each, LogitsProcessor))
        for each in device:
            _trace(each, vocab_size)
        host = tuple(each for each in made if isinstance(each, HostLogitsProcessor))
        return LogitsProcessors(device, host)

    @property
    def params(self) -> ProcessorParams:
        """Names of the parameters, for processes that create requests."""
        return ProcessorParams(
            *(tuple((each.name, tuple(each.params)) for each in kind) for kind in self)
        )

    def sizes(self, width: int) -> dict[str, int]:
        """Return the fields of `StepShapes` for the processors on the device.

        Args:
            width: Tokens that a row verifies, which are stored at once.
        """
        if not self.device:
            return {}
        return {
            "processor_params": sum(len(each.params) for each in self.device),
            "processor_tokens": max(width, *(each.window for each in self.device)),
        }

    def admit(self, request: Request, vocab_size: int) -> None:
        """Validate a request's arguments, and set its `token_filter`.

        Args:
            request: The request.
            vocab_size: Number of token ids of the model.

        Raises:
            ValueError: a processor refuses its arguments.
        """
        extra, own = request.params.extra_args or {}, list[tuple[HostLogitsProcessor, dict]]()
        for each in (*self.device, *self.host):
            if not uses(each.name, each.params, extra):
                continue
            args = {name: extra[name] for name in each.params}
            each.validate(args)
            if isinstance(each, HostLogitsProcessor):
                own.append((each, args))
        request.token_filter = TokenFilter(own, vocab_size) if own else None


def _made(entry: AnyProcessor) -> LogitsProcessor | HostLogitsProcessor:
    found = check_entry(_imported(entry)) if isinstance(entry, str) else entry
    if isinstance(found, str):
        raise ValueError(
            f"The import path {shown(entry)} must lead to a logits processor, got a text, "
            f"{shown(found)}. Name a class or an instance."
        )
    if not isinstance(found, type):
        return found
    try:
        made = found()
    except TypeError as error:
        raise ValueError(
            f"A class in logits_processors must be callable without arguments, got "
            f"{place_of(found)}: {error}. Give an instance, or the import path of one."
        ) from error
    check_entry(made)  # it has a hash
    return made


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs arbitrary code of the module
        raise ValueError(
            f"The logits processor {shown(place)} must be importable, got "
            f"{type(error).__name__}: {error}. Install its module, put its folder on PYTHONPATH, "
            "or give an instance."
        ) from error
    return found


def _checked_params(processor: LogitsProcessor | HostLogitsProcessor) -> tuple[str, ...]:
    params = processor.params
    is_tuple = isinstance(params, tuple) and 0 < len(set(params)) == len(params) <= MAX_PARAMS
    if not is_tuple or any(not isinstance(name, str) or not name for name in params):
        raise ValueError(
            f"params of the logits processor {processor.name} must be a tuple of 1 to "
            f"{MAX_PARAMS} different names, got {shown(params)}. A request uses a processor by "
            "giving them in extra_args."
        )
    if isinstance(processor, LogitsProcessor):
        name = f"window of the logits processor {processor.name}"
        integer(name, processor.window, 0, MAX_WINDOW)
    return params


def _trace(processor: LogitsProcessor, vocab_size: int) -> None:
    logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    ids = jax.ShapeDtypeStruct((processor.window,), jnp.int32)
    params = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in processor.params}
    try:
        found: Any = jax.eval_shape(processor, logits, Prefix(ids, number, number), params)
    except Exception as error:  # of the user's code
        raise ValueError(
            f"The logits processor {processor.name} must be a JAX function of logits, prefix and "
            f"params, and can't be traced: {error!s:.500}"
        ) from error
    if getattr(found, "shape", None) != logits.shape or found.dtype != logits.dtype:
        raise ValueError(
            f"The logits processor {processor.name} must return float32 [{vocab_size}], like its "
            f"argument logits, got {shown(found)}. Convert its result."
        )
