"""Translation of vLLM's engine options, and validation of those without a counterpart.

A vLLM option renames a jaxspec option (`RENAMED`) or has no counterpart (`UNDERSTOOD`). Without a
counterpart, values that match the behavior of jaxspec are accepted, and all others are refused.
Accepted values that are not vLLM's default are named in one line of the log.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxspec.checks import shown
from jaxspec.text.parsers import REASONING_PARSERS

_LOG = logging.getLogger(__name__)


class Renamed(NamedTuple):
    """A vLLM option that jaxspec has under another name or with other values."""

    name: str
    words: Mapping[str, Any] = {}  # vLLM's values to jaxspec's; others are equal

    def value(self, given: Any) -> Any:
        """Translate a value to jaxspec's."""
        return self.words.get(given, given) if isinstance(given, str) else given


class Given(NamedTuple):
    """A vLLM option whose behavior is fixed in jaxspec.

    Attributes:
        meaning: The behavior of jaxspec.
        values: Accepted values, which request that behavior, vLLM's default first; empty accepts
            every value.
        instead: Advice in the error for other values.
        parts: Accepted entries of a dict, with their values, if the option may also be a dict.
    """

    meaning: str
    values: tuple[Any, ...] = ()
    instead: str = "Leave it out"
    parts: Mapping[str, tuple[Any, ...]] = {}

    def takes(self, given: Any) -> bool:
        """Return whether the value is accepted; 1 and True differ."""
        if not self.values:
            return True
        if self.parts and isinstance(given, dict):
            return all(_is_one_of(each, self.parts.get(name, ())) for name, each in given.items())
        return _is_one_of(given, self.values)

    @property
    def accepted(self) -> str:
        """The accepted values, for errors and documentation."""
        entries = (f"{name}: {_listed(values)}" for name, values in self.parts.items())
        ends = [f"a dict of {'; '.join(entries)}"] if self.parts else []
        return " or ".join([*map(repr, self.values), *ends])

    def is_default(self, given: Any) -> bool:
        """Return whether an accepted value says nothing: it is empty, or vLLM's default."""
        if given is None or not isinstance(given, bool | int | float | str | dict | list):
            return given is None
        return not given or (bool(self.values) and given == self.values[0])


def _is_one_of(given: Any, values: tuple[Any, ...]) -> bool:
    is_plain = given is None or isinstance(given, bool | int | float | str | dict | list)
    return is_plain and any(type(given) is type(value) and given == value for value in values)


def _listed(values: tuple[Any, ...]) -> str:
    return "/".join(map(repr, values))


