"""`differentiable`: a model's log-probabilities as a function that JAX can differentiate."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.llm_engine import LLMEngine
from jaxspec.api.replicated_engine import ReplicatedEngine
from jaxspec.checks import real, shown
from jaxspec.models.base import Model
from jaxspec.models.layers.weight_matrix import forms_of
from jaxspec.models.sequence import draft_logprobs, text_logprobs

_Texts = Int[Array, "texts length"]
_Lengths = Int[Array, " texts"]


@dataclasses.dataclass(frozen=True, eq=False)
class Differentiable:
    """A model as a pure function of its parameters.

    Both methods can be transformed by `jax.grad`, `jax.jit` and the like. They run the layers of
    the engine by references of their ops, on GPUs too. The backward pass computes each layer again,
    so memory grows with the tokens of a call times the hidden size, plus what one layer needs.

    Attributes:
        graph: The model without values: `nnx.merge(graph, params)` is the model.
        params: The parameters, in the layers' own names and shapes. An engine's are its arrays, not
            copies: do not donate or delete them; copy them first. They may have another dtype than
            the engine's, such as float32; activations then have it too.
    """

    graph: nnx.GraphDef
    params: nnx.State

    def logprobs(
        self,
        params: nnx.State,
        tokens: _Texts,
        lengths: _Lengths,
        temperature: Any = 1.0,
        *,
        routed_experts: Any = None,
    ) -> Float[Array, "texts predicted"]:
        """Return the log-probability of each token of texts, given those before it.

        Args:
            params: Parameters as in `params`.
            tokens: Token ids of the texts, padded at the end to one length. Ids of padding are
                arbitrary.
            lengths: Number of tokens of each text.
            temperature: Divides the logits, as in `SamplingParams`; 1 gives those of `LLM.score`.
            routed_experts: Experts to route each token to, `[texts, length - 1, layers, top_k]`:
                `CompletionOutput.routed_experts` of each text, padded at the end. Their weights are
                computed from `params`. None routes each token to its best experts.

        Returns:
            float32 `[texts, length - 1]`: the value at `[i, j]` is that of `tokens[i, j + 1]`. It
            is 0 for padding, and NaN for an id that is not in the vocabulary. With an expert that
            the model lacks, other values are NaN, too.

        Raises:
            ValueError: an array has another shape or dtype, `temperature` is not above 0, or a
                dense model is given `routed_experts`.
        """
        arrays, model = _checked(tokens, lengths, temperature), nnx.merge(self.graph, params)
        if routed_experts is None:
            return text_logprobs(model, *arrays)
        return text_logprobs(model, *arrays, _checked_routes(model, arrays[0], routed_experts))

    def draft_logprobs(
        self, params: nnx.State, tokens: _Texts, lengths: _Lengths, temperature: Any = 1.0
    ) -> Float[Array, "texts predicted"]:
        """Return the log-probability that the draft head gives each token as a first draft.

        The gradient is zero for all parameters but those of the head (`params["draft_head"]`), so
        training with it changes how many drafts are accepted, and no output.

        Args:
            params: As in `logprobs`.
            tokens: As in `logprobs`.
            lengths: As in `logprobs`.
            temperature: As in `logprobs`.

        Returns:
            float32 `[texts, length - 2]`: the value at `[i, j]` is that of `tokens[i, j + 2]`, else
            as in `logprobs`.

        Raises:
            ValueError: the model has no draft head, or as in `logprobs`.
        """
        model = nnx.merge(self.graph, params)
        if model.draft_head is None:
            raise ValueError(
                "draft_logprobs needs a model with a draft head (MTP), and this one has none. Use "
                "logprobs, or load a checkpoint that has the head's tensors."
            )
        return draft_logprobs(model, *_checked(tokens, lengths, temperature))


def differentiable(model: LLMEngine | AsyncLLM | Model) -> Differentiable:
    """Return a model's log-probabilities as a function of its parameters, to train it.

    Args:
        model: An `LLM`, an `AsyncLLM`, or a model of `jaxspec.models.load_model`.

    Returns:
        The function, and the model's current parameters.

    Raises:
        TypeError: `model` is none of these.
        ValueError: its weights are in 8 or 4 bits, or several devices or processes hold it.
        RuntimeError: the engine is closed.
    """
    if isinstance(model, AsyncLLM):
        model = model._engine
    if isinstance(model, LLMEngine):
        model = _model_of(model)
    if not isinstance(model, Model):
        raise TypeError(
            f"differentiable takes an LLM, an AsyncLLM or a model, got {shown(model)}. Load one "
            "with jaxspec.LLM or jaxspec.models.load_model."
        )
    if (count := model.config.devices) > 1:
        raise ValueError(
            f"A differentiable model must be whole on one device, and {count} share this one. Load "
            "it with tensor_parallel_size=1."
        )
    forms = forms_of(model)
    if held := [form.grain.bits for form in forms if form is not None]:
        bits = " or ".join(map(str, sorted({*held}, reverse=True)))
        raise ValueError(
            f"A differentiable model must have weights in 32 or 16 bits, and {len(held)} of "
            f"{len(forms)} matrices of this one are in {bits} bits. Load it with "
            "quantization='dequantise'."
        )
    return Differentiable(*nnx.split(model))


def _model_of(engine: LLMEngine) -> Model:
    if isinstance(engine, ReplicatedEngine):
        raise ValueError(
            "A differentiable model must be in this process, and with data_parallel_size above 1 "
            "each replica is in its own. Load it with data_parallel_size=1."
        )
    engine.session.require_usable()
    engine.session.gate.check_awake("weights")
    return engine._runner.model()


def _checked(
    tokens: Any, lengths: Any, temperature: Any
) -> tuple[_Texts, _Lengths, Float[Array, ""]]:
    """Return the arguments as the model takes them; values of traced arrays are not checked."""
    tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)
    are_integers = all(jnp.issubdtype(x.dtype, jnp.integer) for x in (tokens, lengths))
    has_texts = tokens.ndim == 2 and min(tokens.shape) > 0
    if not are_integers or not has_texts or lengths.shape != tokens.shape[:1]:
        raise ValueError(
            "tokens and lengths must be integers of the shapes [texts, length] and [texts], with "
            f"at least one token, got {_kind(tokens)} and {_kind(lengths)}. Pad texts at their "
            "ends to one length."
        )
    if not isinstance(temperature, jax.Array) and not 0 < real(temperature) < float("inf"):
        raise ValueError(
            f"temperature must be a number above 0, got {shown(temperature)}. Greedy choices have "
            "no gradient; 1 is the model's own distribution."
        )
    as_float = jnp.asarray(temperature, jnp.float32)
    if as_float.ndim:
        raise ValueError(
            f"temperature must be one number for all texts, got {_kind(as_float)}. Call logprobs "
            "once for each temperature."
        )
    return tokens.astype(jnp.int32), lengths.astype(jnp.int32), as_float


def _checked_routes(model: Model, tokens: _Texts, given: Any) -> Int[Array, "..."]:
    spec, given = model.routes_spec(), jnp.asarray(given)
    wanted = tokens.shape[0], tokens.shape[1] - 1, spec.layers, spec.top_k
    if given.shape != wanted or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(
            f"routed_experts of these texts must be integers {list(wanted)}, the experts of each "
            f"token but the last in {spec.layers} layers, got {_kind(given)}. Pad those of "
            "CompletionOutput at their ends."
        )
    return given


def _kind(array: Array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
