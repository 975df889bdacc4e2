"""Random numbers that belong to a key, not to a generator: the same (seed, sample, position) gives the same number.

Law 7: the tokens of a sequence do not depend on what shares its batch, on ranks, yields or resumes.  A generator with a
state cannot keep that law, because its state would have to travel with the sequence and be advanced exactly once per
token.  A counter-based generator has none: Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011) is a keyed bijection of a counter, so a number is looked up rather than drawn.

The key is the row's 64-bit seed; the counter holds position, sample and a purpose, so that later uses of the same key
never meet.  This file knows nothing of tokens or devices.  Rejected: a generator object per sequence (state to carry,
Python per row), and `numpy.random.Philox`, which takes one key at a time.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLY_0 = np.uint64(0xD2511F53)
_MULTIPLY_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_ROUNDS = 10
_ONE_64 = (1 << 64) - 1


class Purpose(IntEnum):
    """What a number is for; numbers of different purposes are independent."""

    TOKEN = 0


def philox(counter: Words, key: Words) -> Words:
    """Encrypt counters with Philox-4x32-10.

    counter: [4, n], key: [2, n], 32-bit words held in uint64 -> [4, n] likewise.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLY_0
        product_1 = c2 * _MULTIPLY_1
        c0 = (product_1 >> _SHIFT) ^ c1 ^ k0
        c1 = product_1 & _MASK
        c2 = (product_0 >> _SHIFT) ^ c3 ^ k1
        c3 = product_0 & _MASK
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return np.stack((c0, c1, c2, c3))


def uniforms(
    seeds: NDArray[np.uint64],
    samples: NDArray[np.int64],
    positions: NDArray[np.int64],
    purpose: Purpose = Purpose.TOKEN,
) -> NDArray[np.float64]:
    """Return the number in [0, 1) of each key: all arguments [n] -> float64 [n].

    The numbers are multiples of 2**-52, so `u * x < x` also after rounding, for every normal x > 0: whoever inverts a
    cumulative sum needs that to never step past its end.
    """
    positions = positions.astype(np.uint64)
    counter = np.stack((
        positions & _MASK,
        positions >> _SHIFT,
        samples.astype(np.uint64) & _MASK,
        np.full(len(positions), purpose, np.uint64),
    ))
    words = philox(counter, np.stack((seeds & _MASK, seeds >> _SHIFT)))
    bits = (words[0] << _SHIFT) | words[1]
    uniform: NDArray[np.float64] = (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return uniform


def row_seed(job_seed: int, row: int) -> int:
    """Derive the seed of a row that named none: 0 <= seed < 2**64, different for any two rows of one job.

    job_seed: any integer, taken modulo 2**64; row >= 0.  The mix is the finaliser of SplitMix64 (Steele et al., OOPSLA
    2014), a bijection, applied to the job's seed and then to the sum with the row.
    """
    return _mix((_mix(job_seed & _ONE_64) + row) & _ONE_64)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _ONE_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _ONE_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _ONE_64
    return value ^ (value >> 31)