_QUANTISED = {
    "auto_round": "auto-round",
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "inc": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
}
_KV_DTYPES = {"auto": None, "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}

RENAMED: dict[str, Renamed] = {
    "block_size": Renamed("page_size"),
    "kv_cache_dtype": Renamed("kv_dtype", _KV_DTYPES),
    "mamba_block_size": Renamed("checkpoint_interval"),
    "mamba_ssm_cache_dtype": Renamed("state_dtype", {"auto": "float32"}),
    "num_gpu_blocks_override": Renamed("num_pages"),
    "max_num_partial_prefills": Renamed("max_prefill_seqs"),
    "quantization": Renamed("quantization", _QUANTISED),
    "use_tqdm_on_load": Renamed("show_progress"),
    "dtype": Renamed("dtype", {"float": "float32"}),
    "load_format": Renamed("load_format", {"safetensors": "auto"}),
}
"""Options that jaxspec has under another name or with other values, by vLLM's name."""

_ONE_DEVICE = "Use tensor_parallel_size or data_parallel_size for several GPUs"
_NOT_LOADED = "Adapters are not supported: merge them into the weights"
_FOLDER = "Pass as `model` a folder with the files you need"
_CONFIG = "Change config.json in a folder of your own"

UNDERSTOOD: dict[str, Given] = {
    "aggregate_engine_logging": Given("there is one engine", (False, True)),
    "async_scheduling": Given("steps overlap", (True, None), "Set max_in_flight=0"),
    "calculate_kv_scales": Given(
        "scales of keys and values are those of the checkpoint", (False,), "See kv_dtype"
    ),
    "code_revision": Given("no code is loaded from a hub", (None,)),
    "config_format": Given("config.json is read", ("auto", "hf")),
    "compilation_config": Given("XLA compiles", (None, {}), "Leave it out"),
    "cpu_offload_gb": Given("weights stay on the device", (0, 0.0), "Use less device memory"),
    "disable_cascade_attention": Given("there is no cascade attention", (False, True)),
    "disable_custom_all_reduce": Given(
        "a kernel or XLA sums over devices, by the number of rows", (False, True)
    ),
    "disable_log_requests": Given("requests are not logged", (False, True)),
    "disable_log_stats": Given("nothing is logged; `LLM.metrics` counts", (False, True)),
    "disable_mm_preprocessor_cache": Given("prompts are text only", (False, True)),
    "distributed_executor_backend": Given("JAX runs all devices", (None, "uni"), _ONE_DEVICE),
    "download_dir": Given("the hub's own cache is used", (None,), "Set HF_HOME"),
    "enable_chunked_prefill": Given("prompts are computed in chunks", (True, None)),
    "enable_log_requests": Given(
        "requests are not logged", (False,), "Log them where they are made"
    ),
    "enable_lora": Given("there are no adapters", (False,), _NOT_LOADED),
    "enable_prompt_embeds": Given("prompts are texts or ids", (False,), "Pass ids"),
    "enable_sleep_mode": Given(
        "the engine does not sleep", (False,), "Close it and create another"
    ),
    "enforce_eager": Given("programs are always compiled, once", (False, True, None)),
    "guided_decoding_backend": Given("llguidance compiles grammars", (None, "auto", "guidance")),
    "hf_config_path": Given("the model's config.json is used", (None,), _FOLDER),
    "hf_token": Given("the hub library's login is used", (None,), "Log in with `hf auth login`"),
    "ignore_patterns": Given("all safetensors are read", (None,), _FOLDER),
    "kv_offloading_backend": Given(
        "blocks are copied to host memory and a folder", ("native", None)
    ),
    "kv_transfer_config": Given("pages are not transferred", (None,)),
    "language_model_only": Given("only the language model is loaded", (False, True)),
    "limit_mm_per_prompt": Given("prompts are text only"),
    "lora_modules": Given("there are no adapters", (None,), _NOT_LOADED),
    "mamba_cache_dtype": Given(
        "convolution states have the model's dtype", ("auto",), "See state_dtype"
    ),
    "max_logprobs": Given("SamplingParams bounds them", (20, None)),
    "media_io_kwargs": Given("prompts are text only", (None, {})),
    "mm_processor_cache_gb": Given("prompts are text only"),
    "mm_processor_kwargs": Given("prompts are text only", (None, {})),
    "max_seq_len_to_capture": Given("all sizes are compiled"),
    "model_impl": Given("models are those of jaxspec", ("auto",)),
    "override_generation_config": Given(
        "generation_config.json is used unchanged", (None, {}), "Pass SamplingParams"
    ),
    "pipeline_parallel_size": Given("layers are not split among devices", (1,), _ONE_DEVICE),
    "prefix_caching_hash_algo": Given("tokens are compared, not hashes"),
    "profiler_config": Given("JAX's profiler is used", (None, {}), "Set profiler_folder"),
    "rope_scaling": Given("config.json has it", (None, {}), _CONFIG),
    "rope_theta": Given("config.json has it", (None,), _CONFIG),
    "runner": Given("it generates text", ("auto", "generate"), "Pooling is not supported"),
    "scheduling_policy": Given("by priority, then by arrival", ("fcfs", "priority")),
    "served_model_name": Given("an LLM has no server"),
    "skip_mm_profiling": Given("prompts are text only", (False, True)),
    "structured_outputs_config": Given(
        "reasoning_parser sets that option; requests set the rest",
        (None, {}),
        "Set it in StructuredOutputsParams",
        {
            "backend": ("auto", "guidance"),
            "disable_fallback": (False, True),
            "disable_any_whitespace": (False,),
            "disable_additional_properties": (False,),
            "enable_in_reasoning": (False,),
            "reasoning_parser": ("", *REASONING_PARSERS),
        },
    ),
    "swap_space": Given("preempted requests are computed again"),
    "task": Given("it generates text", ("auto", "generate"), "Pooling is not supported"),
    "tokenizer_mode": Given("tokenizer.json is read", ("auto", "hf", "fast")),
    "tokenizer_revision": Given("the default revision is used", (None,), "Give a folder"),
    "trust_remote_code": Given(
        "models are built in, and no code is taken from a hub", (False, True)
    ),
}
"""Options whose behavior is fixed in jaxspec, by vLLM's name."""

CALL_ARGUMENTS: dict[str, Given] = {
    "chat_template_content_format": Given("contents are texts", ("auto", "string", None)),
    "data_parallel_rank": Given("requests are routed", (None,), "Leave it out"),
    "lora_request": Given("there are no adapters", (None,), _NOT_LOADED),
    "mm_processor_kwargs": Given("prompts are text only", (None, {})),
    "prompt_text": Given("it is decoded from the ids", (None,), "Pass it in the prompt's dict"),
    "tokenization_kwargs": Given("tokenizers have no options", (None, {}), "Pass token ids"),
    "trace_headers": Given("requests are not traced", (None, {})),
}
"""Arguments of vLLM's calls without a counterpart, by name."""

# The first values of dtype that people try on a GPU, and why they are refused.
_FLOAT16 = ("float16", "half")


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate options to jaxspec's names and values; names in neither table are kept.

    Raises:
        ValueError: an option requests an unsupported feature, or is given under two names.
    """
    found, noted = {}, list[str]()
    for name, given in options.items():
        if name in UNDERSTOOD:
            _check(name, given, UNDERSTOOD[name])
            if not UNDERSTOOD[name].is_default(_without_effect(name, given)):
                noted.append(f"{name} ({UNDERSTOOD[name].meaning})")
            continue
        if name == "dtype" and isinstance(given, str) and given in _FLOAT16:
            raise ValueError(
                f"dtype must be 'float32', 'bfloat16' or 'auto', got {given!r}: the kernels "
                "multiply in bfloat16, and activations may exceed float16's range. Use 'bfloat16'; "
                "a checkpoint in float16 is converted as it is loaded."
            )
        own, value = name, given
        if name in RENAMED:
            own, value = RENAMED[name].name, RENAMED[name].value(given)
            if own != name and own in options:
                raise ValueError(
                    f"{name} is another name of {own}, got both: {shown(given)} and "
                    f"{shown(options[own])}. Pass one of them."
                )
        if value is not None or own == name:  # None of vLLM means the default
            found[own] = value
    if isinstance(config := options.get("structured_outputs_config"), dict):
        found |= _reasoning_parser(config, options)
    if noted:
        _LOG.warning("Options of vLLM without an effect here: %s.", "; ".join(noted))
    return found


def _without_effect(name: str, given: Any) -> Any:
    """Return the part of an option of vLLM that sets no option here."""
    if name == "structured_outputs_config" and isinstance(given, dict):
        return {key: value for key, value in given.items() if key != "reasoning_parser"}
    return given


def _reasoning_parser(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `reasoning_parser` if `structured_outputs_config` gives one, else no option.

    Raises:
        ValueError: the options themselves name another parser.
    """
    name = "reasoning_parser"
    given, other = config.get(name) or None, options.get(name)
    if given is None:
        return {}
    if other not in (None, given):
        raise ValueError(
            f"{name} must be given once, got {shown(other)} and, in structured_outputs_config, "
            f"{shown(given)}. Drop one of the two."
        )
    return {name: given}


def without_neutral(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without those of `CALL_ARGUMENTS`.

    Raises:
        ValueError: one of these requests an unsupported feature.
    """
    for name in given.keys() & CALL_ARGUMENTS.keys():
        _check(name, given[name], CALL_ARGUMENTS[name])
    return {name: value for name, value in given.items() if name not in CALL_ARGUMENTS}


def check_call(call: str, others: Mapping[str, Any]) -> None:
    """Check the arguments of a call that it has no parameters for.

    Raises:
        TypeError: an argument is not in `CALL_ARGUMENTS`.
        ValueError: as in `without_neutral`.
    """
    if unknown := sorted(without_neutral(others)):
        raise TypeError(f"{call}() has no argument {unknown[0]!r}. See help({call}).")


def _check(name: str, given: Any, understood: Given) -> None:
    if understood.takes(given):
        return
    raise ValueError(
        f"{name} must be {understood.accepted} with jaxspec ({understood.meaning}), got "
        f"{shown(given)}. {understood.instead}."
    )
