"""`ReplicatedEngine`: an `LLMEngine` of several processes (`data_parallel_size`)."""

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.api.llm_engine import Kind, LLMEngine
from jaxspec.api.processes.replica_group import ReplicaGroup
from jaxspec.api.processes.replica_session import ReplicaSession
from jaxspec.api.weight_updates import SpecKind, WeightUpdate
from jaxspec.engine.admission import Admission
from jaxspec.engine.engine import StepTimes
from jaxspec.engine.metrics import EngineSnapshot, Metric
from jaxspec.options.engine_options import EngineConfig
from jaxspec.process import check_process, first_process
from jaxspec.requests.outputs import RequestOutput, Sample, Stream
from jaxspec.requests.prompts import Prompt
from jaxspec.requests.sampling_features import features_named
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.transfer import RequestState


def replicated(model: str | Path | None, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of engines in processes of their own.

    Raises:
        TypeError, ValueError: as `EngineConfig.of`, or there are weights from memory.
    """
    if given := {"weights", "weight_version"} & options.keys():
        raise ValueError(
            f"{' and '.join(sorted(given))} must be left out with data_parallel_size above 1: the "
            "engines are other processes. Start one LLM per GPU."
        )
    return EngineConfig.of(model, options)


class ReplicatedEngine(LLMEngine):
    """Engines in processes of their own, with the calls of one; prompts are tokenized here.

    The seeds of prompts are drawn here, too, so the tokens are those of one engine.

    Attributes:
        group: The processes.
    """

    session: ReplicaSession

    def __init__(self, config: EngineConfig, admission: Admission, stream_interval: int = 1):
        """Start the processes and wait until their engines are loaded.

        Args:
            config: Options of the engines.
            admission: Counts the requests.
            stream_interval: As in `AsyncLLM`.
        """
        check_process(first_process())
        progress = config.show_progress
        self._show_progress = sys.stderr.isatty() if progress is None else progress
        self.group = ReplicaGroup(config, admission, stream_interval)
        weakref.finalize(self, self.group.stop)
        spec = self.group.spec
        self.inputs = spec.make_inputs()
        self.tokenizer, self.vocab_size = self.inputs.tokenizer, spec.shapes.vocab_size
        self.model_name, self.shapes, self.limits = spec.model_name, spec.shapes, spec.limits
        self.session = ReplicaSession(self.group, self.shapes)
        self._added = dict[str, Sequence[Sample]]()  # unfinished requests of `add_request`, by id
        self._size = config.data_parallel_size

    def close(self) -> None:
        """Abort all requests and end the processes. Later calls raise RuntimeError."""
        self.session.close()

    def warm_up(self, feature_sets: Kind | Iterable[Kind] | None = None) -> None:
        """Compile all programs for some sampling features in all replicas.

        Args:
            feature_sets: As in `LLMEngine.warm_up`.

        Raises:
            ValueError, RuntimeError: as in `LLMEngine.warm_up`.
        """
        self.session.require_usable()
        if feature_sets is not None:
            features_named(feature_sets)  # raises before a replica is asked
        self.group.prepare("warm_up", feature_sets)

    def get_ready(self) -> None:
        """Compile programs that serve any request in all replicas.

        Raises:
            RuntimeError: as in `LLMEngine.get_ready`.
        """
        self.session.require_usable()
        self.group.prepare("get_ready")

    def admit(self, samples: Sequence[Sample]) -> None:
        """Check samples against the engines' limits; a replica compiles the programs they need.

        Args:
            samples: Samples from `inputs`, or from a twin of it in another process.

        Raises:
            ValueError, RuntimeError: as in `LLMEngine.admit`.
        """
        self.session.require_usable()
        self.session.check(samples)

    def step(self) -> list[RequestOutput]:
        """Wait for new output of the requests of `add_request`, and return it.

        Returns:
            One output per request with news, as `SamplingParams.output_kind` specifies.

        Raises:
            RuntimeError: as in `LLM.generate`.
            ServiceError: a replica ended; its requests end with "error" in later calls.
        """
        self.session.require_usable()
        outputs = list[RequestOutput]()
        for buffer, deltas in self.session.step():
            samples = buffer.samples
            is_known = self._added.get(buffer.request_id) is samples  # it was not aborted
            output = RequestOutput.due(samples, deltas) if deltas and is_known else None
            if output is not None:
                outputs.append(output)
            if is_known and all(sample.is_taken for sample in samples):
                self._added.pop(buffer.request_id, None)
        return outputs

    def reset_prefix_cache(self) -> bool:
        """Drop the cached prefixes of all replicas.

        Returns:
            True, as in vLLM.

        Raises:
            RuntimeError: as in `LLMEngine.reset_prefix_cache`.
        """
        self.session.require_usable()
        self.group.reset_prefix_cache()
        return True

    def start_profile(self) -> None:
        """Start a profile in all replicas; raises as `LLMEngine.start_profile`."""
        self.session.require_usable()
        self.group.call("start_profile")

    def stop_profile(self) -> None:
        """End the profiles, each in a subfolder; raises as `LLMEngine.stop_profile`."""
        self.session.require_usable()
        self.group.call("stop_profile")

    # Metrics

    @property
    def num_running(self) -> int:
        """Number of samples that have a row in a replica."""
        return self.snapshot().engine["num_running"]

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of pages held by requests, the mean over the replicas."""
        return self.snapshot().engine["kv_cache_usage"]

    def snapshot(self) -> EngineSnapshot:
        """Return the sums of all metrics over the replicas, and the mean of `kv_cache_usage`.

        Counts of replicas that have ended are included, up to the last call before.

        Raises:
            RuntimeError: as in `LLMEngine.metrics`.
        """
        self.session.require_usable()
        return self.group.snapshot()

    def metrics(self) -> dict[str, Any]:
        """Return `LLM.metrics`, summed over the replicas.

        Raises:
            RuntimeError: as in `LLMEngine.metrics`.
        """
        return self.snapshot().engine

    def get_metrics(self) -> list[Metric]:
        """Return the metrics shared with vLLM, summed over the replicas.

        Raises:
            RuntimeError: as in `LLMEngine.get_metrics`.
        """
        return self.snapshot().by_vllm

    # Calls of a single engine

    def memory_map(self) -> str:
        """Raise ValueError: each replica has its own devices."""
        raise self._refusal("memory_map", "metrics()['memory_bytes'] has the sums")

    def save_flight(self, path: str | Path) -> Path:
        """Raise ValueError: each replica records its own flight."""
        raise self._refusal("save_flight", "A failed step saves the flight of its replica")

    def restart_flight(self) -> None:
        """Raise ValueError: each replica records its own flight."""
        raise self._refusal("restart_flight", "Debug with one engine")

    def trace(self) -> AbstractContextManager[list[StepTimes]]:
        """Raise ValueError: each replica has its own steps."""
        raise self._refusal("trace", "Trace one engine, or call start_profile")

    @property
    def weight_version(self) -> str:
        """The version of the weights, which no call replaces."""
        return "0"

    def weight_specs(self, kind: SpecKind = "published") -> dict[str, jax.ShapeDtypeStruct]:
        """Raise ValueError: replicas keep the weights of their checkpoint."""
        raise self._refusal("weight_specs", "Start one LLM per GPU to update weights")

    def update_weights(self, weights: Any = None, **options: Any) -> WeightUpdate:
        """Raise ValueError: replicas keep the weights of their checkpoint."""
        raise self._refusal("update_weights", "Start one LLM per GPU to update weights")

    def export_weights(self) -> dict[str, np.ndarray]:
        """Raise ValueError: replicas keep the weights of their checkpoint."""
        raise self._refusal("export_weights", "Start one LLM per GPU to update weights")

    def pause(self, mode: Any = "keep", **options: Any) -> None:
        """Raise ValueError: replicas are not paused."""
        raise self._refusal("pause", "Start one LLM per GPU to pause it")

    def resume(self) -> None:
        """Raise ValueError: replicas are not paused."""
        raise self._refusal("resume", "Start one LLM per GPU to pause it")

    def sleep(self, level: Any = 1, mode: Any = "keep", **options: Any) -> None:
        """Raise ValueError: replicas keep their memory."""
        raise self._refusal("sleep", "Start one LLM per GPU to let it sleep")

    def wake_up(self, tags: Any = None) -> None:
        """Raise ValueError: replicas keep their memory."""
        raise self._refusal("wake_up", "Start one LLM per GPU to let it sleep")

    def export_request(self, request_id: str) -> RequestState:
        """Raise ValueError: requests migrate between single engines."""
        raise self._refusal("export_request", "Start one LLM per GPU to migrate between them")

    def prefill(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
    ) -> RequestState:
        """Raise ValueError: requests migrate between single engines."""
        raise self._refusal("prefill", "Start one LLM per GPU to migrate between them")

    def import_request(self, state: RequestState) -> Stream:
        """Raise ValueError: requests migrate between single engines."""
        raise self._refusal("import_request", "Start one LLM per GPU to migrate between them")

    def _refusal(self, call: str, instead: str) -> ValueError:
        return ValueError(
            f"{call} is a call of a single engine, got data_parallel_size={self._size}. {instead}; "
            "or use data_parallel_size=1."
        )
