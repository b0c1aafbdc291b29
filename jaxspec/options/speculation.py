"""SpeculativeConfig: the draft method, the number of drafts, and their verification."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from jaxspec.checks import is_integer, items, real, shown
from jaxspec.options.draft_methods import (
    AssistantOptions,
    CustomOptions,
    DraftModelOptions,
    Eagle3Options,
    ExtractHiddenStatesOptions,
    MTPOptions,
    NgramOptions,
    SuffixOptions,
)
from jaxspec.plan.step_shapes import MAX_DRAFTS


class MethodOptions(Protocol):
    """Options of a draft method: a frozen dataclass with defaults, validated when built.

    Attributes:
        num_drafts: Default maximum of drafts per verify step; 0 for methods that draft nothing.
        has_distribution: True if drafts can be sampled and verified by rejection sampling.
    """

    num_drafts: ClassVar[int]
    has_distribution: ClassVar[bool]


# Options by method; `jaxspec.proposers.PROPOSERS` has the implementations.
METHODS: dict[str, type[MethodOptions]] = {
    "mtp": MTPOptions,
    "ngram": NgramOptions,
    "draft_model": DraftModelOptions,
    "eagle3": Eagle3Options,
    "assistant": AssistantOptions,
    "suffix": SuffixOptions,
    "extract_hidden_states": ExtractHiddenStatesOptions,
    "custom": CustomOptions,
}


OTHER_NAMES = {
    **dict.fromkeys(("qwen3_5_mtp", "qwen3_next_mtp", "nemotron_h_mtp"), "mtp"),
    "ngram_gpu": "ngram",
}
"""vLLM's names of methods, and the method that jaxspec has for each."""


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """Configuration of speculative decoding.

    Attributes:
        method: Key of `METHODS`; "mtp" drafts with the checkpoint's multi-token-prediction head.
        num_speculative_tokens: Drafts per verify step. With "auto" each step uses the method's
            default number, one or none, whichever gives the most tokens per second; this compiles
            three times as many decode programs. None means "auto" where kernels run, and the
            method's default number elsewhere. Methods that draft nothing have 0.
        draft_sample_method: "greedy" drafts are verified exactly; "probabilistic" drafts are
            sampled at the request's temperature and verified by rejection sampling.
        rejection_sample_method: Verification of sampled drafts: "standard" accepts or rejects one
            after the other (Leviathan et al. 2023), "block" all of them jointly (Sun et al. 2024,
            arXiv 2403.10444). Both keep the distribution of the output; "block" accepts at least
            as many drafts on average.
        synthetic_acceptance_rates: Unconditional rates at which draft j is accepted, whatever the
            target predicts. This changes the output: use it for speed benchmarks only.
        options: Options of the method, an instance of its class in `METHODS`; None means their
            defaults.

    Raises:
        ValueError: a value is invalid, or two values contradict each other.
    """

    method: str = "mtp"
    num_speculative_tokens: int | Literal["auto"] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block"] = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    options: Any = None

    def __post_init__(self) -> None:
        """Validate the fields and store them as Python types."""
        keep = object.__setattr__
        keep(self, "method", own_name(self.method))
        kind = options_class(self.method)
        keep(self, "options", _options(self.method, kind, self.options))
        keep(self, "num_speculative_tokens", self._num_speculative_tokens())
        way = self.draft_sample_method
        if not isinstance(way, str) or way not in ("greedy", "probabilistic"):
            raise ValueError(
                f"draft_sample_method must be 'greedy' or 'probabilistic', got {shown(way)}."
            )
        if way == "probabilistic" and not kind.has_distribution:
            able = [name for name, other in METHODS.items() if other.has_distribution]
            raise ValueError(
                f"Probabilistic drafts need a method that gives a distribution, one of {able}, got "
                f"{self.method!r}. Its drafts are verified exactly: leave draft_sample_method out."
            )
        _check_rejection(self.rejection_sample_method, way)
        keep(self, "synthetic_acceptance_rates", self._rates())
        if self.synthetic_acceptance_rates is not None and way == "probabilistic":
            raise ValueError(
                "Probabilistic drafts are verified by rejection sampling, and synthetic rates "
                "verify nothing: drop the synthetic rates, or draft greedily."
            )

    @property
    def num_drafts(self) -> int:
        """Most drafts per verify step."""
        asked = self.num_speculative_tokens
        return asked if isinstance(asked, int) else self.options.num_drafts

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Numbers of drafts per verify step that programs are compiled for, ascending."""
        fewer = (0, 1) if self.num_speculative_tokens == "auto" else ()
        return (*(count for count in fewer if count < self.num_drafts), self.num_drafts)

    def on_device(self, has_kernels: bool) -> "SpeculativeConfig":
        """Resolve `num_speculative_tokens=None`: "auto" with kernels, else the method's default.

        A CPU compiles slowly and its decoding is not bound by memory traffic, so "auto" would not
        repay the additional programs.
        """
        if self.num_speculative_tokens is not None or not self.num_drafts:
            return self
        decided = "auto" if has_kernels else self.num_drafts
        return dataclasses.replace(self, num_speculative_tokens=decided)

    @staticmethod
    def of(value: "SpeculativeConfig | Mapping[str, Any]") -> "SpeculativeConfig":
        """Build a `SpeculativeConfig` from a dict with its fields and the method's options.

        As in vLLM, the method "mtp" with a `model` is an assistant.

        A `SpeculativeConfig` is returned unchanged.

        Raises:
            ValueError: the dict has an unknown key or an invalid value.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(nested := value.get("options"), Mapping):  # the format of `asdict`
            value = {**nested, **{key: value[key] for key in value if key != "options"}}
        method = own_name(value.get("method", SpeculativeConfig.method))
        if isinstance(method, str) and method == "mtp" and value.get("model") is not None:
            method = "assistant"  # vLLM's spelling
            value = {**value, "method": method}
        own = [field.name for field in dataclasses.fields(SpeculativeConfig)]
        kind = options_class(method)
        options = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore
        _refuse_unknown(value, [*own, *options])
        given = {key: value[key] for key in value if key in options}
        fields: dict[str, Any] = {key: value[key] for key in value if key in own}
        return SpeculativeConfig(**{"options": given or None, **fields})

    @staticmethod
    def read(value: Any) -> "SpeculativeConfig | Literal['auto'] | None":
        """Normalize the option: a dict or a method's name becomes a `SpeculativeConfig`.

        Raises:
            ValueError: as in `of`, or `value` has another type.
        """
        if value is None or (isinstance(value, str) and value == "auto"):
            return value  # pyright: ignore[reportReturnType]
        if isinstance(value, str):
            return SpeculativeConfig(method=value)
        if not isinstance(value, SpeculativeConfig | Mapping):
            raise ValueError(
                f"speculative_config must be 'auto', None, a dict or one of {list(METHODS)}, got "
                f"{shown(value)}."
            )
        return SpeculativeConfig.of(value)

    @staticmethod
    def resolve(
        value: "SpeculativeConfig | Mapping[str, Any] | str | None", has_draft_head: bool
    ) -> "SpeculativeConfig | None":
        """Return the configuration for a checkpoint, or None for plain decoding.

        "auto" means MTP if the checkpoint has an MTP head, else no drafts.

        Raises:
            ValueError: as in `read`, or `value` requests MTP and the checkpoint has no MTP head.
        """
        config = SpeculativeConfig.read(value)
        if config == "auto":
            config = SpeculativeConfig() if has_draft_head else None
        if config is None:
            return None
        if config.method == "mtp" and not has_draft_head:
            others = [name for name in METHODS if name != "mtp"]
            raise ValueError(
                "Drafts of method 'mtp' come from the checkpoint's own head, and this checkpoint "
                "has none: it lacks the mtp.* tensors, which an export may have dropped. Use "
                f"another method, one of {others}, or pass speculative_config=None, which is "
                "--num-speculative-tokens 0 to the command."
            )
        return config

    def _num_speculative_tokens(self) -> int | Literal["auto"] | None:
        asked = self.num_speculative_tokens
        if self.options.num_drafts:
            return _num_drafts(asked)
        if asked is not None and not (is_integer(asked) and asked in (0, 1)):
            raise ValueError(
                f"num_speculative_tokens must be 0 with the method {self.method!r}, which drafts "
                f"nothing, got {shown(asked)}. Leave it out; 1, which vLLM wants, is taken for 0."
            )
        return 0

    def _rates(self) -> tuple[float, ...] | None:
        rates, count = self.synthetic_acceptance_rates, self.num_drafts
        if rates is None:
            return None
        if not count:
            raise ValueError(
                f"synthetic_acceptance_rates are of drafts, and the method {self.method!r} has "
                f"none, got {shown(rates)}. Leave them out."
            )
        found = tuple(map(real, items(rates, count) or ()))
        if len(found) != count or not all(0 <= rate <= 1 for rate in found):
            raise ValueError(
                f"synthetic_acceptance_rates needs one rate in [0, 1] for each of the {count} "
                f"drafts, got {shown(rates)}."
            )
        if list(found) != sorted(found, reverse=True):
            raise ValueError(
                "synthetic_acceptance_rates are unconditional, so they can't rise with the "
                f"position; got {shown(rates)}."
            )
        return found


