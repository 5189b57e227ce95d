"""The partition that Kafka's default partitioner chooses for a key."""

from __future__ import annotations

from typing import Final

_MULTIPLIER: Final = 0x5BD1E995
_SEED: Final = 0x9747B28C
_BITS: Final = 0xFFFFFFFF


def partition_of(key: bytes, partitions: int) -> int:
    """Return it (murmur2, 32 bits)."""
    value = (_SEED ^ len(key)) & _BITS
    whole = len(key) // 4 * 4
    for start in range(0, whole, 4):
        word = int.from_bytes(key[start : start + 4], "little") * _MULTIPLIER & _BITS
        word = (word ^ word >> 24) * _MULTIPLIER & _BITS
        value = value * _MULTIPLIER & _BITS ^ word
    if rest := key[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * _MULTIPLIER & _BITS
    value = (value ^ value >> 13) * _MULTIPLIER & _BITS
    return ((value ^ value >> 15) & 0x7FFFFFFF) % partitions
