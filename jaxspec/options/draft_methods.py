"""Options of each draft method: MTP, draft model, assistant, n-gram, suffix, EAGLE-3, custom.

`ExtractHiddenStatesOptions` configures a method that drafts nothing and saves hidden states. Each
class has the ClassVars of `speculation.MethodOptions`: `num_drafts` and `has_distribution`.
"""

import collections
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxspec.checks import integer, is_integer, items, path, real, shown, text
from jaxspec.plan.step_shapes import MAX_DRAFTS

_MAX_IDS = 2**20  # length limit of draft_vocab, above the size of any vocabulary


@dataclasses.dataclass(frozen=True)
class MTPOptions:
    """Drafts from the checkpoint's multi-token-prediction (MTP) head.

    Attributes:
        draft_vocab: Token ids that may be drafted (FR-Spec, arXiv 2502.14856): None allows all, an
            integer n the first n ids, and a list only its ids. Byte-pair vocabularies begin with
            the frequent merges and have the end-of-text ids last. Drafting reads only these
            columns of the output head. On several devices, the smallest other ids are added until
            the devices have equally many. The target still scores every token, so outputs do not
            change; with probabilistic drafts their distribution does not.
        draft_head_dtype: Dtype of the output head that scores greedy drafts. "float8_e4m3fn" uses
            a copy with half the bytes of bfloat16, None the head itself, and "auto" the copy where
            it is faster, on a GPU with kernels. Outputs do not change: the target scores with the
            head itself.
    """

    draft_vocab: int | Sequence[int] | None = None
    draft_head_dtype: Literal["auto", "float8_e4m3fn"] | None = "auto"
    num_drafts: ClassVar[int] = 3
    has_distribution: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validate the fields and store the ids as Python integers."""
        object.__setattr__(self, "draft_vocab", _draft_vocab(self.draft_vocab))
        head = self.draft_head_dtype
        if head is not None and (
            not isinstance(head, str) or head not in ("auto", "float8_e4m3fn")
        ):
            raise ValueError(
                "draft_head_dtype must be 'auto', 'float8_e4m3fn' or None, the model's, got "
                f"{shown(head)}."
            )

    def draft_ids(self, vocab_size: int) -> tuple[int, ...] | None:
        """Return the ids that may be drafted, ascending, or None for the whole vocabulary.

        Raises:
            ValueError: an id is `vocab_size` or larger.
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
    return tuple(map(int, ids))  # hashable


@dataclasses.dataclass(frozen=True)
class DraftModelOptions:
    """Drafts from a smaller model of any supported family with the target's vocabulary.

    Attributes:
        model: Folder or hub id of the draft model; required.
        revision: Branch, tag or commit of a hub id.
    """

    model: str | Path | None = None
    revision: str | None = None
    num_drafts: ClassVar[int] = 3
    has_distribution: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validate the fields."""
        _keep_checkpoint(self, "draft_model", "a smaller model with the same vocabulary")


@dataclasses.dataclass(frozen=True)
class AssistantOptions:
    """Drafts from the assistant that was published with a Gemma 4.

    Attributes:
        model: Folder or hub id of the assistant; required.
        revision: Branch, tag or commit of a hub id.
    """

    model: str | Path | None = None
    revision: str | None = None
    num_drafts: ClassVar[int] = 3
    has_distribution: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validate the fields."""
        _keep_checkpoint(self, "assistant", "the assistant that was published with the target")


def _keep_checkpoint(options: Any, method: str, what: str) -> None:
    """Validate `model` and `revision`, and store them."""
    if options.model is None:
        raise ValueError(
            f"The method {method!r} needs a checkpoint to draft with: give 'model', a folder or a "
            f"hub id of {what}."
        )
    object.__setattr__(options, "model", path("model", options.model))
    if options.revision is not None:
        object.__setattr__(options, "revision", text("revision", options.revision))


_MOST = 16  # longest match; each of its tokens costs a comparison of all tokens per step


