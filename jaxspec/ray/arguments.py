"""Arguments of the application: options of `jaxspec serve` and of its deployments on Ray."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.checks import shown
from jaxspec.options import engine_options as engine
from jaxspec.options.engine_options import EngineConfig, option
from jaxspec.options.option_values import read
from jaxspec.server.command import kinds_of, options_of, parser
from jaxspec.server.options import OPTIONS as SERVER
from jaxspec.server.options import ServerOptions


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Replicas, their resources and how requests are distributed.

    Raises:
        ValueError: an option is invalid.
    """

    num_replicas: int = option(
        1, "number of replicas; the smallest number with max_replicas", least=0
    )
    max_replicas: int | None = option(
        None, "largest number of replicas, between which Ray scales", none="no autoscaling"
    )
    target_ongoing_requests: float = option(
        8.0, "requests per replica that autoscaling aims for; about max_num_seqs"
    )
    upscale_delay_s: float = option(30.0, "seconds of load before replicas are added")
    downscale_delay_s: float = option(600.0, "seconds without load before replicas are removed")
    max_ongoing_requests: int = option(
        256, "maximum number of requests sent to a replica; others wait in the ingress"
    )
    max_imbalance: int = option(
        4,
        "number of requests by which the replica that has a prompt's prefix may exceed the least "
        "loaded one",
        least=0,
    )
    num_ingresses: int = option(1, "number of processes that check keys and distribute requests")
    num_gpus: int | None = option(
        None, "GPUs per replica; 0 for CPUs", none="tensor_parallel_size", least=0
    )
    num_cpus: float = option(1.0, "CPUs that Ray reserves per replica")

    def __post_init__(self) -> None:
        """Validate each option and convert it to a plain Python type."""
        for field in OPTIONS.values():
            value = read(field, getattr(self, field.name))
            if isinstance(value, float) and not value > 0:
                raise ValueError(f"{field.name} must be above 0, got {value}.")
            object.__setattr__(self, field.name, value)
        if self.max_replicas is None and self.num_replicas == 0:
            raise ValueError("num_replicas must be at least 1 without max_replicas, got 0.")
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(
                f"max_replicas must be at least num_replicas, {self.num_replicas}, got "
                f"{self.max_replicas}."
            )


OPTIONS = {field.name: field for field in dataclasses.fields(RayOptions)}
"""Option fields by name, in order."""
_FIELDS = {**engine.OPTIONS, **SERVER, **OPTIONS}
_REFUSED = (
    *("host", "port", "api_processes", "data_parallel_size"),
    *("nnodes", "node_rank", "master_addr", "master_port", "nodes_key_file"),
    *("exit_on_failure", "max_stored_responses", "enable_rollouts", "weights_folders"),
)


class Arguments(NamedTuple):
    """Validated arguments of the application.

    Attributes:
        ray: Options of the deployments.
        server: Options of the server. Stored responses are disabled, since the next turn may be
            sent to another replica.
        engine: Arguments of each replica's `AsyncLLM`.
    """

    ray: RayOptions
    server: ServerOptions
    engine: dict[str, Any]

    @property
    def num_gpus(self) -> int:
        """Number of GPUs per replica."""
        given = self.ray.num_gpus
        return self.engine["tensor_parallel_size"] if given is None else given


def read_arguments(given: Mapping[str, Any]) -> Arguments:
    """Validate the arguments of an app builder, without a cluster, a model or a device.

    Raises:
        ValueError: an argument is unknown or invalid, or is an option that Ray replaces.
    """
    args = parser().parse_args([])
    ray = dict[str, Any]()
    for name, value in given.items():
        if name in _REFUSED:
            raise ValueError(
                f"{name} must be left out under Ray, got {shown(value)}. Ray has the port, the "
                "processes (num_replicas) and restarts, a replica is on one host (nnodes=1), and "
                "replicas share neither stored responses nor new weights."
            )
        if name not in OPTIONS and name not in vars(args):
            known = [*vars(args), *OPTIONS]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"The application has no option {name!r}; the nearest is {near!r}. docs/ray.md "
                "lists them."
            )
        if name in OPTIONS:
            ray[name] = _parsed(name, value)
        else:
            setattr(args, name, _parsed(name, value))
    server, llm_options = options_of(args)
    of_engine = llm_options.keys() & engine.OPTIONS.keys()
    EngineConfig.of(args.model, {name: llm_options[name] for name in of_engine})
    server = dataclasses.replace(server, max_stored_responses=0)
    return Arguments(RayOptions(**ray), server, {"model": args.model, **llm_options})


def _parsed(name: str, value: Any) -> Any:
    """Return `value`; a text for an option that is no text is read as JSON."""
    if name == "speculative_config" and isinstance(value, Mapping):
        return json.dumps(dict(value))  # as on the command line
    kinds = set(kinds_of(_FIELDS[name].type)) if name in _FIELDS else {int}
    if tuple in kinds and isinstance(value, str):
        return [value]
    if not isinstance(value, str) or kinds & {str, Path, tuple}:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value  # a word such as "auto", or refused by its option
