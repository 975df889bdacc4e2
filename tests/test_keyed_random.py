"""Keyed random numbers: published answers, independence of the batch, and plain statistics at fixed seeds."""

from __future__ import annotations

import numpy as np
import pytest

from bgmpi.keyed_random import philox, row_seed, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    # The known-answer vectors of Random123 for philox4x32 with ten rounds; a second column must not disturb the first.
    counters = np.array([counter, (1, 2, 3, 4)], np.uint64).T
    keys = np.array([key, (5, 6)], np.uint64).T
    assert tuple(philox(counters, keys)[:, 0].tolist()) == answer


def test_a_number_depends_on_its_own_key_alone() -> None:
    seeds = np.array([1, 2, 2**64 - 1, 7], np.uint64)
    samples = np.array([0, 1, 2, 3])
    positions = np.array([5, 6, 2**40, 0])
    together = uniforms(seeds, samples, positions)
    for i in range(4):
        assert uniforms(seeds[i : i + 1], samples[i : i + 1], positions[i : i + 1])[0] == together[i]
    assert np.array_equal(uniforms(seeds[::-1], samples[::-1], positions[::-1]), together[::-1])


def test_seed_sample_and_position_each_change_the_number() -> None:
    def one(seed: int, sample: int, position: int) -> float:
        return float(uniforms(np.array([seed], np.uint64), np.array([sample]), np.array([position]))[0])

    numbers = [one(1, 0, 0), one(2, 0, 0), one(1 + 2**32, 0, 0), one(1, 1, 0), one(1, 0, 1), one(1, 0, 2**32)]
    assert len(set(numbers)) == len(numbers)


def test_numbers_are_uniform_and_never_reach_one() -> None:
    count = 64_000
    numbers = uniforms(np.full(count, 9, np.uint64), np.zeros(count, np.int64), np.arange(count))
    assert numbers.min() >= 0.0 and numbers.max() <= 1.0 - 2.0**-52
    found = np.histogram(numbers, bins=64, range=(0.0, 1.0))[0]
    assert ((found - 1000) ** 2 / 1000).sum() < 110  # chi-square with 63 degrees of freedom: 99.98 %
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.015


def test_a_product_with_a_number_below_one_never_rounds_up() -> None:
    largest = 1.0 - 2.0**-52
    totals = np.nextafter(2.0 ** np.arange(-60, 60), 0.0)
    totals = np.concatenate((totals, 2.0 ** np.arange(-60, 60), np.array([1.1, 3.3, 1e9 / 7])))
    assert (largest * totals < totals).all()


def test_rows_of_a_job_have_different_seeds() -> None:
    seeds = {row_seed(0, row) for row in range(20_000)} | {row_seed(1, row) for row in range(20_000)}
    assert len(seeds) == 40_000
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_row_seeds_are_the_same_in_every_run_and_take_any_integer() -> None:
    assert row_seed(0, 0) == row_seed(2**64, 0)
    assert row_seed(-1, 3) == row_seed(2**64 - 1, 3)
    assert row_seed(0, 0) == 0xA706DD2F4D197E6F
