"""POST /reset_prefix_cache, /start_profile and /stop_profile, GET /server_info: the engine."""

import dataclasses
import platform
from typing import Any, Literal

from starlette.responses import Response

from jaxspec.flight.about import VERSION, version_of
from jaxspec.server.generation.service import Service, ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router

router = make_router()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(service: ServiceOf) -> Response:
    """Drop all cached prefixes; running requests continue."""
    await service.llm.reset_prefix_cache()
    return Response()


@router.post("/start_profile")
async def start_profile(service: ServiceOf) -> Response:
    """Start a profile of JAX; needs the option --profiler-folder."""
    try:
        await service.llm.start_profile()
    except ValueError as error:
        raise ApiError.of_value(error) from error
    return Response()


@router.post("/stop_profile")
async def stop_profile(service: ServiceOf) -> Response:
    """End the profile and write it to the folder."""
    try:
        await service.llm.stop_profile()
    except ValueError as error:
        raise ApiError.of_value(error) from error
    return Response()


@router.get("/server_info")
async def server_info(
    service: ServiceOf, config_format: Literal["text", "json"] = "text"
) -> Response:
    """Return the engine's sizes under vLLM's names, its own, and the versions of its packages."""
    llm, config = service.llm, _config(service)
    metrics = (await service.watch.snapshot()).engine if llm.is_healthy else {}
    versions = {name: version_of(name) for name in ("jax", "jaxlib", "numpy")}
    return json_response(
        {
            "version": VERSION,
            "vllm_config": str(config) if config_format == "text" else config,
            "shapes": llm.shapes.compiled(),
            "limits": dataclasses.asdict(llm.limits),
            "implementations": metrics.get("implementations", {}),
            "memory_bytes": metrics.get("memory_bytes", {}),
            "system_env": {"python": platform.python_version(), **versions},
        }
    )


def _config(service: Service) -> dict[str, dict[str, Any]]:
    shapes, limits = service.llm.shapes, service.llm.limits
    return {
        "model_config": {"model": service.names[0], "max_model_len": shapes.max_model_len},
        "cache_config": {
            "block_size": shapes.page_size,
            "num_gpu_blocks": shapes.num_pages - 1,  # without the null page
            "enable_prefix_caching": limits.caches_prefixes,
        },
        "scheduler_config": {
            "max_num_seqs": shapes.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
        },
        "parallel_config": {"data_parallel_size": service.llm.num_replicas},
        "speculative_config": {"num_speculative_tokens": shapes.num_drafts},
    }
