"""EngineConfig: every option of an `LLM`, written once: its type, its default and what it means.

The signature and docstring of `LLM`, the command's help and docs/options.md are made from it.
"""

import dataclasses
import difflib
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from jaxspec import checks
from jaxspec.checks import shown
from jaxspec.config import TOKENS_PER_STEP, StepShapes
from jaxspec.speculation import SpeculativeConfig

_MAX = 2**24  # rows, tokens or pages, of which arrays are made
_MAX_BUCKETS = 1024


def option(default: Any, help: str, *, none: str | None = None, least: int | None = 1) -> Any:
    """A field of `EngineConfig`: its default, what it means, and what None stands for.

    `least`: the smallest integer that it may be; None: any that fits in 64 bits.
    """
    metadata = {"help": help, "none": none, "least": least}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The options of an `LLM`, checked as far as that needs neither a model nor a device.

    Raises:
        ValueError: a word, a size or the speculation breaks a rule.
    """

    model: str | Path | None = option(
        None,
        "a folder with config.json and safetensors, or a Hugging Face hub id",
        none="the embedded model",
    )
    _: dataclasses.KW_ONLY
    revision: str | None = option(
        None, "the branch, tag or commit to take of a hub id", none="main"
    )
    speculative_config: SpeculativeConfig | dict[str, Any] | Literal["auto"] | None = option(
        "auto",
        "a SpeculativeConfig or a dict of its fields; auto drafts 3 tokens with the checkpoint's "
        "own head, if it has one; None drafts none",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto",
        "auto reads the checkpoint's weights; dummy draws random ones on the device, for which "
        "config.json is enough",
    )
    dtype: Literal["float32", "bfloat16", "auto"] = option(
        "auto",
        "dtype of weights: float32, bfloat16 or auto (bfloat16 on a GPU, float32 elsewhere)",
    )
    kv_dtype: Literal["bfloat16", "float8_e4m3fn"] | None = option(
        None,
        "dtype of cached keys and values: bfloat16 or float8_e4m3fn, unscaled and cut off at 448",
        none="the model's",
    )
    state_policy: Literal["auto", "snapshot", "replay"] = option(
        "auto",
        "how recurrent states survive a verify: snapshot keeps one a token, replay one a sample "
        "and a ring of what the tokens since then added, which takes less memory with drafts; auto "
        "is replay where kernels run",
    )
    state_dtype: Literal["float32", "float16", "bfloat16"] = option(
        "float32", "dtype of recurrent states: float32, float16 or bfloat16; 16 bits round"
    )
    max_num_seqs: int = option(8, "samples that run at once")
    max_model_len: int | None = option(
        None,
        "most tokens of a prompt and its completion together",
        none="as many as the model was made for, but not above 8192",
    )
    max_in_flight: int = option(
        2, "dispatches that may be uncollected; 0 is the synchronous engine", least=0
    )
    steps_per_dispatch: int = option(
        1,
        "decode steps that the host hands over at once while no prompt waits; the tokens are the "
        "same and come in larger portions",
    )
    page_size: int = option(16, "tokens of a KV page")
    num_pages: int | None = option(
        None,
        "pages of the pool, the null page counted in",
        none="as many as max_num_seqs samples of max_model_len need, or as fit",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of what JAX may take of a GPU's memory that weights and caches may fill, in (0, 1]; "
        "JAX may take three quarters, or what XLA_PYTHON_CLIENT_MEM_FRACTION says",
    )
    max_num_batched_tokens: int | None = option(
        None,
        "verified and prefilled tokens of a step together",
        none="a verify of all rows, and 512 tokens of prompts; where kernels run, up to 4096 of "
        "them for a mixture of experts, but no more than max_prefill_seqs prompts can have",
    )
    long_prefill_token_threshold: int | None = option(
        None, "most prompt tokens of one request in a step", none="no such limit"
    )
    max_prefill_seqs: int = option(4, "prompts that one step may advance")
    decode_buckets: Sequence[int] | None = option(
        None,
        "numbers of decode rows that get compiled, ascending to max_num_seqs",
        none="1, 4, 16, ... and max_num_seqs",
    )
    prefill_buckets: Sequence[int] | None = option(
        None,
        "numbers of prompt tokens that get compiled, ascending",
        none="64 and as many as a step may have; with 512 and 2048 between them if that is 2048 "
        "or more",
    )
    seed: int = option(0, "seed of requests that bring none", least=None)
    compilation_cache: str | Path | None = option(
        None, "folder of compiled programs", none="the user's cache folder"
    )
    flight_recorder: Literal["full", "hashed", "off"] = option(
        "full",
        "what is kept of every step for `python -m jaxspec replay`, in memory until a step fails: "
        "full keeps token ids, hashed puts made-up ones into files, off keeps nothing",
    )
    flight_folder: str | Path | None = option(
        None,
        "folder of the files that the flight recorder writes when a step fails",
        none="the user's state folder",
    )
    show_progress: bool | None = option(
        None, "whether progress bars are drawn", none="if standard error is a terminal"
    )

    @staticmethod
    def of(model: str | Path | None, options: Mapping[str, Any]) -> "EngineConfig":
        """The configuration of these options.

        Raises:
            TypeError: there is no option of such a name.
            ValueError: as in `EngineConfig`.
        """
        for name in options:
            if name not in OPTIONS:
                near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.0)[0]
                raise TypeError(
                    f"LLM has no option {name!r}; the nearest is {near!r}. docs/options.md and "
                    "help(LLM) list all of them."
                )
        return EngineConfig(model, **options)

    def __post_init__(self) -> None:
        """Check each option by its type, and keep it as Python's own type."""
        for field in OPTIONS.values():
            object.__setattr__(self, field.name, _read(field, getattr(self, field.name)))
        if self.revision is not None and self.model is None:
            raise ValueError(
                "revision chooses among the versions of a hub id, and the embedded model has one. "
                "Leave revision out, or give a hub id as model."
            )

    def step_shapes(
        self, *, max_positions: int, num_drafts: int, tokens_per_step: int = TOKENS_PER_STEP
    ) -> StepShapes:
        """The sizes of programs for a model with these of its own; there may be fewer pages later.

        Raises:
            ValueError: sizes do not go together, or exceed the model's.
        """
        max_model_len = self.max_model_len
        if max_model_len is None:
            max_model_len = min(max_positions, 8192)
        elif max_model_len > max_positions:
            raise ValueError(
                f"max_model_len must not exceed the model's {max_positions} positions, got "
                f"{max_model_len}."
            )
        return StepShapes.of(
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages,
            num_drafts=num_drafts,
            decode_rows=self.decode_buckets,
            prefill_tokens=self.prefill_buckets,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tokens_per_step=tokens_per_step,
            max_prefill_seqs=self.max_prefill_seqs,
            steps_per_dispatch=self.steps_per_dispatch,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
        )


