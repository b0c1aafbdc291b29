"""GET /health, /ready, /ping, /version and /load: what orchestrators and people ask first."""

from starlette.responses import Response

from jaxspec.server.errors import json_response
from jaxspec.server.routing import make_router
from jaxspec.server.service import ServiceOf
from jaxspec.server.version import version

router = make_router()


@router.get("/health")
@router.get("/ping")
async def health(service: ServiceOf) -> Response:
    """200 while the engine lives; 503 when a step failed, and this process should be ended."""
    return Response(status_code=200 if service.llm.is_healthy else 503)


@router.get("/ready")
async def ready(service: ServiceOf) -> Response:
    """200 while new requests are taken; 503 also while the server ends."""
    is_ready = service.llm.is_healthy and not service.is_draining
    return Response(status_code=200 if is_ready else 503)


@router.get("/version")
async def tell_version() -> Response:
    """The version of jaxspec."""
    return json_response({"version": version()})


@router.get("/load")
async def load(service: ServiceOf) -> Response:
    """How many samples run, and how many wait."""
    told = (await service.watch.snapshot()).engine
    return json_response({"server_load": told["num_running"] + told["num_waiting"]})
