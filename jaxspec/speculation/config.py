"""SpeculativeConfig: the method, how many drafts, and how they are verified."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from jaxspec.checks import is_integer, items, real, shown
from jaxspec.config import MAX_DRAFTS
from jaxspec.speculation.custom import CustomOptions
from jaxspec.speculation.draft_model import DraftModelOptions
from jaxspec.speculation.eagle3 import Eagle3Options
from jaxspec.speculation.extract_hidden_states import ExtractHiddenStatesOptions
from jaxspec.speculation.mtp import MTPOptions
from jaxspec.speculation.ngram import NgramOptions
from jaxspec.speculation.suffix import SuffixOptions


class MethodOptions(Protocol):
    """What a method may be told: a frozen dataclass of fields with defaults, checked when built."""

    num_drafts: ClassVar[
        int
    ]  # at most, where the user leaves it to the engine; 0: it drafts nothing
    has_distribution: ClassVar[bool]  # its drafts can be drawn, and verified by rejection sampling


# The methods' names, and what each may be told; `jaxspec.proposers.PROPOSERS` has what drafts.
METHODS: dict[str, type[MethodOptions]] = {
    "mtp": MTPOptions,
    "ngram": NgramOptions,
    "draft_model": DraftModelOptions,
    "eagle3": Eagle3Options,
    "suffix": SuffixOptions,
    "extract_hidden_states": ExtractHiddenStatesOptions,
    "custom": CustomOptions,
}


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How to draft and how to verify.

    `method`: a key of `METHODS`; "mtp" is the checkpoint's own head.
    `num_speculative_tokens`: drafts of a verify. With "auto" each step has the method's own number,
    one or none, whichever gives the most tokens a second; there are three times as many programs
    for decoding then. None is "auto" where kernels run, and elsewhere the method's own number. A
    method that drafts nothing has 0.
    `draft_sample_method`: "greedy" drafts are verified exactly; "probabilistic" ones are drawn at
    the request's temperature and verified by rejection sampling.
    `rejection_sample_method`: how drawn drafts are verified. "standard" judges one after the other
    (Leviathan et al. 2023), and "block" all together (Sun et al. 2024, arXiv 2403.10444). The
    output has the same distribution, and with "block" as many drafts stand, or more.
    `synthetic_acceptance_rates`: accept draft j with this unconditional rate whatever the target
    says. Lossy: for speed benchmarks only.
    `options`: of the method, of the class in `METHODS`; None: its defaults.
    """

    method: str = "mtp"
    num_speculative_tokens: int | Literal["auto"] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block"] = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    options: Any = None

    def __post_init__(self) -> None:
        """Check methods, widths and rates, and keep them as Python's own types."""
        keep = object.__setattr__
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
        """The most drafts of a verify."""
        asked = self.num_speculative_tokens
        return asked if isinstance(asked, int) else self.options.num_drafts

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """The numbers of drafts that steps may have, ascending."""
        fewer = (0, 1) if self.num_speculative_tokens == "auto" else ()
        return (*(count for count in fewer if count < self.num_drafts), self.num_drafts)

    def on_device(self, has_kernels: bool) -> "SpeculativeConfig":
        """The same with the number of drafts decided, where the user leaves it to the engine.

        A CPU compiles for long and reads no memory that drafts would spare it.
        """
        if self.num_speculative_tokens is not None or not self.num_drafts:
            return self
        decided = "auto" if has_kernels else self.num_drafts
        return dataclasses.replace(self, num_speculative_tokens=decided)

    @staticmethod
    def of(value: "SpeculativeConfig | Mapping[str, Any]") -> "SpeculativeConfig":
        """`value` itself, or one built from a dict of its fields and of the method's options.

        Raises:
            ValueError: a key that is no field, or a value that breaks a rule.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(nested := value.get("options"), Mapping):  # as `asdict` has them
            value = {**nested, **{key: value[key] for key in value if key != "options"}}
        own = [field.name for field in dataclasses.fields(SpeculativeConfig)]
        kind = options_class(value.get("method", SpeculativeConfig.method))
        options = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore
        _refuse_unknown(value, [*own, *options])
        given = {key: value[key] for key in value if key in options}
        fields: dict[str, Any] = {key: value[key] for key in value if key in own}
        return SpeculativeConfig(**{"options": given or None, **fields})

    @staticmethod
    def read(value: Any) -> "SpeculativeConfig | Literal['auto'] | None":
        """`value` as an engine keeps it: a dict or a method's name becomes a `SpeculativeConfig`.

        Raises:
            ValueError: as in `of`, or it is neither a dict nor a text.
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
        """The speculation a checkpoint gets: "auto" is MTP if it has the head, None is none.

        Raises:
            ValueError: as in `read`, or MTP without the head.
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


def options_class(method: Any) -> type[MethodOptions]:
    """What a method may be told.

    Raises:
        ValueError: there is no such method.
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
