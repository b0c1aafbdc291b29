"""GGUF files byte by byte, for what no writer would write."""

import struct

STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7
F32 = 0


def text(value):
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def entry(key, kind, content):
    return text(key) + struct.pack("<I", kind) + content


def tensor(name, sizes, kind=F32, offset=0):
    """`sizes`: the axis whose elements lie side by side comes first."""
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def gguf_file(
    entries=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, counts=None, alignment=32
):
    """`counts`: of tensors and of entries, if they are not the true ones."""
    counts = counts or (len(tensors), len(entries))
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join([*entries, *tensors])
    return header + b"\0" * (-len(header) % alignment) + data
