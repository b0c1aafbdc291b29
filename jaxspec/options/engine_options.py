"""EngineConfig: the type, default and meaning of every option of `LLM`.

The signature and docstring of `LLM`, the command-line help and docs/options.md are generated from
it.
"""

import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxspec.options import SpeculativeConfig
from jaxspec.options.option_values import read
from jaxspec.options.vllm_options import RENAMED, UNDERSTOOD, translated
from jaxspec.plan.step_shapes import ModelSizes, StepShapes


def option(default: Any, help: str, *, none: str | None = None, least: int | None = 1) -> Any:
    """Declare a field of `EngineConfig`.

    Args:
        default: The default value.
        help: The meaning of the option, for its documentation.
        none: The meaning of None, if None is the default.
        least: Smallest integer allowed; None allows any that fits in 64 bits.
    """
    metadata = {"help": help, "none": none, "least": least}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Options of an `LLM`, validated as far as possible without the model and the device.

    Raises:
        ValueError: an option is invalid.
    """

    model: str | Path | None = option(
        None,
        "a folder with config.json and safetensors, a GGUF file, or a Hugging Face hub id",
        none="the embedded model",
    )
    _: dataclasses.KW_ONLY
    revision: str | None = option(
        None, "the branch, tag or commit to take of a hub id", none="main"
    )
    tokenizer: str | Path | None = option(
        None, "a folder with tokenizer.json, a GGUF file, or a hub id", none="the model's"
    )
    skip_tokenizer_init: bool = option(
        False, "whether to do without a tokenizer: then token ids go in, and come out alone"
    )
    generation_config: str | Path = option(
        "auto",
        "what a call without SamplingParams does: auto takes the model's generation_config.json, "
        "vllm the defaults of SamplingParams, and a folder its generation_config.json",
    )
    speculative_config: SpeculativeConfig | dict[str, Any] | str | None = option(
        "auto",
        "how to draft: a method's name, a dict with the method and its options, or a "
        "SpeculativeConfig (docs/speculation.md); auto drafts with the checkpoint's own head, if "
        "it has one; None does not",
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
        2,
        "steps behind the oldest dispatch with which it is collected; 0 is the synchronous engine",
        least=0,
    )
    steps_per_dispatch: int | Literal["auto"] = option(
        "auto",
        "decode steps that the host hands over at once while no prompt waits and nobody reads a "
        "stream; the tokens are the same and come in larger portions; auto is 1; where kernels "
        "run it is how often the weights go into 80 GB, as a power of two and at most 8",
    )
    page_size: int = option(16, "tokens of a KV page")
    num_pages: int | None = option(
        None,
        "pages of the pool, the null page counted in",
        none="as many as max_num_seqs samples of max_model_len need, or as fit",
    )
    enable_prefix_caching: bool | None = option(
        None,
        "whether prompts that begin as earlier ones did are computed from where they part "
        "(docs/prefix-caching.md)",
        none="wherever that can be; a model with recurrent states gives prefix_cache_share",
    )
    mamba_cache_mode: Literal["none", "align", "all"] = option(
        "all",
        "where recurrent states are kept for that: all is where prompts part, or the next turn of "
        "a chat will, and at the ends of prompts and outputs; align is at multiples of "
        "checkpoint_interval; none is nowhere, so that a model with such states finds no prefix",
    )
    prefix_cache_share: float = option(
        0.2, "share of the memory of caches that kept states take, in [0, 1); at least two of them"
    )
    checkpoint_interval: int | None = option(
        None,
        "tokens of a prompt between states that are kept on the way",
        none="none are kept; with align 32 pages",
    )
    kv_offloading_size: float = option(
        0.0,
        "GiB of the host's memory for prefixes that the device has no room for "
        "(docs/prefix-caching.md); 0: none are kept there",
    )
    kv_offloading_folder: str | Path | None = option(
        None,
        "folder of files for what that memory has no room for; files of other models in it are "
        "deleted",
        none="there are no files",
    )
    kv_offloading_folder_size: float = option(
        10.0, "GiB that the files in kv_offloading_folder may have"
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of what JAX may take of a GPU's memory that weights and caches may fill, in (0, 1]; "
        "JAX may take three quarters, or what XLA_PYTHON_CLIENT_MEM_FRACTION says",
    )
    max_num_batched_tokens: int | None = option(
        None,
        "verified and prefilled tokens of a step together",
        none="a verify of all rows, and 512 tokens of prompts; where kernels run 2048 of them, or "
        "512 to 4096 for a mixture of experts, but no more than max_prefill_seqs prompts can have",
    )
    long_prefill_token_threshold: int | None = option(
        None, "most prompt tokens of one request in a step", none="no such limit"
    )
    max_prefill_seqs: int | None = option(
        None,
        "prompts that one step may advance",
        none="one for each 256 tokens that a step of the model may have, at least 4",
    )
    max_step_ms: float | None = option(
        None,
        "most milliseconds that a step with prompts takes while rows decode: of prefill_buckets "
        "the largest that keeps to it is used, but at least the smallest; now and then one step of "
        "a larger one is tried again",
        none="no such limit",
    )
    decode_buckets: Sequence[int] | None = option(
        None,
        "numbers of decode rows that get compiled, ascending to max_num_seqs",
        none="1, 4, 16, ... and max_num_seqs",
    )
    prefill_buckets: Sequence[int] | None = option(
        None,
        "numbers of prompt tokens that get compiled, ascending",
        none="64 and as many as a step may have; with 256, 512 and 2048 between them if that is "
        "2048 or more",
    )
    seed: int = option(0, "seed of requests that bring none", least=None)
    background_compilation: bool = option(
        True, "compile what serves any request first, and cheaper programs in the background"
    )
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
        """Build the configuration from options under jaxspec's or vLLM's names.

        Raises:
            TypeError: an option has an unknown name.
            ValueError: as in `EngineConfig`, or a vLLM option requests an unsupported feature.
        """
        options = translated(options)
        for name in options:
            if name not in OPTIONS:
                known = [*OPTIONS, *RENAMED, *UNDERSTOOD]
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(
                    f"LLM has no option {name!r}; the nearest is {near!r}. docs/options.md and "
                    "help(LLM) list all of them."
                )
        return EngineConfig(model, **options)

    def __post_init__(self) -> None:
        """Validate each option against its type and store it as a Python value."""
        for field in OPTIONS.values():
            object.__setattr__(self, field.name, read(field, getattr(self, field.name)))
        if self.max_step_ms is not None and self.max_step_ms <= 0:
            raise ValueError(f"max_step_ms must be above 0, got {self.max_step_ms}.")
        if not 0 <= self.prefix_cache_share < 1:
            raise ValueError(
                f"prefix_cache_share must be in [0, 1), got {self.prefix_cache_share}: it is a "
                "share of the memory that pages take as well."
            )
        for name in ("kv_offloading_size", "kv_offloading_folder_size"):
            if (size := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be at least 0 GiB, got {size}.")
            if size == 0 and self.kv_offloading_folder is not None:
                raise ValueError(
                    "kv_offloading_folder is for what kv_offloading_size has no room for, and "
                    f"{name} is 0. Give it some GiB, or leave the folder out."
                )
        if self.revision is not None and self.model is None:
            raise ValueError(
                "revision chooses among the versions of a hub id, and the embedded model has one. "
                "Leave revision out, or give a hub id as model."
            )

    def step_shapes(self, own: ModelSizes, draft_counts: Sequence[int]) -> StepShapes:
        """Return the shapes of the compiled programs; the runner may still lower `num_pages`.

        Args:
            own: Limits and preferred sizes of the model.
            draft_counts: Numbers of drafts per verify step that programs are compiled for.

        Raises:
            ValueError: sizes contradict each other or exceed the model's.
        """
        max_model_len = self.max_model_len
        if max_model_len is None:
            max_model_len = min(own.max_positions, 8192)
        elif max_model_len > own.max_positions:
            raise ValueError(
                f"max_model_len must not exceed the model's {own.max_positions} positions, got "
                f"{max_model_len}."
            )
        steps = self.steps_per_dispatch
        return StepShapes.of(
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages,
            draft_counts=draft_counts,
            decode_rows=self.decode_buckets,
            prefill_tokens=self.prefill_buckets,
            max_num_batched_tokens=self.max_num_batched_tokens,
            tokens_per_step=own.tokens_per_step,
            max_prefill_seqs=self.max_prefill_seqs,
            steps_per_dispatch=own.steps_per_dispatch if steps == "auto" else steps,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
        )


OPTIONS = {field.name: field for field in dataclasses.fields(EngineConfig)}
"""Fields of `EngineConfig` by name, in order; see `meaning` and `default_of` for their texts."""

SIGNATURE = inspect.signature(EngineConfig).replace(return_annotation=inspect.Signature.empty)
"""Signature of `LLM`."""


def meaning(name: str) -> str:
    """Return the meaning of an option, in one line without a final period."""
    return OPTIONS[name].metadata["help"]


def default_of(name: str) -> str:
    """Return an option's default as text, such as "8", or the meaning of a default of None."""
    default = OPTIONS[name].default
    return OPTIONS[name].metadata["none"] if default is None else str(default)


def listing() -> str:
    """Return all options formatted as the `Args` section of a docstring."""
    paragraphs = (f"{name}: {meaning(name)} (default: {default_of(name)})." for name in OPTIONS)
    return "\n".join(
        textwrap.fill(text, 92, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for text in paragraphs
    )
