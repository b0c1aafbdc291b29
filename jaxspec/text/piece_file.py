"""Parse SentencePiece's tokenizer.model: a protocol buffer, of which a few fields are read.

The fields' numbers are those of google/sentencepiece, src/sentencepiece_model.proto. The wire
format is that of protocol buffers: a varint with number and type, then the value.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenizers import Regex, normalizers

from jaxspec.checks import shown

MAX_PIECES = 2**20
"""Maximum pieces: about four times those of the largest published vocabulary."""
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ROLES = {"bos_token": (46, "<s>", 41, 1), "eos_token": (47, "</s>", 42, 2)}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_Value = int | bytes


class Pieces(NamedTuple):
    """The vocabulary of a model, and how it treats texts."""

    texts: list[str]
    scores: list[float]
    kinds: list[int]
    is_unigram: bool
    adds_space: bool  # before a text
    removes_spaces: bool  # at both ends, and all but one between words
    charsmap: bytes  # precompiled normalization; empty for none
    roles: dict[str, str]  # tokens by name, such as bos_token

    @property
    def ids(self) -> dict[str, int]:
        """Ids by text, without the pieces that the model never makes."""
        kinds = enumerate(zip(self.texts, self.kinds, strict=True))
        return {text: index for index, (text, kind) in kinds if kind != _UNUSED}

    @property
    def unknown_id(self) -> int:
        return self.kinds.index(_UNKNOWN)

    @property
    def has_bytes(self) -> bool:
        return _BYTE in self.kinds

    @property
    def special(self) -> list[str]:
        return self._of(_CONTROL, _UNKNOWN)

    @property
    def user_defined(self) -> list[str]:
        return self._of(_USER_DEFINED)

    def _of(self, *kinds: int) -> list[str]:
        pairs = zip(self.texts, self.kinds, strict=True)
        return [text for text, kind in pairs if kind in kinds]

    def normalizers(self, path: Path) -> list[normalizers.Normalizer]:
        """Return what is done to a text before its spaces are marked."""
        found: list[normalizers.Normalizer] = []
        if self.charsmap:
            try:
                found.append(normalizers.Precompiled(self.charsmap))
            except BaseException as error:  # the library's panics are BaseExceptions
                if isinstance(error, KeyboardInterrupt | MemoryError | SystemExit):
                    raise
                raise _broken(path, f"`precompiled_charsmap` can't be read: {error}") from error
        if self.removes_spaces:
            found += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        return found


def parse(content: bytes, path: Path) -> Pieces:
    """Parse the content of the file at `path`; errors have the path.

    Raises:
        ValueError: It is malformed, or asks for what is not implemented.
    """
    try:
        return _parsed(content, path)
    except (LookupError, struct.error, _Malformed) as error:
        reason = error if isinstance(error, _Malformed) else "it ends in the middle of a field"
        raise _broken(path, str(reason)) from error


def _parsed(content: bytes, path: Path) -> Pieces:
    texts, scores, kinds = [], [], []
    trainer: dict[int, _Value] = {}
    rules: dict[int, _Value] = {}
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_as_bytes(value, "pieces")))
            texts.append(_text(piece.get(1, b""), f"piece {len(texts)}"))
            scores.append(_score(piece.get(2), texts[-1]))
            kinds.append(_whole(piece.get(3, _NORMAL), f"the type of {shown(texts[-1])}"))
            if len(texts) > MAX_PIECES:
                raise _Malformed(f"it has more than {MAX_PIECES:,} pieces")
        elif number == 2:
            trainer |= dict(_fields(_as_bytes(value, "trainer_spec")))
        elif number == 3:
            rules |= dict(_fields(_as_bytes(value, "normalizer_spec")))
    if len(set(texts)) < len(texts):
        raise _Malformed("it has a piece twice")
    if kinds.count(_UNKNOWN) != 1:
        raise _Malformed(f"it must have one piece for what is unknown, and has {kinds.count(2)}")
    if unknown := [kind for kind in kinds if not _NORMAL <= kind <= _BYTE]:
        raise _Malformed(f"a piece has the type {unknown[0]}, which the format lacks")
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE) or trainer.get(24, 0) or not rules.get(5, 1):
        raise ValueError(
            f"{path} must be a SentencePiece model of type 1 (unigram) or 2 (BPE) that writes "
            f"spaces before words, got `model_type` {shown(kind)}, `treat_whitespace_as_suffix` "
            f"{shown(trainer.get(24, 0))} and `escape_whitespaces` {shown(rules.get(5, 1))}. Make "
            "a tokenizer.json with save_pretrained of transformers."
        )
    return Pieces(
        texts,
        scores,
        kinds,
        is_unigram=kind == _UNIGRAM,
        adds_space=bool(rules.get(3, 1)),
        removes_spaces=bool(rules.get(4, 1)),
        charsmap=_as_bytes(rules.get(2, b""), "precompiled_charsmap"),
        roles=_roles(trainer, texts, kinds),
    )


def _roles(trainer: dict[int, _Value], texts: list[str], kinds: list[int]) -> dict[str, str]:
    roles = {"unk_token": texts[kinds.index(_UNKNOWN)]}
    for role, (number, default, id_number, default_id) in _ROLES.items():
        text = _text(trainer.get(number, default.encode()), role)
        is_used = _signed(trainer.get(id_number, default_id)) >= 0
        if is_used and text in texts:
            roles[role] = text
    return roles


class _Malformed(Exception):
    """A rule of the format that the content breaks."""


def _fields(content: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield number and value of the fields of a message: an integer, or the bytes of others."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(content, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = _varint(content, place)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise _Malformed(f"a field at byte {place:,} has the wire type {kind}")
        if size > len(content) - place:
            raise _Malformed(f"a field at byte {place:,} would have {size:,} bytes")
        yield number, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise _Malformed(f"an integer before byte {place:,} is too long")


def _signed(value: _Value) -> int:
    number = _whole(value, "an id")
    return number - 2**64 if number >= 2**63 else number


def _whole(value: _Value, what: str) -> int:
    if not isinstance(value, int):
        raise _Malformed(f"{what} is no integer")
    return value


def _as_bytes(value: _Value, what: str) -> bytes:
    if not isinstance(value, bytes):
        raise _Malformed(f"`{what}` is an integer")
    return value


def _text(value: _Value, what: str) -> str:
    try:
        return _as_bytes(value, what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Malformed(f"{what} is no UTF-8") from error


def _score(value: _Value | None, piece: str) -> float:
    if value is None:
        return 0.0
    if not isinstance(value, bytes) or len(value) != 4:
        raise _Malformed(f"the score of {shown(piece)} is no float")
    (score,) = struct.unpack("<f", value)
    if score != score:
        raise _Malformed(f"the score of {shown(piece)} is NaN")
    return score


def _broken(path: Path, fault: str) -> ValueError:
    return ValueError(
        f"{path} must be a SentencePiece model, and is damaged: {fault}. Download it again."
    )
