"""The Ray Serve application: an ingress and replicas, with their resources and scaling."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import dataclasses
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from jaxspec.ray.arguments import Arguments, read_arguments
from jaxspec.ray.ingress import Ingress
from jaxspec.ray.replica import Replica

_MAX_STREAMS = 10_000  # per ingress
_HEALTH_CHECK_SECONDS = 2.0


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application of `jaxspec.ray.app`.

    Raises:
        ValueError: an option is unknown or invalid.
    """
    given = read_arguments(args)
    # The ingress checks keys and origins, so replicas, which Ray alone can reach, do not.
    inner = dataclasses.replace(given.server, api_key=(), api_key_file=None, allowed_origins=())
    replicas = serve.deployment(**_settings(given))(Replica).bind(inner, given.engine)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=given.ray.num_ingresses,
        max_ongoing_requests=_MAX_STREAMS,
        graceful_shutdown_timeout_s=given.server.shutdown_timeout,
    )(serve.ingress()(Ingress))
    return ingress.bind(replicas, given.server)


def _settings(given: Arguments) -> dict[str, Any]:
    """Return the options of the replicas' deployment."""
    ray = given.ray
    router = RequestRouterConfig(
        request_router_class="jaxspec.ray.router.PrefixRouter",
        request_router_kwargs={"max_imbalance": ray.max_imbalance},
    )
    return {
        "name": "Replica",
        "ray_actor_options": {"num_gpus": given.num_gpus, "num_cpus": ray.num_cpus},
        "max_ongoing_requests": ray.max_ongoing_requests,
        "request_router_config": router,
        "health_check_period_s": _HEALTH_CHECK_SECONDS,
        "graceful_shutdown_timeout_s": given.server.shutdown_timeout,
        **_scaling(given),
    }


def _scaling(given: Arguments) -> dict[str, Any]:
    ray = given.ray
    if ray.max_replicas is None:
        return {"num_replicas": ray.num_replicas}
    autoscaling = {
        "min_replicas": ray.num_replicas,
        "initial_replicas": ray.num_replicas,
        "max_replicas": ray.max_replicas,
        "target_ongoing_requests": ray.target_ongoing_requests,
        "upscale_delay_s": ray.upscale_delay_s,
        "downscale_delay_s": ray.downscale_delay_s,
    }
    return {"autoscaling_config": autoscaling}
