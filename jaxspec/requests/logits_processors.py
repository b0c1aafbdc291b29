"""Logits processors of users: their interfaces, and the `extra_args` of requests that use them."""

import abc
import contextlib
import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checks import INT64_MAX, is_integer, items, real, shown

MAX_PROCESSORS = 16
"""Most logits processors of an engine."""
MAX_PARAMS = 64
"""Most `params` of a processor."""
MAX_WINDOW = 4096
"""Largest `LogitsProcessor.window`."""
MAX_EXTRA_ARGS = 64
"""Most entries of `extra_args`."""
MAX_EXTRA_ARG = 4096
"""Most characters of a text, or entries of a list, in `extra_args`."""
_EXACT = 2**24  # float32 holds all integers up to it


class Prefix(NamedTuple):
    """Tokens before a position: prompt, output, and the drafts before it. JAX arrays.

    Attributes:
        ids: The last `LogitsProcessor.window` token ids, int32 `[window]`, newest last; -1 before
            the first token.
        length: Number of all tokens before the position, int32.
        prompt_length: Number of prompt tokens among them, int32.
    """

    ids: Any
    length: Any
    prompt_length: Any


class _Processor:
    """Base of both kinds of processors.

    Attributes:
        params: Names of the `SamplingParams.extra_args` that it reads, at least one. A request uses
            the processor by giving all of them, and none of them otherwise.
    """

    params: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the class, for messages."""
        return type(self).__name__

    def validate(self, args: Mapping[str, Any]) -> None:
        """Check the arguments of a request before it is queued.

        Args:
            args: The value of each of `params`.

        Raises:
            ValueError: a value is invalid.
        """


class LogitsProcessor(_Processor, abc.ABC):
    """Pure function from the logits of one position to new ones, compiled into the step.

    Instances must be hashable and must not change, because programs are compiled for them; use a
    frozen dataclass. The result may depend only on the arguments and the instance.

    Attributes:
        params: Names of the `SamplingParams.extra_args` that it reads, at least one. A request uses
            the processor by giving all of them. Values are numbers, float32 on the device.
        window: Number of newest tokens in `Prefix.ids`, 0 to 4,096.
    """

    window: int = 0

    @abc.abstractmethod
    def __call__(self, logits: Any, prefix: Prefix, params: dict[str, Any]) -> Any:
        """Return the logits of one position.

        The step calls it for each position of each row, by `jax.vmap`. Masked ids stay masked: an
        id of -inf is -inf in the result, too.

        Args:
            logits: float32 `[vocab]`. `logit_bias` is added; ids that `allowed_token_ids` or a
                grammar excludes are -inf. Bad words and stop ids before `min_tokens` are masked
                later.
            prefix: The tokens before the position.
            params: The request's `extra_args`, a float32 scalar for each of `params`.

        Returns:
            float32 `[vocab]`.
        """


class HostLogitsProcessor(_Processor, abc.ABC):
    """Function from a request's tokens to the ids that may follow, called on the host.

    A call needs the tokens of the step before, and runs while the device computes the logits.
    Instances must be hashable.
    """

    @abc.abstractmethod
    def __call__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], args: Mapping[str, Any]
    ) -> Any:
        """Return the allowed ids of one position.

        An exception, or a result of another kind, ends the request with "error".

        Args:
            prompt_ids: Token ids of the prompt.
            output_ids: Token ids of the output, and of the drafts before the position.
            args: The request's `extra_args` that are in `params`.

        Returns:
            Token ids, a NumPy mask (bool `[vocab]`), or None for all ids.
        """


ProcessorClass = type[LogitsProcessor] | type[HostLogitsProcessor]
AnyProcessor = LogitsProcessor | HostLogitsProcessor | ProcessorClass | str
"""An instance, a class that is created without arguments, or the place of either."""
_PLACE = re.compile(r"[\w.]+:[\w.]+")


def check_entry(entry: Any) -> AnyProcessor:
    """Return an entry of the option `logits_processors`, checked without importing anything.

    Args:
        entry: The entry.

    Raises:
        ValueError: it is neither a processor, a class of processors nor a text "module:name".
    """
    kinds = LogitsProcessor, HostLogitsProcessor
    is_place = isinstance(entry, str) and _PLACE.fullmatch(entry)
    is_class = isinstance(entry, type) and issubclass(entry, kinds)
    if not (is_place or is_class or isinstance(entry, kinds)):
        raise ValueError(
            "Each of logits_processors must be an instance or a subclass of "
            f"jaxspec.LogitsProcessor or jaxspec.HostLogitsProcessor, or its place "
            f"'module:name', got {shown(entry)}. Processors of vLLM edit whole batches, and must "
            "be written as functions of one position."
        )
    try:
        hash(entry)
    except TypeError as error:
        raise ValueError(
            f"A logits processor must have a hash, because programs are compiled for it, and "
            f"{place_of(entry)} has none ({error}). Make it a frozen dataclass of values that "
            "have one, such as tuples."
        ) from error
    return entry


def place_of(entry: AnyProcessor) -> str:
    """Return the place of a processor or of its class, "module:name".

    Args:
        entry: An entry of the option `logits_processors`.
    """
    if isinstance(entry, str):
        return entry
    kind = entry if isinstance(entry, type) else type(entry)
    return f"{kind.__module__}:{kind.__qualname__}"


def source_digest(processor: LogitsProcessor | HostLogitsProcessor) -> str:
    """Return a digest of the source of a processor's class and of the classes it extends.

    Args:
        processor: The processor. Classes without a source, such as those of an interactive
            session, are left out, and so are functions that the classes call.
    """
    digest = hashlib.sha256()
    for kind in type(processor).__mro__:
        if kind.__module__ != __name__:
            with contextlib.suppress(OSError, TypeError):
                digest.update(inspect.getsource(kind).encode())
    return digest.hexdigest()


def extra_args(value: Any) -> dict[str, Any] | None:
    """Return a copy of a request's `extra_args` with Python values.

    Args:
        value: The value given by the user.

    Raises:
        ValueError: it is no dict of numbers, texts, bools and lists of them, or it is too large.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or any(not isinstance(name, str) for name in value):
        raise ValueError(f"extra_args must be a dict with texts as keys, got {shown(value)}.")
    if len(value) > MAX_EXTRA_ARGS:
        raise ValueError(
            f"extra_args may have at most {MAX_EXTRA_ARGS} entries, got {len(value):,}. Put "
            "several values into a list."
        )
    return {str(name): _argument(name, each) for name, each in value.items()}


