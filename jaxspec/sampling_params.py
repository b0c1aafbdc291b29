"""How to choose tokens and when to stop, as the caller says it."""

import dataclasses
import numbers

import numpy as np

from jaxspec.sampler import TEMPERATURE, TOP_K_TOP_P, Sampler

MAX_TEMPERATURE = 1e6  # beyond it float32 scores could overflow
GREEDY_BELOW = 1e-5
"""Float32 temperatures below this are greedy: scores divided by them would overflow to ties."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop, in the words of vLLM.

    `temperature` 0, or any below `GREEDY_BELOW`, is greedy. `top_k` -1 or 0 and `top_p` 1 are off.
    `stop` strings end the text before them; `stop_token_ids` are kept as the last token.
    `min_tokens` forbids stop ids before so many tokens. `n` samples, each with noise of its own,
    share one prefill as far as rows are free when it ends.

    Raises:
        ValueError: a value outside its range; the message names the rule.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        for name, value in (("stop", stops), ("stop_token_ids", self.stop_token_ids or ())):
            if not isinstance(value, list | tuple):
                raise ValueError(f"{name} must be a list, got {value!r}.")
            object.__setattr__(self, name, tuple(value))
        self._check_integers()
        if not all(isinstance(value, numbers.Real) for value in (self.temperature, self.top_p)):
            raise ValueError(
                f"temperature and top_p must be numbers, got {self.temperature!r} and "
                f"{self.top_p!r}."
            )
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must be a number from 0 to {MAX_TEMPERATURE:,.0f}, got "
                f"{self.temperature}; 0 is greedy."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1 turns it off.")
        if any(not isinstance(token, numbers.Integral) for token in self.stop_token_ids):
            raise ValueError(
                f"stop_token_ids must be integers, got {list(self.stop_token_ids)}; texts go to "
                "stop."
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise ValueError(f"stop strings must be non-empty strings, got {list(self.stop)}.")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} > {self.max_tokens}."
            )

    def _check_integers(self) -> None:
        minima = {"n": 1, "top_k": -1, "max_tokens": 1, "min_tokens": 0}
        for name, minimum in minima.items():
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, numbers.Integral)
                or value < minimum
            ):
                off = "; -1 turns it off" if name == "top_k" else ""
                raise ValueError(
                    f"{name} must be an integer of at least {minimum}, got {value!r}{off}."
                )
        seed = 0 if self.seed is None else self.seed
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must be an integer that fits in 64 bits, got {seed!r}.")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, by the same float32 comparison as on the device."""
        return bool(np.float32(self.temperature) < GREEDY_BELOW)

    @property
    def sampler(self) -> Sampler:
        """The least sampler that serves this request: the logits processors that it wants."""
        draws = not self.is_greedy
        wanted = {
            TEMPERATURE: draws,
            TOP_K_TOP_P: draws and (self.top_k > 0 or self.top_p < 1),
        }
        return Sampler.of(*(name for name, is_wanted in wanted.items() if is_wanted))
