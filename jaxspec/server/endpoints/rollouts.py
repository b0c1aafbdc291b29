"""Routes of trainers, with vLLM's names: pauses, sleep, and weights from files or shared memory.

They are served with `--enable-rollouts` and an API key, because their clients change the model.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import jax
import numpy as np
from fastapi import Query
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.pausing import PauseMode
from jaxspec.checks import shown
from jaxspec.engine.errors import ServiceError
from jaxspec.models.trees.folder import read_folder
from jaxspec.models.trees.shared_memory import mapped_tensors
from jaxspec.server.generation.service import Service, ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router

router = make_router()
Collected = dict[str, dict[str, Any]]
"""Tensors of an update that is not finished, by argument of `update_weights`."""


class WeightSource(BaseModel):
    """Source of new weights on the server's host.

    It is a folder of safetensors, or a safetensors file in shared memory, which is mapped and not
    copied: the POSIX segment NAME is the file /dev/shm/NAME.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    backend: Literal["checkpoint", "shared_memory"] = "checkpoint"
    path: str

    @property
    def is_shared(self) -> bool:
        return self.backend == "shared_memory"


class WeightUpdateRequest(BaseModel):
    """Body of /update_weights; outside of a started update, the weights are replaced at once."""

    model_config = ConfigDict(strict=True, extra="forbid")

    update_info: WeightSource
    weight_version: str | None = None


class FinishRequest(BaseModel):
    """Body of /finish_weight_update."""

    model_config = ConfigDict(strict=True, extra="forbid")

    weight_version: str | None = None


@router.post("/pause")
async def pause(
    service: ServiceOf, mode: PauseMode = "abort", clear_cache: bool = True
) -> Response:
    """Run no steps until /resume; the defaults are vLLM's."""
    with _answering():
        await _llm(service).pause(mode, clear_cache=clear_cache)
    return json_response({"status": "paused"})


@router.post("/resume")
async def resume(service: ServiceOf) -> Response:
    """End a pause."""
    with _answering():
        await _llm(service).resume()
    return json_response({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(service: ServiceOf) -> Response:
    """Return whether steps are paused."""
    return json_response({"is_paused": _llm(service).is_paused})


_Tags = Annotated[list[Literal["weights", "kv_cache"]] | None, Query()]


@router.post("/sleep")
async def sleep(
    service: ServiceOf, level: int = 1, mode: PauseMode = "abort", tags: _Tags = None
) -> Response:
    """Free the device memory until /wake_up."""
    with _answering():
        await _llm(service).sleep(level, mode, tags=tags)  # pyright: ignore[reportArgumentType]
    return Response()


@router.post("/wake_up")
async def wake_up(service: ServiceOf, tags: _Tags = None) -> Response:
    """Restore what /sleep freed."""
    with _answering():
        await _llm(service).wake_up(tags)
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(service: ServiceOf) -> Response:
    """Return whether device memory is freed."""
    return json_response({"is_sleeping": _llm(service).is_sleeping})


@router.get("/get_world_size")
async def get_world_size(service: ServiceOf) -> Response:
    """Return 1: trainers hand their weights to one process, on however many devices."""
    return json_response({"world_size": 1})


# Weights


@router.post("/start_weight_update")
async def start_weight_update(service: ServiceOf) -> Response:
    """Collect the tensors of the following /update_weights until /finish_weight_update.

    An earlier update that was not finished is dropped.
    """
    service.weight_update = {"weights": {}}
    return json_response({"status": "started"})


@router.post("/start_draft_weight_update")
async def start_draft_weight_update(service: ServiceOf) -> Response:
    """Collect the following tensors for the drafter's own checkpoint."""
    service.weight_update = (service.weight_update or {}) | {"drafter": {}}
    return json_response({"status": "started"})


@router.post("/update_weights")
async def update_weights(body: WeightUpdateRequest, service: ServiceOf) -> Response:
    """Read weights from a folder or shared memory, and replace those of the engine.

    Between a start and the finish, tensors in shared memory are copied: a client may write the next
    ones to the same place.
    """
    source, started = body.update_info, service.weight_update
    path = _allowed(service, source.path, is_file=source.is_shared)

    def read() -> dict[str, np.ndarray]:
        if not source.is_shared:
            return read_folder(path)
        mapped = mapped_tensors(path)
        return mapped if started is None else {name: each.copy() for name, each in mapped.items()}

    with _answering():
        tensors = await service.llm.prepare(read, is_long=True)
    if service.weight_update is not started:
        raise ApiError(
            409,
            "An update of weights was started or finished while this one was read, so its "
            "tensors were dropped. Await each /update_weights before the next call.",
        )
    if started is None:
        return await _apply(service, {"weights": tensors}, body.weight_version)
    *_, last = started.values()
    last.update(tensors)
    return json_response({"status": "collected", "num_tensors": len(last)})


@router.post("/finish_weight_update")
async def finish_weight_update(service: ServiceOf, request: Request) -> Response:
    """Replace the weights by those collected; a refused update changes nothing and is dropped.

    The body is a `FinishRequest`, or empty.
    """
    try:
        body = FinishRequest.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise ApiError.of(error) from error
    collected, service.weight_update = service.weight_update, None
    if not collected:
        raise ApiError(409, "No update was started. Call /start_weight_update first.")
    return await _apply(service, collected, body.weight_version)


async def _apply(service: Service, trees: Collected, version: str | None) -> Response:
    with _answering():
        update = await _llm(service).update_weights(
            trees.get("weights") or None, version=version, drafter=trees.get("drafter") or None
        )
    return json_response({"weight_version": update.version, "seconds": update.seconds})


def _allowed(service: Service, path: str, *, is_file: bool) -> Path:
    """Return the resolved path of a file, or of a folder, below `weights_folders`.

    Links are followed, those of the folder's files too.

    Raises:
        ApiError: 400, the path or a file of the folder is elsewhere, or does not exist.
    """
    roots = [Path(root).expanduser().resolve() for root in service.options.weights_folders]
    found, kind = Path(path), "a file" if is_file else "a folder, with all of its files,"
    try:
        if not found.is_absolute() or not _is_in(found.resolve(), roots):
            raise ValueError
        if is_file and not found.is_file():
            raise ValueError
        files = [] if is_file else list(found.iterdir())
        if not all(_is_in(file.resolve(), roots) for file in files):
            raise ValueError
    except (OSError, RuntimeError, ValueError) as error:
        raise ApiError(
            400,
            f"update_info.path must be {kind} in one of the server's weights_folders, got "
            f"{shown(path)}. Start the server with --weights-folders.",
            param="update_info.path",
        ) from error
    return found.resolve()


def _is_in(path: Path, roots: list[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _llm(service: Service) -> AsyncLLM:
    return cast(AsyncLLM, service.llm)  # `enable_rollouts` needs one process


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Convert refusals of the engine to errors of HTTP."""
    try:
        yield
    except ServiceError:
        raise
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise ApiError(400, str(error)) from error
    except jax.errors.JaxRuntimeError:
        raise  # a failure of the device, such as a lack of memory
    except RuntimeError as error:
        raise ApiError(409, str(error)) from error
