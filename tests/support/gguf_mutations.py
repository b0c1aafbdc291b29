"""Damaged copies of a GGUF file: bits, fields of the header, and lengths, from a seed."""

import struct
from typing import NamedTuple

import numpy as np

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_MOST_ITEMS = 4


class Field(NamedTuple):
    """A field of the header: its place in the file and its meaning."""

    start: int
    size: int
    kind: str


class Tensor(NamedTuple):
    """The fields of a tensor's description, and its bytes in the data."""

    name: Field
    sizes: tuple[Field, ...]
    type: Field
    offset: Field


class Mutations:
    """The fields of a sound file, and damaged copies of it."""

    def __init__(self, content):
        self.content = content
        self.fields, self.tensors = [], []
        self._at = 0
        self._walk()
        self.data = -(-self._at // _ALIGNMENT) * _ALIGNMENT

    def damaged(self, rng):
        """One damaged copy, and what was done to it."""
        kinds = (self._bit, self._bit, self._value, self._value, self._value, self._type)
        kinds += (self._type, self._swap, self._shape, self._length, self._padding, self._name)
        content = bytearray(self.content)
        change = kinds[rng.integers(len(kinds))]
        said = change(content, rng)
        return f"{change.__name__}: {said}", bytes(content)

    def _bit(self, content, rng):
        place, bit = int(rng.integers(self.data)), int(rng.integers(8))
        content[place] ^= 1 << bit
        return f"bit {bit} of byte {place}"

    def _value(self, content, rng):
        """A field of another value: a boundary, a neighbour, another field's, or any."""
        field, other = (self.fields[i] for i in rng.integers(len(self.fields), size=2))
        if field.kind == "text" and field.size > 8:
            start = field.start + int(rng.integers(field.size))
            content[start] = int(rng.integers(256))
            return f"byte {start} of {field}"
        size = min(field.size, 8)
        before = int.from_bytes(content[field.start : field.start + size], "little")
        theirs = int.from_bytes(content[other.start : other.start + min(other.size, 8)], "little")
        top = 1 << 8 * size
        choices = [0, 1, 2, 3, 7, 8, 9, 12, 13, 32, top // 2 - 1, top // 2, top - 1, before + 1]
        choices += [before - 1, before * 2, before // 2, theirs, int(rng.integers(2**32))]
        value = choices[rng.integers(len(choices))] % top
        content[field.start : field.start + size] = value.to_bytes(size, "little")
        return f"{field} from {before} to {value}"

    def _type(self, content, rng):
        """A tensor, or in one case of three all of them that have its type, of another type."""
        chosen = self.tensors[rng.integers(len(self.tensors))]
        kind = struct.pack("<I", int(rng.integers(42)))
        before = content[chosen.type.start :][:4]
        alike = [t for t in self.tensors if content[t.type.start :][:4] == before]
        for tensor in alike if rng.integers(3) == 0 else [chosen]:
            content[tensor.type.start : tensor.type.start + 4] = kind
        return f"{chosen} of type {kind[0]}"

    def _swap(self, content, rng):
        """Two tensors that exchange a field: an offset, a type, all sizes or a whole entry."""
        one, two = (self.tensors[i] for i in rng.integers(len(self.tensors), size=2))
        names = [("offset",), ("type",), ("sizes",), ("sizes", "type", "offset")]
        chosen = names[rng.integers(len(names))]
        for name in chosen:
            pairs = [getattr(each, name) for each in (one, two)]
            pairs = zip(*(p if name == "sizes" else (p,) for p in pairs), strict=False)
            for a, b in pairs:
                theirs = content[b.start : b.start + b.size]
                content[b.start : b.start + b.size] = content[a.start : a.start + a.size]
                content[a.start : a.start + a.size] = theirs
        return f"{chosen} of {one} and {two}"

    def _shape(self, content, rng):
        tensor = self.tensors[rng.integers(len(self.tensors))]
        sizes = [int.from_bytes(content[f.start : f.start + 8], "little") for f in tensor.sizes]
        before, which = list(sizes), int(rng.integers(len(sizes)))
        change = int(rng.integers(5))
        if change == 0:
            sizes = sizes[::-1]
        elif change == 1:
            sizes[which] += 1
        elif change == 2:
            sizes[which] = max(1, sizes[which] - 1)
        elif change == 3:
            sizes[which], sizes[which - 1] = sizes[which] * 2, sizes[which - 1] // 2
        else:
            sizes[which] = int(rng.integers(1, 2 * sizes[which] + 1))
        for field, size in zip(tensor.sizes, sizes, strict=True):
            content[field.start : field.start + 8] = struct.pack("<Q", size % 2**64)
        return f"{tensor} from {before} to {sizes}"

    def _length(self, content, rng):
        size, change = len(content), int(rng.integers(4))
        if change == 0:
            del content[int(rng.integers(size)) :]
        elif change == 1:
            del content[size - int(rng.integers(1, 64)) :]
        elif change == 2:
            content.extend(bytes(int(rng.integers(1, 64))))
        else:
            place, count = int(rng.integers(size)), int(rng.integers(1, 40))
            content[place:place] = rng.bytes(count)
        return f"from {size} to {len(content)} bytes"

    def _padding(self, content, rng):
        """A byte of the padding, at whose places the sound file has zeros."""
        places = [*range(self._at, self.data)]
        for tensor, end in zip(self.tensors, self._ends(), strict=True):
            del tensor
            places += range(end, -(-end // _ALIGNMENT) * _ALIGNMENT)
        if not places:
            return self._bit(content, rng)
        place = int(places[rng.integers(len(places))])
        content[place] = int(rng.integers(1, 256))
        return f"byte {place}"

    def _name(self, content, rng):
        """A text that another one of its length is written over."""
        texts = [field for field in self.fields if field.kind in ("text", "name")]
        one = texts[rng.integers(len(texts))]
        alike = [field for field in texts if field.size == one.size and field != one] or [one]
        two = alike[rng.integers(len(alike))]
        content[one.start : one.start + one.size] = content[two.start : two.start + two.size]
        return f"{one} is {two}"

    def _ends(self):
        import gguf

        for tensor in self.tensors:
            sizes = [
                int.from_bytes(self.content[f.start : f.start + 8], "little") for f in tensor.sizes
            ]
            kind = gguf.GGMLQuantizationType(self.content[tensor.type.start])
            size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            start = int.from_bytes(self.content[tensor.offset.start :][:8], "little")
            yield self.data + start + int(np.prod(sizes)) // size * num_bytes

    def _walk(self):
        self._take(4, "magic")
        self._take(4, "version")
        num_tensors, num_entries = self._take(8, "count"), self._take(8, "count")
        for _ in range(num_entries):
            self._text("name")
            kind = self._take(4, "type")
            count = 1
            if kind == _ARRAY:
                kind, count = self._take(4, "type"), self._take(8, "length")
            kept = len(self.fields) + 2 * _MOST_ITEMS
            for _ in range(count):
                self._text("text") if kind == _STRING else self._take(_WIDTHS[kind], "value")
            del self.fields[kept:]  # else most mutations would be of long lists
        for _ in range(num_tensors):
            name = self._text("name")
            sizes = [self._field(8, "size") for _ in range(self._take(4, "dimensions"))]
            kind, offset = self._field(4, "type"), self._field(8, "offset")
            self.tensors.append(Tensor(name, tuple(sizes), kind, offset))

    def _text(self, kind):
        return self._field(self._take(8, "length"), kind)

    def _field(self, size, kind):
        field = Field(self._at, size, kind)
        if size:
            self.fields.append(field)
        self._at += size
        return field

    def _take(self, size, kind):
        field = self._field(size, kind)
        return int.from_bytes(self.content[field.start : field.start + size], "little")
