"""Thrift's compact protocol, written: to make headers that lie."""

from struct import pack


def struct(fields):
    """Ints are 64 bits wide, dicts are structs, lists hold one of either."""
    out, last = b"", 0
    for number, value in fields.items():
        kind, data = _value(value)
        out += bytes([(number - last) << 4 | kind]) + data
        last = number
    return out + b"\0"


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _value(value):
    if isinstance(value, dict):
        return 12, struct(value)
    if isinstance(value, list):
        kinds = [_value(each) for each in value]
        kind = kinds[0][0] if kinds else 12
        return 9, bytes([0xF0 | kind]) + varint(len(value)) + b"".join(data for _, data in kinds)
    if isinstance(value, bytes):
        return 8, varint(len(value)) + value
    return 6, varint(value * 2 if value >= 0 else -2 * value - 1)


def parquet(footer, body=b"", size=None, magic=b"PAR1"):
    """A file of pages and a footer, given as `struct` takes it or as bytes."""
    data = footer if isinstance(footer, bytes) else struct(footer)
    length = len(data) if size is None else size
    return b"PAR1" + body + data + pack("<I", length) + magic