@dataclasses.dataclass(frozen=True)
class NgramOptions:
    """Drafts that repeat what followed an earlier match of the last tokens in prompt or output.

    The longest match of `prompt_lookup_min` to `prompt_lookup_max` tokens is used, the newest
    among equally long ones ("Prompt Lookup Decoding", Saxena, 2023). A row without a match has no
    drafts. If only one bound is given, it sets both, as in vLLM.
    """

    prompt_lookup_min: int | None = None  # default: prompt_lookup_max if given, else 2
    prompt_lookup_max: int | None = None  # default: prompt_lookup_min if given, else 5
    num_drafts: ClassVar[int] = 4
    has_distribution: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate both bounds and fill in the defaults."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None and most is None:
            least, most = 2, 5
        least = integer("prompt_lookup_min", most if least is None else least, 1, _MOST)
        most = integer("prompt_lookup_max", least if most is None else most, 1, _MOST)
        if least > most:
            raise ValueError(
                f"prompt_lookup_min must not exceed prompt_lookup_max, got {least} > {most}."
            )
        object.__setattr__(self, "prompt_lookup_min", least)
        object.__setattr__(self, "prompt_lookup_max", most)


_MOST_DEPTH = 256
_MOST_FACTOR = 64.0


@dataclasses.dataclass(frozen=True)
class SuffixOptions:
    """Drafts that repeat what followed earlier matches of the last tokens in any request.

    "SuffixDecoding" (Oliaro et al. 2024, arXiv 2411.04975), with the names and defaults of vLLM:
    the most frequent continuation of the longest matches is drafted, as far as it is likely. The
    tokens of finished requests are cached, up to 524,288 in total; the oldest requests are evicted
    first.

    Attributes:
        suffix_decoding_max_tree_depth: Longest match in tokens.
        suffix_decoding_max_cached_requests: Number of finished requests that are cached; 0 matches
            running requests only.
        suffix_decoding_max_spec_factor: Most drafts per matched token.
        suffix_decoding_min_token_prob: Least share of the matches that agree with a draft and all
            drafts before it.
    """

    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    num_drafts: ClassVar[int] = 8
    has_distribution: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate every number."""
        keep = object.__setattr__
        for name, least, most in (
            ("suffix_decoding_max_tree_depth", 1, _MOST_DEPTH),
            ("suffix_decoding_max_cached_requests", 0, 2**31 - 1),
        ):
            keep(self, name, integer(name, getattr(self, name), least, most))
        for name, most in (
            ("suffix_decoding_max_spec_factor", _MOST_FACTOR),
            ("suffix_decoding_min_token_prob", 1.0),
        ):
            value = real(getattr(self, name))
            if not 0 <= value <= most:
                raise ValueError(
                    f"{name} must be a number from 0 to {most:g}, got {shown(getattr(self, name))}."
                )
            keep(self, name, value)


_MAX_LAYERS = 16


@dataclasses.dataclass(frozen=True)
class Eagle3Options:
    """Drafts from a head trained for the target (EAGLE-3, arXiv 2503.01840).

    Attributes:
        model: Folder or hub id of the head; required.
        revision: Branch, tag or commit of a hub id.
        aux_layer_ids: Target layers, from 0, at whose input the head reads the residual stream.
            None uses those of its config.json, or else the third layer, the middle one and the
            third from the end. Trainers number layers differently: if few drafts are accepted, try
            ids one higher or lower.
    """

    model: str | Path | None = None
    revision: str | None = None
    aux_layer_ids: Sequence[int] | None = None
    num_drafts: ClassVar[int] = 3
    has_distribution: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validate the fields and store the layers as Python integers."""
        _keep_checkpoint(self, "eagle3", "an EAGLE-3 head that was trained for the target")
        object.__setattr__(self, "aux_layer_ids", _layer_ids(self.aux_layer_ids))