def own_name(method: Any) -> Any:
    """Return jaxspec's name of a method for one of vLLM's; other values are returned unchanged."""
    return OTHER_NAMES.get(method, method) if isinstance(method, str) else method


def options_class(method: Any) -> type[MethodOptions]:
    """Return the options class of a method.

    Raises:
        ValueError: the method is unknown.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"Unknown speculative method {shown(method)}: use one of {list(METHODS)}, or None to "
            "do without drafts."
        )
    return METHODS[method]


def _refuse_unknown(keys: Iterable[Any], known: Sequence[str]) -> None:
    if unknown := [key for key in keys if key not in known]:
        told = [name for name in known if name != "options"]
        raise ValueError(f"Unknown keys {shown(unknown)} in speculative_config; known are {told}.")


def _options(method: str, kind: type[MethodOptions], options: Any) -> MethodOptions:
    if options is None:
        return kind()
    if isinstance(options, Mapping):
        _refuse_unknown(options, [field.name for field in dataclasses.fields(kind)])  # pyright: ignore
        return kind(**options)
    if not isinstance(options, kind):
        raise ValueError(
            f"The options of the method {method!r} must be {kind.__name__}, got {shown(options)}."
        )
    return options


def _check_rejection(method: Any, draft_sample_method: str) -> None:
    if not isinstance(method, str) or method not in ("standard", "block"):
        raise ValueError(
            f"rejection_sample_method must be 'standard' or 'block', got {shown(method)}."
        )
    if method == "block" and draft_sample_method != "probabilistic":
        raise ValueError(
            "rejection_sample_method 'block' judges drafts that are drawn, and draft_sample_method "
            f"is {shown(draft_sample_method)}. Pass draft_sample_method='probabilistic', or keep "
            "'standard': drafts that are not drawn it verifies exactly."
        )


def _num_drafts(value: Any) -> int | Literal["auto"] | None:
    if value is None or (isinstance(value, str) and value == "auto"):
        return value  # pyright: ignore[reportReturnType]
    if not is_integer(value) or not 1 <= int(value) <= MAX_DRAFTS:
        raise ValueError(
            f"num_speculative_tokens must be 'auto', None or an integer from 1 to {MAX_DRAFTS}, "
            f"got {shown(value)}. To do without drafts pass speculative_config=None, or "
            "--num-speculative-tokens 0 to the command."
        )
    return int(value)
