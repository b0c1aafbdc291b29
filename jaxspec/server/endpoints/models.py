"""GET /v1/models: what is served."""

from typing import Any

from starlette.responses import Response

from jaxspec.server.errors import json_response
from jaxspec.server.routing import make_router
from jaxspec.server.service import Service, ServiceOf

router = make_router()


@router.get("/v1/models")
async def list_models(service: ServiceOf) -> Response:
    """All names of the model."""
    found = [_model(service, name) for name in service.names]
    return json_response({"object": "list", "data": found})


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, service: ServiceOf) -> Response:
    """One of them."""
    return json_response(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxspec",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.llm.max_model_len,
    }