def _layer_ids(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    ids = items(given, _MAX_LAYERS)
    if not ids or len(ids) > _MAX_LAYERS or not all(is_integer(i) and i >= 0 for i in ids):
        raise ValueError(
            f"aux_layer_ids must list 1 to {_MAX_LAYERS} of the target's layers by their indices, "
            f"from 0 on, got {shown(given)}. Leave it out to read those that the head's "
            "config.json names."
        )
    return tuple(map(int, ids))


@dataclasses.dataclass(frozen=True)
class ExtractHiddenStatesOptions:
    """Hidden states of some layers for each token, saved to one file per finished sample.

    Attributes:
        layers: Points of the residual stream, saved in this order; required. Index i is the input
            of layer i: 0 is the embedding, and the number of layers is the output of the last
            layer before the final norm.
        folder: Folder of the files; required. It is created if its parent exists.
        request_id_prefix: Only requests whose id begins with this prefix are saved; "" saves all.
    """

    layers: Sequence[int] | None = None
    folder: str | Path | None = None
    request_id_prefix: str = ""
    num_drafts: ClassVar[int] = 0
    has_distribution: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate the fields as far as possible without the model and the disk."""
        object.__setattr__(self, "layers", _layers(self.layers))
        if self.folder is None:
            raise ValueError(
                "The method 'extract_hidden_states' needs a place to save to: give 'folder', the "
                "folder that its files shall lie in."
            )
        object.__setattr__(self, "folder", str(path("folder", self.folder)))
        if not isinstance(self.request_id_prefix, str):
            raise ValueError(
                f"request_id_prefix must be a text, got {shown(self.request_id_prefix)}."
            )


def _layers(given: Any) -> tuple[int, ...]:
    found = items(given, _MAX_LAYERS)
    if not found or len(found) > _MAX_LAYERS or not all(is_integer(i) and i >= 0 for i in found):
        raise ValueError(
            f"layers must list 1 to {_MAX_LAYERS} layers of the model by their indices, from 0 on, "
            f"got {shown(given)}. For a model of 24 layers, EAGLE-3 would read [2, 12, 21]."
        )
    index, times = collections.Counter(found).most_common(1)[0]
    if times > 1:
        raise ValueError(f"layers must list a layer once, got {shown(index)} {times} times.")
    return tuple(map(int, found))


_PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # module:Class


@dataclasses.dataclass(frozen=True)
class CustomOptions:
    """Drafts from a user-defined subclass of `jaxspec.proposers.Proposer`.

    Attributes:
        proposer: An instance, or a string "module:Class" that names a class with a classmethod
            `from_config(config, model)`. The module of a named class is imported, which runs its
            code.
    """

    proposer: Any = None
    num_drafts: ClassVar[int] = 3  # default for "module:Class"; an instance sets its own
    has_distribution: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validate as far as possible without JAX; `jaxspec.proposers.custom` checks the rest."""
        proposer = self.proposer
        if isinstance(proposer, str):
            if not _PLACE.fullmatch(proposer):
                raise ValueError(
                    f"A proposer's text must be 'module:Class', got {shown(proposer)}. Name the "
                    "module as an import does, or give an instance."
                )
            return
        if isinstance(proposer, type) or not callable(getattr(proposer, "propose", None)):
            raise ValueError(
                "The method 'custom' needs a proposer: give 'proposer', an instance of your "
                "subclass of jaxspec.proposers.Proposer or a text 'module:Class', got "
                f"{shown(proposer)}."
            )
        count = getattr(proposer, "num_drafts", None)
        if not is_integer(count) or not 1 <= int(count) <= MAX_DRAFTS:  # pyright: ignore
            raise ValueError(
                f"A proposer's num_drafts must be an integer from 1 to {MAX_DRAFTS}, got "
                f"{shown(count)} of {self.name}. Set it, as a field of the dataclass or of the "
                "class."
            )
        try:
            hash(proposer)
        except TypeError as error:
            raise ValueError(
                "A proposer must have a hash, because programs are compiled for it, and "
                f"{self.name} has none ({error}). Make it a frozen dataclass of values "
                "that have one, such as tuples; arrays come from its init_tables."
            ) from error
        object.__setattr__(self, "num_drafts", int(count))  # pyright: ignore[reportArgumentType]

    @property
    def name(self) -> str:
        """The proposer's class as "module:Class"."""
        kind = type(self.proposer)
        is_text = isinstance(self.proposer, str)
        return self.proposer if is_text else f"{kind.__module__}:{kind.__qualname__}"
