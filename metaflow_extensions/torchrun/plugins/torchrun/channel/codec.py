"""Frames of JSON, without any I/O.

The channel between the nodes is a stream: four bytes of length, big endian, and that many bytes of JSON. The link between
a task and its supervisor keeps packets whole: a frame is one of them, or several.
"""

from __future__ import annotations

import json
import struct
from typing import Any

LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">I?")  # of a packet: the number of its frame, and whether it is the last one
PACKET_BYTES = 64 * 1024
"""A packet has no more of a frame; the smallest buffer of a socket on Linux that anybody uses holds it."""
MOST_BYTES = PACKET_BYTES + _HEAD.size
"""A packet has no more bytes."""


def dump(value: Any) -> bytes:
    """Return plain data as JSON."""
    # As they are, characters take four bytes at most; escaped, an emoji takes twelve. Half of a surrogate pair, as
    # file names can hold it, is no UTF-8; `load` takes it back as it was.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def frame(value: Any) -> bytes:
    """Return the frame of plain data."""
    data = dump(value)
    return LENGTH.pack(len(data)) + data


def load(data: bytes) -> Any:
    """Return the object or list of a frame without its length; raise ValueError if it is none."""
    try:
        value = json.loads(data.decode("utf-8", "surrogatepass"))
    except RecursionError:
        raise ValueError("a frame must not be nested so deeply") from None
    if not isinstance(value, dict | list):
        raise ValueError("a frame must hold a JSON object or list")
    return value


class Frames:
    """Bytes that have come, as frames; one of more than `limit` bytes is refused."""

    def __init__(self, limit: float = float("inf")) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        """Add bytes that have come."""
        self._buffer += data

    def take(self, count: int | None = None) -> Any:
        """Return the value of the next frame, or the next `count` bytes as they are; None while they are incomplete."""
        begin = 0
        if count is None:
            if len(self._buffer) < LENGTH.size:
                return None
            begin = LENGTH.size
            (count,) = LENGTH.unpack_from(self._buffer)
            if count > self._limit:
                raise ValueError(f"a frame of {count} bytes is over the limit of {self._limit}")
        if len(self._buffer) < begin + count:
            return None
        piece = bytes(self._buffer[begin : begin + count])
        del self._buffer[: begin + count]
        return load(piece) if begin else piece


def packets(number: int, value: Any) -> list[bytes]:
    """Return the packets of plain data, each with the `number` of its frame."""
    data = dump(value)
    return [
        _HEAD.pack(number, at + PACKET_BYTES >= len(data)) + data[at : at + PACKET_BYTES]
        for at in range(0, len(data), PACKET_BYTES)
    ]


class Packets:
    """Packets that have come, as frames. Those of two frames may be mixed: a signal handler sends one in between."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytes]] = {}

    def add(self, packet: bytes) -> Any:
        """Return the value of the frame that a packet completes; None if it completes none."""
        number, is_last = _HEAD.unpack_from(packet)
        parts = self._parts.setdefault(number, [])
        parts.append(packet[_HEAD.size :])
        return load(b"".join(self._parts.pop(number))) if is_last else None
