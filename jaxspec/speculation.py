"""Speculation as the user asks for it: how to draft and how to verify, checked when built."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxspec.checks import integer, is_integer, items, real, shown

_MAX_IDS = 2**20  # of draft_vocab; no vocabulary has as many


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How to draft and how to verify.

    `method`: "mtp", the checkpoint's own head.
    `draft_vocab`: the tokens that MTP may draft (FR-Spec, arXiv 2502.14856): None is all of them, a
    number n the first n ids, and a list just its ids. A byte-pair vocabulary has its frequent
    merges first, and what ends a text last. A draft reads only these columns of the output head.
    The target still scores every token, so no output changes; where drafts are drawn, its
    distribution does not.
    `draft_sample_method`: "greedy" drafts are verified exactly; "probabilistic" ones are drawn at
    the request's temperature and verified by rejection sampling.
    `rejection_sample_method`: how drawn drafts are verified. "standard" judges one after the other
    (Leviathan et al. 2023), and "block" all together (Sun et al. 2024, arXiv 2403.10444). The
    output has the same distribution, and with "block" as many drafts stand, or more.
    `synthetic_acceptance_rates`: accept draft j with this unconditional rate whatever the target
    says. Lossy: for speed benchmarks only.
    """

    method: Literal["mtp"] = "mtp"
    num_speculative_tokens: int = 3
    draft_vocab: int | Sequence[int] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    rejection_sample_method: Literal["standard", "block"] = "standard"

    def __post_init__(self) -> None:
        """Check methods, widths, ids and rates, and keep them as Python's own types."""
        if not isinstance(self.method, str) or self.method != "mtp":
            raise ValueError(f"Unknown speculative method {shown(self.method)}: use 'mtp'.")
        drafts = self.num_speculative_tokens
        if not is_integer(drafts) or not 1 <= int(drafts) <= 8:
            raise ValueError(
                f"num_speculative_tokens must be an integer from 1 to 8, got {shown(drafts)}. To "
                "do without drafts pass speculative_config=None, or --num-speculative-tokens 0 to "
                "the command."
            )
        way = self.draft_sample_method
        if not isinstance(way, str) or way not in ("greedy", "probabilistic"):
            raise ValueError(
                f"draft_sample_method must be 'greedy' or 'probabilistic', got {shown(way)}."
            )
        _check_rejection(self.rejection_sample_method, way)
        object.__setattr__(self, "num_speculative_tokens", int(drafts))
        object.__setattr__(self, "draft_vocab", _draft_vocab(self.draft_vocab))
        rates = _rates(self.synthetic_acceptance_rates, int(drafts))
        object.__setattr__(self, "synthetic_acceptance_rates", rates)
        if rates is not None and way == "probabilistic":
            raise ValueError(
                "Probabilistic drafts come from the MTP head and are verified by rejection "
                "sampling: drop the synthetic rates, or draft greedily."
            )

    def draft_ids(self, vocab_size: int) -> tuple[int, ...] | None:
        """The ids that may be drafted, ascending; None: all `vocab_size` of them.

        Raises:
            ValueError: the vocabulary has not so many, or not one of these.
        """
        vocab = self.draft_vocab
        if vocab is None:
            return None
        largest = vocab - 1 if isinstance(vocab, int) else max(vocab)
        if largest >= vocab_size:
            asked = f"{vocab} ids" if isinstance(vocab, int) else f"id {shown(largest)}"
            raise ValueError(
                f"draft_vocab must lie in the model's vocabulary, ids 0 to {vocab_size - 1}, got "
                f"{asked}. Leave out what is beyond."
            )
        ids = range(vocab) if isinstance(vocab, int) else sorted(vocab)
        return tuple(ids) if len(ids) < vocab_size else None

    @staticmethod
    def of(value: "SpeculativeConfig | Mapping[str, Any]") -> "SpeculativeConfig":
        """`value` itself, or one built from a dict of the fields.

        Raises:
            ValueError: a key that is no field, or a value that breaks a rule.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        known = [field.name for field in dataclasses.fields(SpeculativeConfig)]
        if unknown := [key for key in value if key not in known]:
            raise ValueError(
                f"Unknown keys {shown(unknown)} in speculative_config; known are {known}."
            )
        return SpeculativeConfig(**value)

    @staticmethod
    def read(value: Any) -> "SpeculativeConfig | Literal['auto'] | None":
        """`value` as an engine keeps it: a dict becomes a `SpeculativeConfig`.

        Raises:
            ValueError: as in `of`, or it is neither a dict nor "auto".
        """
        if value is None or (isinstance(value, str) and value == "auto"):
            return value  # pyright: ignore[reportReturnType]
        if not isinstance(value, SpeculativeConfig | Mapping):
            raise ValueError(
                f"speculative_config must be 'auto', None or a dict, got {shown(value)}."
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
            raise ValueError(
                "Drafts of method 'mtp' come from the checkpoint's own head, and this checkpoint "
                "has none: it lacks the mtp.* tensors, which an export may have dropped. Pass "
                "speculative_config=None, or --num-speculative-tokens 0 to the command."
            )
        return config


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


def _draft_vocab(vocab: Any) -> int | tuple[int, ...] | None:
    if vocab is None:
        return None
    ids = items(vocab, _MAX_IDS)
    if ids is None:
        return integer("draft_vocab", vocab, 1)
    if len(ids) > _MAX_IDS:
        raise ValueError(
            f"draft_vocab must list at most {_MAX_IDS:,} ids, got more. List those that the "
            "vocabulary has."
        )
    wrong = [i for i in ids if not is_integer(i) or i < 0]
    if wrong or not ids:
        raise ValueError(
            "draft_vocab must be a number of tokens, or a list of token ids from 0 on; got a "
            f"list {f'with {shown(wrong[0])}' if wrong else 'of none'}."
        )
    token, times = collections.Counter(ids).most_common(1)[0]
    if times > 1:
        raise ValueError(f"draft_vocab must list an id once, got id {shown(token)} {times} times.")
    return tuple(map(int, ids))  # which can be hashed


def _rates(rates: Any, num_drafts: int) -> tuple[float, ...] | None:
    if rates is None:
        return None
    found = tuple(map(real, items(rates, num_drafts) or ()))
    if len(found) != num_drafts or not all(0 <= rate <= 1 for rate in found):
        raise ValueError(
            f"synthetic_acceptance_rates needs one rate in [0, 1] for each of the {num_drafts} "
            f"drafts, got {shown(rates)}."
        )
    if list(found) != sorted(found, reverse=True):
        raise ValueError(
            "synthetic_acceptance_rates are unconditional, so they can't rise with the position; "
            f"got {shown(rates)}."
        )
    return found
