"""The body of /v1/completions."""

from typing import Any

from jaxspec.server.protocol.body import Each
from jaxspec.server.protocol.sampling import Sampling, refused


class CompletionRequest(Sampling):
    """Texts or token ids to go on with; several make one answer with choices of all."""

    prompt: str | Each[str] | Each[int] | Each[Each[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def refuse_absent(self) -> None:
        """As `Sampling`'s; a suffix, and more samples than are answered, are refused too."""
        super().refuse_absent()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refused("best_of", self.best_of, "every sample is answered. Use n.")
        if self.suffix:
            raise refused("suffix", self.suffix, "texts are not filled in. Leave it out.")

    @property
    def prompts(self) -> list[Any]:
        """The prompts: texts, or lists of token ids."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if is_one else list(prompt)