def _argument(name: str, value: Any) -> Any:
    is_list = isinstance(value, list | tuple | np.ndarray)
    listed = items(value, MAX_EXTRA_ARG) if is_list else [value]
    plain = [_plain_argument(each) for each in listed or () if len(listed or ()) <= MAX_EXTRA_ARG]
    if listed is None or len(plain) != len(listed) or None in plain:
        raise ValueError(
            f"extra_args[{name[:40]!r}] must be a finite number, a bool, a text of at most "
            f"{MAX_EXTRA_ARG:,} characters or a list of at most {MAX_EXTRA_ARG:,} of them, got "
            f"{shown(value)}."
        )
    return plain if is_list else plain[0]


def _plain_argument(value: Any) -> bool | int | float | str | None:
    """Return one value as a Python type; None if it is of no such type."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, str):
        return str(value) if len(value) <= MAX_EXTRA_ARG else None
    if is_integer(value):
        return int(value) if abs(int(value)) <= INT64_MAX else None
    number = real(value)
    return number if np.isfinite(number) else None


class ProcessorArgs(NamedTuple):
    """Arguments of one request for the processors on the device."""

    used: int = 0  # a bit for each processor, the lowest first
    values: tuple[float, ...] = ()  # of all processors, in their order; 0 for unused ones


class ProcessorParams(NamedTuple):
    """Parameters that the processors of an engine read, by their names.

    Attributes:
        device: Each processor on the device: its name and its `params`.
        host: Each processor on the host.
    """

    device: tuple[tuple[str, tuple[str, ...]], ...] = ()
    host: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def read(self, extra_args: Mapping[str, Any] | None) -> ProcessorArgs | None:
        """Return a request's arguments; None if it uses no processor.

        Args:
            extra_args: The request's `extra_args`.

        Raises:
            ValueError: a key is unknown, a processor lacks one, or a value for the device is no
                number that float32 holds.
        """
        if not extra_args:
            return None
        known = {name for _, params in (*self.device, *self.host) for name in params}
        for name in extra_args:
            if name not in known:
                raise self._unknown(name)
        used, values = 0, list[float]()
        for number, (processor, params) in enumerate(self.device):
            is_used = uses(processor, params, extra_args)
            used |= is_used << number
            values += [_float32(name, extra_args[name]) if is_used else 0.0 for name in params]
        for processor, params in self.host:
            uses(processor, params, extra_args)
        return ProcessorArgs(used, tuple(values))

    def _unknown(self, name: str) -> ValueError:
        listed = [f"{each} ({', '.join(params)})" for each, params in (*self.device, *self.host)]
        if not listed:
            return ValueError(
                f"extra_args are read by logits processors, and this engine has none, got "
                f"{shown(name)}. Leave them out, or create the engine with logits_processors."
            )
        return ValueError(
            f"extra_args must be of this engine's logits processors, {', '.join(listed)}, got "
            f"{shown(name)}. Leave it out."
        )


def uses(processor: str, params: Sequence[str], extra_args: Mapping[str, Any]) -> bool:
    """Return whether a request uses a processor.

    Args:
        processor: Its name.
        params: Its parameters.
        extra_args: The request's `extra_args`.

    Raises:
        ValueError: only some of the parameters are given.
    """
    missing = [name for name in params if name not in extra_args]
    if missing and len(missing) < len(params):
        raise ValueError(
            f"extra_args must have all of {', '.join(params)} for the logits processor "
            f"{processor}, or none, and {missing[0]} is missing. Add it."
        )
    return not missing


def _float32(name: str, value: Any) -> float:
    number = np.nan if isinstance(value, bool) else real(value)
    limit = _EXACT if isinstance(value, int) else float(np.finfo(np.float32).max)
    if not abs(number) <= limit:
        raise ValueError(
            f"extra_args[{name!r}] must be a finite number for a logits processor on the device "
            f"(float32; integers from -{_EXACT:,} to {_EXACT:,}), got {shown(value)}. Give such a "
            "number; texts, bools and lists are for HostLogitsProcessor."
        )
    return number
