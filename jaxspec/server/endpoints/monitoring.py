"""Monitoring: the page, /stats, /metrics, health, version, load and model listing."""

import time
from typing import Annotated, Any

from fastapi import Query
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from starlette.responses import HTMLResponse, Response

from jaxspec.flight.about import VERSION
from jaxspec.requests.request import AcceptanceCounts
from jaxspec.server.generation.service import Service, ServiceOf
from jaxspec.server.http.errors import json_response
from jaxspec.server.http.routing import make_router
from jaxspec.server.metrics.collector import Collector
from jaxspec.server.metrics.step_watch import MAX_STEPS
from jaxspec.server.page.document import DOCUMENT, HEADERS
from jaxspec.viz.timeline import StepRow

router = make_router()
_SAME = ("num_running", "num_waiting", "kv_cache_usage", "num_tokens", "num_steps",
         "num_preemptions", "tokens_per_second", "max_in_flight", "memory_bytes")  # fmt: skip


@router.get("/stats")
async def stats(
    service: ServiceOf, steps: Annotated[int, Query(ge=0, le=MAX_STEPS)] = 0
) -> Response:
    """Return metrics under the names of `AsyncLLM.metrics`, and times of the last `steps` steps.

    Times are in seconds. Steps are recorded only while they are requested: the first request with
    `steps` starts recording.
    """
    llm = service.llm
    rows = await service.watch.last_steps(steps) if steps and llm.is_healthy else []
    metrics = (await service.watch.snapshot()).engine if llm.is_healthy else {}
    return json_response(
        {
            "model": service.names[0],
            "time": time.monotonic(),
            "is_healthy": llm.is_healthy,
            "max_num_seqs": llm.num_replicas * llm.shapes.max_num_seqs,
            "num_pages": llm.num_replicas * (llm.shapes.num_pages - 1),  # without null pages
            "page_size": llm.shapes.page_size,
            **{name: metrics[name] for name in _SAME if name in metrics},
            "acceptance": {
                method: _acceptance(AcceptanceCounts(**counts))
                for method, counts in metrics.get("acceptance", {}).items()
            },
            "steps": [_step(row) for row in rows],
        }
    )


def _acceptance(counts: AcceptanceCounts) -> dict[str, Any]:
    return {
        "num_drafts": counts.num_drafts,
        "accepted_per_position": counts.accepted_per_position,
        "drafted_per_position": counts.drafted_per_position,
        "mean_acceptance_length": counts.mean_acceptance_length,
    }


def _step(row: StepRow) -> dict[str, Any]:
    return {"name": row.name, "spans": [span._asdict() for span in row.spans]}


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """Return the page, which prompts for an API key if the server needs one."""
    return HTMLResponse(DOCUMENT, headers=HEADERS)


@router.get("/metrics")
async def metrics(service: ServiceOf) -> Response:
    """Return all metrics in Prometheus' text format."""
    snapshot = await service.watch.snapshot()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(snapshot, service.llm.shapes, service.llm.limits, service.names[0]))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/health")
@router.get("/ping")
async def health(service: ServiceOf) -> Response:
    """Return 200 while the engine is healthy; 503 after a failed step: restart the server."""
    return Response(status_code=200 if service.llm.is_healthy else 503)


@router.get("/ready")
async def ready(service: ServiceOf) -> Response:
    """Return 200 while new requests are accepted; 503 after a failure or during shutdown.

    Also 503 while all replicas are being restarted, or a pause refuses requests.
    """
    is_ready = service.llm.is_ready and not service.is_draining
    return Response(status_code=200 if is_ready else 503)


@router.get("/version")
async def tell_version() -> Response:
    """Return the version of jaxspec."""
    return json_response({"version": VERSION})


@router.get("/load")
async def load(service: ServiceOf) -> Response:
    """Return the number of running and waiting samples together."""
    metrics = (await service.watch.snapshot()).engine
    return json_response({"server_load": metrics["num_running"] + metrics["num_waiting"]})


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
async def list_models(service: ServiceOf) -> Response:
    """List the model under all its names."""
    found = [_model(service, name) for name in service.names]
    return json_response({"object": "list", "data": found})


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, service: ServiceOf) -> Response:
    """Return the model under one of its names."""
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
