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
from jaxspec.options.deterministic import check_deterministic
from jaxspec.options.draft_methods import ExtractHiddenStatesOptions
from jaxspec.options.option_values import read
from jaxspec.options.vllm_options import RENAMED, UNDERSTOOD, translated
from jaxspec.plan.step_shapes import TOKENS_PER_STEP, ModelSizes, SchedulerLimits, StepShapes
from jaxspec.requests.logits_processors import AnyProcessor


def option(
    default: Any,
    help: str,
    *,
    none: str | None = None,
    least: int | None = 1,
    is_hashed: bool = True,
) -> Any:
    """Declare a field of `EngineConfig`.

    Args:
        default: The default value.
        help: The meaning of the option, for its documentation.
        none: The meaning of None, if None is the default.
        least: Smallest integer allowed; None allows any that fits in 64 bits.
        is_hashed: False for values that can't be hashed, such as dicts.
    """
    metadata = {"help": help, "none": none, "least": least}
    return dataclasses.field(default=default, metadata=metadata, hash=None if is_hashed else False)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Options of an `LLM`, validated as far as possible without the model and the device.

    Raises:
        ValueError: an option is invalid.
    """

    model: str | Path | None = option(
        None,
        "folder with config.json and safetensors, GGUF file, or Hugging Face hub id",
        none="the embedded model",
    )
    _: dataclasses.KW_ONLY
    revision: str | None = option(None, "branch, tag or commit of a hub id", none="main")
    model_plugin: str | None = option(
        None,
        "module to import before the model is loaded, which calls jaxspec.register_model",
        none="no module",
    )
    tokenizer: str | Path | None = option(
        None, "folder with tokenizer files, GGUF file, or hub id", none="the model's tokenizer"
    )
    skip_tokenizer_init: bool = option(
        False, "load no tokenizer: prompts must be token ids, and outputs have no text"
    )
    generation_config: str | Path = option(
        "auto",
        "source of the sampling parameters of calls without SamplingParams: auto for the model's "
        "generation_config.json, vllm for the defaults of SamplingParams, or a folder with a "
        "generation_config.json",
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = option(
        "raw_logprobs",
        "logprobs of requests that choose none: raw_logprobs are the model's own, "
        "processed_logprobs those of the distribution that tokens are drawn from "
        "(docs/logprobs.md)",
    )
    enable_return_routed_experts: bool = option(
        False,
        "return the experts that each token was routed to, for models with experts "
        "(docs/rollouts.md#routed-experts)",
    )
    reasoning_parser: Literal["deepseek_r1", "mimo", "nemotron_v3", "qwen3"] | None = option(
        None,
        "format of the reasoning before a structured output, for models whose chat template has "
        "no </think>: deepseek_r1, mimo, nemotron_v3 or qwen3 (all the same)",
        none="the chat template's",
    )
    speculative_config: SpeculativeConfig | dict[str, Any] | str | None = option(
        "auto",
        "draft method: its name, a dict of the method and its options, or a SpeculativeConfig "
        "(docs/speculation.md); auto uses the checkpoint's draft head if it has one; None disables "
        "speculative decoding",
    )
    logits_processors: tuple[AnyProcessor, ...] | None = option(
        None,
        "processors of the logits of requests with extra_args: LogitsProcessor or "
        "HostLogitsProcessor instances, their classes, or import paths module:name "
        "(docs/sampling.md#logits-processors)",
        none="no processors",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto",
        "auto loads the checkpoint's weights; dummy initializes random weights and needs only "
        "config.json",
    )
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        "entries that replace those of config.json, as a dict or its JSON; dicts in both are "
        "merged",
        none="config.json as it is",
        is_hashed=False,
    )
    dtype: Literal["float32", "bfloat16", "auto"] = option(
        "auto",
        "dtype of the weights: float32, bfloat16 or auto (bfloat16 on a GPU, float32 elsewhere)",
    )
    quantization: (
        Literal[
            "dequantise",
            "fp8",
            "compressed-tensors",
            "modelopt",
            "awq",
            "gptq",
            "auto-round",
            "mxfp4",
            "gguf",
        ]
        | None
    ) = option(
        None,
        "quantised weights (docs/quantised.md): dequantise runs them in dtype; fp8 rounds weights "
        "in 16 bits while they are loaded; the checkpoint's kind (fp8, compressed-tensors, "
        "modelopt, awq, gptq, auto-round, mxfp4 or gguf) means None",
        none="as the checkpoint is",
    )
    activation_dtype: Literal["float8_e4m3fn"] | None = option(
        None,
        "dtype that activations are rounded to before matmuls with weights in FP8: float8_e4m3fn "
        "(W8A8; docs/quantised.md)",
        none="not rounded",
    )
    kv_dtype: Literal["bfloat16", "float8_e4m3fn"] | None = option(
        None,
        "dtype of the KV cache: bfloat16 or float8_e4m3fn, which saturates at 448 times the "
        "checkpoint's scales of keys and values, or 1",
        none="the model's",
    )
    state_policy: Literal["auto", "snapshot", "replay"] = option(
        "auto",
        "storage of recurrent states during verification: snapshot stores a state per token; "
        "replay stores a state per sample and the inputs of the tokens since, which takes less "
        "memory with drafts; auto is replay on GPUs with kernels",
    )
    state_dtype: Literal["float32", "float16", "bfloat16"] = option(
        "float32", "dtype of recurrent states: float32, float16 or bfloat16"
    )
    deterministic: bool = option(
        False,
        "compute a token's logprobs with the same bits in any batch, chunk and verification: those "
        "of generate and score are equal (docs/rollouts.md#deterministic)",
    )
    tensor_parallel_size: int = option(
        1, "number of devices that share the model, of all nodes (docs/tensor-parallel.md)"
    )
    nnodes: int = option(
        1, "number of nodes, processes on one or several hosts, with the devices of the model"
    )
    node_rank: int = option(
        0,
        "number of this node; node 0 serves, the others are started with `jaxspec.follow` or "
        "`serve`",
        least=0,
    )
    master_addr: str = option("127.0.0.1", "address of node 0, for the other nodes")
    master_port: int = option(29501, "port of node 0, for the other nodes")
    nodes_key_file: str | Path | None = option(
        None, "file with a secret that all nodes must know", none="no secret"
    )
    data_parallel_size: int = option(
        1,
        "number of replicas: engines in processes of their own, each with tensor_parallel_size "
        "devices of this machine (docs/serving.md#several-gpus)",
    )
    enable_expert_parallel: bool | None = option(
        None,
        "how the devices of tensor_parallel_size share a mixture of experts: True gives each of "
        "them whole experts, False a share of every expert's width",
        none="by width, unless a device's share would be no multiple of 64",
    )
    max_num_seqs: int = option(8, "maximum number of samples that run at the same time")
    max_model_len: int | None = option(
        None,
        "maximum number of tokens of a prompt and its completion",
        none="the model's context length, at most 8192",
    )
    max_in_flight: int = option(
        2,
        "steps dispatched ahead of the one whose output is awaited; 0 is the synchronous engine",
        least=0,
    )
    steps_per_dispatch: int | Literal["auto"] = option(
        "auto",
        "decode steps per dispatch while no prompt is waiting and no stream is read; tokens do not "
        "change; auto is 1, on GPUs with kernels the number of times the weights fit into 80 GB, "
        "as a power of two, at most 8",
    )
    page_size: int = option(16, "tokens per page of the KV cache")
    num_pages: int | None = option(
        None,
        "pages of the KV cache, including the null page",
        none="enough for max_num_seqs samples of max_model_len, or as many as fit",
    )
    enable_prefix_caching: bool | None = option(
        None,
        "reuse the cached prefixes of earlier requests (docs/prefix-caching.md)",
        none="on wherever it is supported; recurrent states then use prefix_cache_share",
    )
    mamba_cache_mode: Literal["none", "align", "all"] = option(
        "all",
        "positions at which recurrent states are cached: all caches them where prompts diverge, at "
        "boundaries of chat turns and at the ends of prompts and outputs; align at multiples of "
        "checkpoint_interval; none disables prefix caching for models with recurrent states",
    )
    prefix_cache_share: float = option(
        0.2, "share of the cache memory for cached recurrent states, in [0, 1); at least two states"
    )
    checkpoint_interval: int | None = option(
        None,
        "prompt tokens between cached recurrent states",
        none="no intermediate states; 32 pages with align",
    )
    kv_offloading_size: float = option(
        0.0,
        "GiB of host memory for prefixes evicted from the device (docs/prefix-caching.md); 0 "
        "disables offloading",
    )
    kv_offloading_folder: str | Path | None = option(
        None,
        "folder for prefixes evicted from host memory; files of other models in it are deleted",
        none="no files",
    )
    kv_offloading_folder_size: float = option(
        10.0, "maximum size of the files in kv_offloading_folder, in GiB"
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of JAX's GPU memory for weights and caches, in (0, 1]; JAX allocates three quarters "
        "of the GPU's memory, or the share in XLA_PYTHON_CLIENT_MEM_FRACTION",
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of verified and prefilled tokens per step",
        none="verification of all rows and 512 prompt tokens; on GPUs with kernels 2048 prompt "
        "tokens (mixtures of experts: 512 to 4096), at most those of max_prefill_seqs prompts",
    )
    long_prefill_token_threshold: int | None = option(
        None, "maximum number of prompt tokens of one request per step", none="no limit"
    )
    max_prefill_seqs: int | None = option(
        None,
        "maximum number of prompts that are prefilled in one step",
        none="one per 256 tokens of the largest step, at least 4",
    )
    max_step_ms: float | None = option(
        None,
        "maximum duration in milliseconds of steps with prompts while other rows decode: the "
        "largest of prefill_buckets that was fast enough is used, at least the smallest; larger "
        "ones are tried again now and then",
        none="no limit",
    )
    decode_buckets: Sequence[int] | None = option(
        None,
        "numbers of decode rows to compile programs for, ascending to max_num_seqs",
        none="1, 4, 16, ... and max_num_seqs",
    )
    prefill_buckets: Sequence[int] | None = option(
        None,
        "numbers of prompt tokens to compile programs for, ascending",
        none="64 and the maximum per step, with 256, 512 and 2048 between them if that is 2048 or "
        "more",
    )
    seed: int = option(0, "seed of requests without one", least=None)
    background_compilation: bool = option(
        True, "compile the programs that serve any request first, and faster ones in the background"
    )
    compilation_cache: str | Path | None = option(
        None, "folder for compiled programs", none="the user's cache folder"
    )
    flight_recorder: Literal["full", "hashed", "off"] = option(
        "full",
        "recording of steps for `python -m jaxspec replay`, in memory until a step fails: full "
        "records token ids, hashed replaces them in files, off disables the recorder",
    )
    flight_folder: str | Path | None = option(
        None,
        "folder for the files that the flight recorder writes when a step fails",
        none="the user's state folder",
    )
    profiler_folder: str | Path | None = option(
        None,
        "folder for the profiles of JAX between start_profile and stop_profile",
        none="these calls are refused",
    )
    show_progress: bool | None = option(
        None, "show progress bars", none="if standard error is a terminal"
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

    @property
    def scales_kv(self) -> bool:
        """True if the checkpoint's scales of keys and values are used."""
        return self.kv_dtype == "float8_e4m3fn"

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
        self._check_devices()
        if self.deterministic:
            check_deterministic(self.tensor_parallel_size, self.activation_dtype, self.state_policy)
        if self.revision is not None and self.model is None:
            raise ValueError(
                "revision chooses among the versions of a hub id, and the embedded model has one. "
                "Leave revision out, or give a hub id as model."
            )

    def _check_devices(self) -> None:
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel shares experts among the devices of tensor_parallel_size, "
                "which is 1. Raise it, or leave enable_expert_parallel out."
            )
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ValueError(
                f"Replicas are on one host, got data_parallel_size={self.data_parallel_size} with "
                f"nnodes={self.nnodes}. Set one of them to 1, and start a server per group of "
                "nodes."
            )
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"node_rank must be below nnodes={self.nnodes}, got {self.node_rank}. Number the "
                "nodes from 0, and give all of them the same nnodes."
            )
        if self.tensor_parallel_size % self.nnodes:
            raise ValueError(
                f"tensor_parallel_size must be a multiple of nnodes={self.nnodes}, since all nodes "
                f"have the same number of devices, got {self.tensor_parallel_size}."
            )
        if self.master_port > 65535:
            raise ValueError(f"master_port must be at most 65535, got {self.master_port}.")
        if self.nnodes > 1 and self.kv_offloading_size:
            raise ValueError(
                f"Prefixes are copied to the memory of one host, got kv_offloading_size="
                f"{self.kv_offloading_size} with nnodes={self.nnodes}. Set it to 0."
            )
        if self.nnodes > 1 and self.enable_return_routed_experts:
            raise ValueError(
                f"Routed experts are read by one process, got enable_return_routed_experts with "
                f"nnodes={self.nnodes}. Set it to 1."
            )
        speculation = self.speculative_config
        drafter = speculation.options if isinstance(speculation, SpeculativeConfig) else None
        if self.nnodes > 1 and isinstance(drafter, ExtractHiddenStatesOptions):
            raise ValueError(
                f"Hidden states are extracted by one process, got nnodes={self.nnodes}. Set it to "
                "1."
            )

    def sizes(
        self, own: ModelSizes, draft_buckets: Sequence[int]
    ) -> tuple[StepShapes, SchedulerLimits]:
        """Return the shapes of the programs and the limits; `num_pages` may still be lowered.

        Args:
            own: Limits and preferred sizes of the model.
            draft_buckets: Numbers of drafts per verify step that programs are compiled for.

        Raises:
            ValueError: sizes contradict each other or exceed the model's.
        """
        rows, max_model_len = self.max_num_seqs, self.max_model_len
        if max_model_len is None:
            max_model_len = min(own.max_positions, 8192)
        elif max_model_len > own.max_positions:
            raise ValueError(
                f"max_model_len must not exceed the model's {own.max_positions} positions, got "
                f"{max_model_len}."
            )
        budget, verified = self.max_num_batched_tokens, rows * (1 + draft_buckets[-1])
        seqs = self.max_prefill_seqs or max(4, (budget or own.tokens_per_step) // 256)
        if (largest := budget) is None:
            # At most the longest prompts that one step can advance, rounded up to 64.
            longest = -(-min(seqs, rows) * max_model_len // 64) * 64
            largest = max(TOKENS_PER_STEP, min(own.tokens_per_step, longest))
            budget = largest + verified  # all rows verify beside it
        if budget <= verified:
            raise ValueError(
                f"A step must have room for every row's verify and some prompt: "
                f"max_num_batched_tokens={budget} must exceed max_num_seqs * "
                f"(1 + num_speculative_tokens) = {verified}."
            )
        decode_rows, prefill_tokens = self.decode_buckets, self.prefill_buckets
        if decode_rows is None:
            decode_rows = (*(4**i for i in range(16) if 4**i < rows), rows)
        if prefill_tokens is None:
            # 64 and the largest size. From 2048 on also sizes in between, so that prompts of medium
            # length, and the rest after a cached prefix, do not pay for the largest step.
            between = {256, 512, 2048} if largest >= 2048 else set[int]()
            prefill_tokens = sorted({min(64, largest), largest} | between)
        steps = self.steps_per_dispatch
        shapes = StepShapes(
            max_num_seqs=rows,
            max_model_len=max_model_len,
            page_size=self.page_size,
            num_pages=self.num_pages or rows * -(-max_model_len // self.page_size) + 1,
            num_drafts=draft_buckets[-1],
            draft_buckets=tuple(draft_buckets),
            decode_rows=tuple(decode_rows),
            prefill_tokens=tuple(prefill_tokens),
            max_prefill_seqs=seqs,
            steps_per_dispatch=own.steps_per_dispatch if steps == "auto" else steps,
        )
        limits = SchedulerLimits(
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_step_ms=self.max_step_ms,
        )
        return shapes, limits


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
        textwrap.fill(
            text, 92, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False
        )
        for text in paragraphs
    )
