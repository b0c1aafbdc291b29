"""GET /metrics: the engine's figures and the server's, as Prometheus reads them."""

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from starlette.responses import Response

from jaxspec.server.collector import Collector
from jaxspec.server.routing import make_router
from jaxspec.server.service import ServiceOf

router = make_router()


@router.get("/metrics")
async def metrics(service: ServiceOf) -> Response:
    """All figures, as text."""
    snapshot = await service.watch.snapshot()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(snapshot, service.llm.shapes, service.names[0]))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
