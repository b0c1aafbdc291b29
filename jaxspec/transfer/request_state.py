"""RequestState: an exported request, with the cached data of its tokens."""

import dataclasses
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import checks
from jaxspec.checks import INT64_MAX, shown
from jaxspec.requests.logprobs import LAYOUT
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.requests.structured_outputs import StructuredOutputsParams
from jaxspec.transfer.container import MAX_BYTES, Container

KIND = "request"
_IDS = "prompt_token_ids", "token_ids", "draft_positions"
"""Fields stored as int32 arrays."""
_INT32 = np.dtype(np.int32)
_CACHE = "cache/"  # prefix of the names of cached arrays


@dataclasses.dataclass(frozen=True, eq=False)
class RequestState:
    """A request to be continued by another engine with the same model. Immutable.

    `arrays` has the cached data of the first `num_computed` tokens, in the portable form of
    `jaxspec.cache.portable`. Some or all arrays may be missing: the receiver then recomputes them,
    with the same output tokens.
    """

    fingerprint: str  # `fingerprint` of the model and its weights
    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # output so far
    draft_positions: tuple[int, ...]  # per output token, see `CompletionOutput.draft_positions`
    params: SamplingParams
    seed: int  # seed of the sampling noise, 32 bits
    priority: int = 0
    cache_salt: str | None = None
    num_computed: int = 0
    logprobs: np.ndarray | None = None  # int32 [len(token_ids), LAYOUT.size]
    weight_starts: tuple[tuple[str, int], ...] = ()  # `Request.weight_starts`
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(
        request: Request, fingerprint: str, num_computed: int, arrays: Mapping[str, np.ndarray]
    ) -> "RequestState":
        """Make the state of a request that was removed from its engine.

        Args:
            request: The request.
            fingerprint: Fingerprint of the model.
            num_computed: Number of tokens that `arrays` cover.
            arrays: Cached data of these tokens.
        """
        count = request.num_output
        logprobs = None
        if request.params.logprobs is not None:
            rows = [np.asarray(row, np.int32) for row in request.logprobs[:count]]
            logprobs = np.stack(rows) if rows else np.zeros((0, LAYOUT.size), np.int32)
        return RequestState(
            fingerprint=fingerprint,
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            token_ids=tuple(request.output),
            draft_positions=tuple(request.draft_positions[:count]),
            params=request.params.clone(),
            seed=request.seed,
            priority=request.priority,
            cache_salt=request.cache_salt,
            num_computed=num_computed,
            logprobs=logprobs,
            weight_starts=tuple(request.weight_starts),
            arrays=arrays,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of `arrays`, nearly the whole size."""
        return sum(array.nbytes for array in self.arrays.values())

    def to_bytes(self) -> bytes:
        """Serialise to a container (`transfer.container`)."""
        return self._container().to_bytes()

    @staticmethod
    def from_bytes(content: bytes | bytearray | memoryview) -> "RequestState":
        """Parse the result of `to_bytes`.

        Raises:
            ValueError: The bytes are incomplete or damaged, no request, or of another version.
        """
        return _read(Container.from_bytes(content, KIND))

    def save(self, path: str | Path) -> None:
        """Write the state to a file atomically, readable only by the user.

        Raises:
            OSError: Writing failed.
        """
        self._container().save(Path(checks.path("path", path)))

    @staticmethod
    def load(path: str | Path, max_bytes: int = MAX_BYTES) -> "RequestState":
        """Read a file written by `save`.

        Args:
            path: The file.
            max_bytes: Maximum size of the file.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: It can't be read, is longer than `max_bytes`, or as in `from_bytes`.
        """
        return _read(Container.load(Path(checks.path("path", path)), KIND, max_bytes))

    def _container(self) -> Container:
        arrays = {name: np.array(getattr(self, name), np.int32) for name in _IDS}
        if self.logprobs is not None:
            arrays["logprobs"] = self.logprobs
        about = {
            "fingerprint": self.fingerprint,
            "request_id": self.request_id,
            "params": _described(self.params),
            "seed": self.seed,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "num_computed": self.num_computed,
            "weight_starts": [list(each) for each in self.weight_starts],
        }
        cache = {_CACHE + name: array for name, array in self.arrays.items()}
        return Container(KIND, about, arrays | cache)


def send(sock: socket.socket, state: RequestState) -> None:
    """Write a request to a connected socket.

    Raises:
        OSError: The connection was closed, or the socket timed out. `state` is unchanged: send it
            elsewhere, or import it into the engine that exported it.
    """
    state._container().send(sock)


def receive(sock: socket.socket, max_bytes: int = MAX_BYTES) -> RequestState:
    """Read the next request from a connected socket. Close the socket after an error.

    Args:
        sock: The socket.
        max_bytes: Maximum size of the message.

    Raises:
        ConnectionError: The connection was closed before the request was complete.
        OSError: The socket timed out, or another system error.
        ValueError: It is longer than `max_bytes`, or as in `RequestState.from_bytes`.
    """
    return _read(Container.receive(sock, KIND, max_bytes))


def _described(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters as JSON values; a JSON object would turn ids into strings."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    bias = values["logit_bias"]
    values["logit_bias"] = None if bias is None else [[key, bias[key]] for key in bias]
    if isinstance(params.structured_outputs, StructuredOutputsParams):
        values["structured_outputs"] = dataclasses.asdict(params.structured_outputs)
    return values | {"output_kind": params.output_kind.name}


def _read(container: Container) -> RequestState:
    """Validate and return the request in a container from an untrusted source."""
    about, arrays = container.about, dict(container.arrays)
    ids = {name: _ids(name, arrays.pop(name, None)) for name in _IDS}
    count = len(ids["token_ids"])
    if len(ids["draft_positions"]) != count:
        raise _refused("draft_positions", ids["draft_positions"], f"{count} numbers, one a token")
    total = len(ids["prompt_token_ids"]) + count
    logprobs = arrays.pop("logprobs", None)
    if logprobs is not None and (logprobs.dtype, logprobs.shape) != (_INT32, (count, LAYOUT.size)):
        raise _refused("logprobs", logprobs.shape, f"int32 of the shape {(count, LAYOUT.size)}")
    strange = [name for name in arrays if not name.startswith(_CACHE)]
    if strange:
        raise _refused("arrays", strange, f"{', '.join(_IDS)}, logprobs and {_CACHE}...")
    salt = about.get("cache_salt")
    params = _params(about.get("params"))
    if (params.logprobs is None) != (logprobs is None):
        raise _refused("logprobs", logprobs, "an array if params ask for them, else none")
    return RequestState(
        fingerprint=_text("fingerprint", about),
        request_id=_text("request_id", about),
        params=params,
        seed=_integer("seed", about, 0, 2**32 - 1),
        priority=_integer("priority", about, -INT64_MAX, INT64_MAX),
        cache_salt=None if salt is None else checks.text("cache_salt", salt),
        num_computed=_integer("num_computed", about, 0, max(0, total - 1)),
        logprobs=logprobs,
        weight_starts=_starts(about.get("weight_starts"), count),
        arrays={name.removeprefix(_CACHE): array for name, array in arrays.items()},
        **ids,
    )


def _ids(name: str, array: np.ndarray | None) -> tuple[int, ...]:
    if array is None or array.dtype != _INT32 or array.ndim != 1 or np.any(array < 0):
        raise _refused(name, array, "an array of int32 numbers that are not negative")
    return tuple(array.tolist())


def _starts(value: Any, count: int) -> tuple[tuple[str, int], ...]:
    try:
        starts = tuple((version, start) for version, start in value)
    except (TypeError, ValueError):
        starts = (("", -1),)
    is_typed = all(isinstance(each, str) and type(start) is int for each, start in starts)
    indices = [start for _, start in starts] if is_typed else [-1]
    if indices != sorted(indices) or not all(0 <= each <= count for each in indices):
        raise _refused("weight_starts", value, f"versions and ascending indices, 0 to {count}")
    return starts


def _params(values: Any) -> SamplingParams:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if not isinstance(values, dict) or values.keys() != known:
        raise _refused("params", values, "the fields of this version's SamplingParams")
    kinds = {kind.name: kind for kind in RequestOutputKind}
    try:
        bias, kind = values["logit_bias"], kinds[values["output_kind"]]
        pairs = None if bias is None else dict(map(tuple, bias))
        return SamplingParams(**values | {"logit_bias": pairs, "output_kind": kind})
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(
            "params", values, f"such as SamplingParams takes ({error!s:.200})"
        ) from error


def _text(name: str, about: Mapping[str, Any]) -> str:
    if not isinstance(about.get(name), str):
        raise _refused(name, about.get(name), "a text")
    return about[name]


def _integer(name: str, about: Mapping[str, Any], least: int, most: int) -> int:
    value = about.get(name)
    if type(value) is not int or not least <= value <= most:
        raise _refused(name, value, f"an integer from {least} to {most}")
    return value


def _refused(name: str, value: Any, rule: str) -> ValueError:
    return ValueError(
        f"{name} of a request that travels must be {rule}, got {shown(value)}. Have it exported "
        "anew by the same version of jaxspec."
    )
