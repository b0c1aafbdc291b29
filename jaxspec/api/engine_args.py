"""`EngineArgs` and `AsyncEngineArgs`: the options of an engine as one value, as in vLLM."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxspec.options.engine_options import OPTIONS, EngineConfig


@dataclasses.dataclass(frozen=True, init=False)
class EngineArgs(EngineConfig):
    """Options of an `LLM`, under jaxspec's or vLLM's names, validated without the model.

    Fields have jaxspec's names. `LLMEngine.from_engine_args(args)` creates an engine with them, and
    so does `LLM(**dataclasses.asdict(args))` unless `logits_processors` has instances: `asdict`
    converts instances that are dataclasses to dicts.

    Args:
        model: A folder, a GGUF file or a hub id; None means the embedded model.
        **options: Options of `LLM`.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is invalid.
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        """Validate the options and convert them to jaxspec's names."""
        config = EngineConfig.of(model, options)
        super().__init__(**{name: getattr(config, name) for name in OPTIONS})

    def options(self) -> dict[str, Any]:
        """Return all options by name, as keyword arguments of `LLM` or `AsyncLLM`."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, init=False)
class AsyncEngineArgs(EngineArgs):
    """Options of an `AsyncLLM`: those of `EngineArgs` and the limits of its queue.

    Args:
        model: As in `EngineArgs`.
        max_num_queued_reqs: As in `AsyncLLM`.
        max_num_queued_tokens: As in `AsyncLLM`.
        queue_timeout: As in `AsyncLLM`.
        stream_interval: As in `AsyncLLM`.
        **options: As in `EngineArgs`.

    Raises:
        TypeError, ValueError: as in `EngineArgs`. `AsyncLLM` validates the limits.
    """

    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    queue_timeout: float | None = None
    stream_interval: int = 1

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        queue_timeout: float | None = None,
        stream_interval: int = 1,
        **options: Any,
    ):
        """Validate the options and convert them to jaxspec's names."""
        super().__init__(model, **options)
        for name, value in (
            ("max_num_queued_reqs", max_num_queued_reqs),
            ("max_num_queued_tokens", max_num_queued_tokens),
            ("queue_timeout", queue_timeout),
            ("stream_interval", stream_interval),
        ):
            object.__setattr__(self, name, value)
