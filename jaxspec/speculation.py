"""Speculation as the user asks for it: how to draft and how to verify, checked when built."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, Literal

from jaxspec.config import check_sizes


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
    `synthetic_acceptance_rates`: accept draft j with this unconditional rate whatever the target
    says. Lossy: for speed benchmarks only.
    """

    method: Literal["mtp"] = "mtp"
    num_speculative_tokens: int = 3
    draft_vocab: int | Sequence[int] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    synthetic_acceptance_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check methods, widths, ids and rates."""
        if self.method != "mtp":
            raise ValueError(f"Unknown speculative method {self.method!r}: use 'mtp'.")
        drafts = self.num_speculative_tokens
        if type(drafts) is not int or not 1 <= drafts <= 8:
            raise ValueError(
                f"num_speculative_tokens must be an integer from 1 to 8, got {drafts!r}. To do "
                "without drafts pass speculative_config=None, or --num-speculative-tokens 0 to the "
                "command."
            )
        if self.draft_sample_method not in ("greedy", "probabilistic"):
            raise ValueError(
                f"draft_sample_method must be 'greedy' or 'probabilistic', "
                f"got {self.draft_sample_method!r}."
            )
        if self.draft_vocab is not None:
            self._check_draft_vocab(self.draft_vocab)
        if self.synthetic_acceptance_rates is not None:
            self._check_rates(self.synthetic_acceptance_rates)
            if self.draft_sample_method == "probabilistic":
                raise ValueError(
                    "Probabilistic drafts come from the MTP head and are verified by rejection "
                    "sampling: drop the synthetic rates, or draft greedily."
                )

    def _check_draft_vocab(self, vocab: int | Sequence[int]) -> None:
        if not isinstance(vocab, Iterable):
            check_sizes(draft_vocab=vocab)
            return
        ids = tuple(vocab)
        wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, Integral) or i < 0]
        if wrong or not ids:
            raise ValueError(
                "draft_vocab must be a number of tokens, or a list of token ids from 0 on; got a "
                f"list {f'with {wrong[0]!r}' if wrong else 'of none'}."
            )
        token, times = collections.Counter(ids).most_common(1)[0]
        if times > 1:
            raise ValueError(f"draft_vocab must list an id once, got id {token} {times} times.")
        object.__setattr__(self, "draft_vocab", tuple(map(int, ids)))  # which can be hashed

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
            raise ValueError(
                f"draft_vocab must lie in the model's vocabulary, ids 0 to {vocab_size - 1}, got "
                f"{f'{vocab} ids' if isinstance(vocab, int) else f'id {largest}'}. Leave out what "
                "is beyond."
            )
        ids = range(vocab) if isinstance(vocab, int) else sorted(vocab)
        return tuple(ids) if len(ids) < vocab_size else None

    def _check_rates(self, rates: tuple[float, ...]) -> None:
        if len(rates) != self.num_speculative_tokens or not all(0 <= r <= 1 for r in rates):
            raise ValueError(
                f"synthetic_acceptance_rates needs one rate in [0, 1] for each of the "
                f"{self.num_speculative_tokens} drafts, got {rates}."
            )
        if list(rates) != sorted(rates, reverse=True):
            raise ValueError(
                "synthetic_acceptance_rates are unconditional, so they can't rise with the "
                f"position; got {rates}."
            )

    @staticmethod
    def of(value: "SpeculativeConfig | dict[str, Any]") -> "SpeculativeConfig":
        """`value` itself, or one built from a dict of the fields.

        Raises:
            ValueError: a key that is no field, or a value that breaks a rule.
        """
        if isinstance(value, SpeculativeConfig):
            return value
        known = [field.name for field in dataclasses.fields(SpeculativeConfig)]
        if unknown := sorted(set(value) - set(known)):
            raise ValueError(f"Unknown keys {unknown} in speculative_config; known are {known}.")
        rates = "synthetic_acceptance_rates"
        options: dict[str, Any] = {
            key: tuple(item) if key == rates and item is not None else item
            for key, item in value.items()
        }
        return SpeculativeConfig(**options)

    @staticmethod
    def read(
        value: "SpeculativeConfig | dict[str, Any] | str | None",
    ) -> "SpeculativeConfig | Literal['auto'] | None":
        """`value` as an engine keeps it: a dict becomes a `SpeculativeConfig`.

        Raises:
            ValueError: as in `of`, or another word than "auto".
        """
        if value is None or value == "auto":
            return value  # pyright: ignore[reportReturnType]
        if isinstance(value, str):
            raise ValueError(f"speculative_config must be 'auto', None or a dict, got {value!r}.")
        return SpeculativeConfig.of(value)

    @staticmethod
    def resolve(
        value: "SpeculativeConfig | dict[str, Any] | str | None", has_draft_head: bool
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
