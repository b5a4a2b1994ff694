"""Hashing of integers with splitmix64: the one source of randomness for order and augmentation.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the
constants of Vigna's public-domain splitmix64.c. The same numbers on every machine and release.
"""

from enum import IntEnum

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
MASK = 0xFFFFFFFFFFFFFFFF


class Domain(IntEnum):
    """Purposes of derived keys, so that no two uses share random numbers."""

    ORDER = 1
    AUGMENTATION = 2
    ITEM = 3
    SYNTHETIC = 4
    WEIGHTS = 5
    STEP = 6
    EPOCH = 7
    COLLATE = 8
    SCRIPT = 9


def mix64(value: int) -> int:
    """Scramble 64 bits; a bijection (splitmix64's output function)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK
    return value ^ (value >> 31)


def derive_key(domain: Domain, *parts: int) -> int:
    """Fold integers into one 64-bit key; another order of the parts gives another key."""
    key = mix64(int(domain) * GOLDEN)
    for part in parts:
        key = mix64((key ^ (part & MASK)) + GOLDEN)
    return key
