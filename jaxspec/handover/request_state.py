"""RequestState: one request between two engines, with what was computed of it."""

import dataclasses
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import checks
from jaxspec.checks import INT64_MAX, shown
from jaxspec.handover.container import MAX_BYTES, Container
from jaxspec.logprobs import LAYOUT
from jaxspec.request import Request
from jaxspec.sampling_params import RequestOutputKind, SamplingParams

KIND = "request"
_IDS = "prompt_token_ids", "token_ids", "draft_positions"
"""Fields that are lists of small integers, and lie in arrays."""
_INT32 = np.dtype(np.int32)
_CACHE = "cache/"  # the names of arrays of what was computed begin with it


@dataclasses.dataclass(frozen=True, eq=False)
class RequestState:
    """A request as another engine of the same model goes on with it. Nothing in it changes.

    `arrays` are what is kept of the first `num_computed` tokens, in the portable form of
    `jaxspec.cache.portable`. Any number of them may be missing, or all: a prompt is computed anew
    where a receiver has no use for them, and the tokens that follow are the same.
    """

    fingerprint: str  # of the model and its weights
    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # of the output so far
    draft_positions: tuple[int, ...]  # of each of them, as `CompletionOutput.draft_positions`
    params: SamplingParams
    seed: int  # 32 bits, of the noise
    priority: int = 0
    cache_salt: str | None = None
    num_computed: int = 0
    logprobs: np.ndarray | None = None  # int32 [tokens, LAYOUT.size], of `token_ids`
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(
        request: Request, fingerprint: str, num_computed: int, arrays: Mapping[str, np.ndarray]
    ) -> "RequestState":
        """A request that no engine runs any more, with what was read of its first tokens."""
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
            arrays=arrays,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of `arrays`, which are most of it."""
        return sum(array.nbytes for array in self.arrays.values())

    def to_bytes(self) -> bytes:
        """It as a container (`handover.container`)."""
        return self._container().to_bytes()

    @staticmethod
    def from_bytes(content: bytes | bytearray | memoryview) -> "RequestState":
        """What `to_bytes` gave.

        Raises:
            ValueError: the bytes are no whole container of a request, or of another version.
        """
        return _read(Container.from_bytes(content, KIND))

    def save(self, path: str | Path) -> None:
        """Write it to a file in one piece, which only the user can read.

        Raises:
            OSError: it can't be written.
        """
        self._container().save(Path(checks.path("path", path)))

    @staticmethod
    def load(path: str | Path, max_bytes: int = MAX_BYTES) -> "RequestState":
        """What `save` wrote.

        Raises:
            FileNotFoundError: there is no file.
            ValueError: it can't be read, is longer than `max_bytes`, or as in `from_bytes`.
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
        }
        cache = {_CACHE + name: array for name, array in self.arrays.items()}
        return Container(KIND, about, arrays | cache)


def send(sock: socket.socket, state: RequestState) -> None:
    """Write a request to a connected socket.

    Raises:
        OSError: the connection has ended, or the socket's timeout is over. Nothing is lost: `state`
            can be sent elsewhere, or imported where it came from.
    """
    state._container().send(sock)


def receive(sock: socket.socket, max_bytes: int = MAX_BYTES) -> RequestState:
    """The next request from a connected socket. Close the socket after an error.

    Raises:
        ConnectionError: the connection ended before the request did.
        OSError: the socket's timeout is over, or as the system says.
        ValueError: it is longer than `max_bytes`, or as in `RequestState.from_bytes`.
    """
    return _read(Container.receive(sock, KIND, max_bytes))


def _described(params: SamplingParams) -> dict[str, Any]:
    """Parameters in JSON's values; an object of JSON's would make texts of ids."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    bias = values["logit_bias"]
    values["logit_bias"] = None if bias is None else [[key, bias[key]] for key in bias]
    return values | {"output_kind": params.output_kind.name}


def _read(container: Container) -> RequestState:
    """The request in a container, whose maker may be a stranger."""
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
        arrays={name.removeprefix(_CACHE): array for name, array in arrays.items()},
        **ids,
    )


def _ids(name: str, array: np.ndarray | None) -> tuple[int, ...]:
    if array is None or array.dtype != _INT32 or array.ndim != 1 or np.any(array < 0):
        raise _refused(name, array, "an array of int32 numbers that are not negative")
    return tuple(array.tolist())


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