OPTIONS = {field.name: field for field in dataclasses.fields(EngineConfig)}
"""The fields of `EngineConfig` by name, in order; `meaning` and `default_of` say what they hold."""

SIGNATURE = inspect.signature(EngineConfig).replace(return_annotation=inspect.Signature.empty)
"""What may be passed to `LLM`."""


def meaning(name: str) -> str:
    """What an option is, in one line without an end."""
    return OPTIONS[name].metadata["help"]


def default_of(name: str) -> str:
    """An option's default in words: "8", or what None stands for."""
    default = OPTIONS[name].default
    return OPTIONS[name].metadata["none"] if default is None else str(default)


def listing() -> str:
    """All options as a docstring lists arguments."""
    paragraphs = (f"{name}: {meaning(name)} (default: {default_of(name)})." for name in OPTIONS)
    return "\n".join(
        textwrap.fill(text, 92, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for text in paragraphs
    )


def _read(field: dataclasses.Field, value: Any) -> Any:
    """`value` as the type of the option says; `_READERS` has what reads each type.

    Raises:
        ValueError: it is of no such type, or breaks a rule.
    """
    kinds = _alternatives(field.type)
    if value is None and NoneType in kinds:
        return None
    origins = {get_origin(kind) or kind for kind in kinds}
    for kind, reader in _READERS.items():
        if kind in origins:
            return reader(field, value)
    raise TypeError(f"The type of the option {field.name} needs a line in _READERS: {kinds}.")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """What `kind` is a union of, which may be itself alone."""
    is_whole = not get_args(kind) or get_origin(kind) in (Literal, Sequence)
    return (kind,) if is_whole else get_args(kind)


def _speculation(field: dataclasses.Field, value: Any) -> Any:
    return SpeculativeConfig.read(value)


def _word(field: dataclasses.Field, value: Any) -> str:
    """One of those that the type lists, such as `Literal["auto", "dummy"]`."""
    kinds = _alternatives(field.type)
    words = [word for kind in kinds for word in get_args(kind)]
    if isinstance(value, str) and value in words:
        return value
    *others, last = map(repr, words)
    if NoneType in kinds:
        others, last = [*others, last], f"None, {field.metadata['none']}"
    raise ValueError(f"{field.name} must be {', '.join(others)} or {last}, got {shown(value)}.")


def _integer(field: dataclasses.Field, value: Any) -> int:
    least = field.metadata["least"]
    if least is None:
        return checks.seed_bits(field.name, value)
    return checks.integer(field.name, value, least, _MAX)


def _number(field: dataclasses.Field, value: Any) -> float:
    number = checks.real(value)
    if not math.isfinite(number):
        raise ValueError(f"{field.name} must be a finite number, got {shown(value)}.")
    return number


def _sizes(field: dataclasses.Field, value: Any) -> tuple[int, ...]:
    sizes = checks.items(value, _MAX_BUCKETS)
    if sizes is None or len(sizes) > _MAX_BUCKETS:
        raise ValueError(
            f"{field.name} must be a list of at most {_MAX_BUCKETS} sizes, got {shown(value)}."
        )
    return tuple(checks.integer(f"Each of {field.name}", size, 1, _MAX) for size in sizes)


# The first of these that is in a union reads its value.
_READERS: dict[Any, Callable[[dataclasses.Field, Any], Any]] = {
    SpeculativeConfig: _speculation,
    Path: lambda field, value: checks.path(field.name, value),
    str: lambda field, value: checks.text(field.name, value),
    bool: lambda field, value: checks.boolean(field.name, value),
    int: _integer,
    float: _number,
    Sequence: _sizes,
    Literal: _word,
}
