"""The counter hash: its vectors, its uniformity, and the independence of its counters."""

import pytest
import torch

from scram.core.tails.base import draw_seed
from scram.spec.noise import below, noise
from support import plain
from support.plain import VECTORS

COUNT = 1 << 15
POSITIONS = ["row", "query", "run", "sweep", "draw"]


def along(position, start=0, seed=3):
    """Noise along one of the five counters, the others fixed: [COUNT]."""
    counters = [5, 17, 1, 2, 3]
    counters[position] = torch.arange(start, start + COUNT)
    return noise(seed, *counters)


def chi_square(bucket, buckets):
    """In standard deviations from its mean."""
    count = torch.bincount(bucket.flatten(), minlength=buckets).double()
    expected = bucket.numel() / buckets
    return float(((count - expected) ** 2 / expected).sum() - (buckets - 1)) / (2 * (buckets - 1)) ** 0.5


@pytest.mark.parametrize(("seed", "counters", "bits"), VECTORS)
def test_vectors(seed, counters, bits):
    assert int(noise(seed, *counters)) == bits
    assert plain.noise(seed, *counters) == bits


def test_tensor_and_plain_spellings_agree():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (50,), generator=generator)
    words = torch.randint(0, 2**32, (50, 3), generator=generator)
    bits = noise(seeds, *words.unbind(-1))
    assert bits.tolist() == [plain.noise(s, *w) for s, w in zip(seeds.tolist(), words.tolist(), strict=True)]
    assert bits.min() >= 0
    assert bits.max() < 2**32


def test_counters_broadcast():
    table = noise(1, torch.arange(3)[:, None], torch.arange(4))
    assert table.shape == (3, 4)
    assert int(table[2, 3]) == plain.noise(1, 2, 3)


@pytest.mark.parametrize("position", range(5), ids=POSITIONS)
def test_every_bit_is_balanced(position):
    bits = (along(position)[:, None] >> torch.arange(32)) & 1
    deviation = (bits.double().mean(0) - 0.5).abs() * 2 * COUNT**0.5
    assert deviation.max() < 4


@pytest.mark.parametrize("position", range(5), ids=POSITIONS)
@pytest.mark.parametrize("shift", [0, 12, 24], ids=lambda s: f"bit{s}")
def test_buckets_are_equally_full(position, shift):
    assert abs(chi_square((along(position) >> shift) & 255, 256)) < 4


@pytest.mark.parametrize("position", range(5), ids=POSITIONS)
def test_neighboring_counters_are_independent(position):
    here, next_ = along(position), along(position, start=1)
    flips = ((here ^ next_)[:, None] >> torch.arange(32)) & 1
    assert ((flips.double().mean(0) - 0.5).abs() * 2 * COUNT**0.5).max() < 4
    uniform = torch.stack([here, next_]).double()
    assert abs(float(torch.corrcoef(uniform)[0, 1])) < 4 / COUNT**0.5
    assert abs(chi_square((here >> 28) * 16 + (next_ >> 28), 256)) < 4


def test_draws_of_one_query_are_independent():
    query, draws = torch.arange(COUNT), torch.arange(8)
    table = noise(11, 0, query[:, None], 0, 1, draws).double()
    correlations = torch.corrcoef(table.T) - torch.eye(8)
    assert correlations.abs().max() < 4.5 / COUNT**0.5


def test_seeds_are_independent():
    streams = torch.stack([along(1, seed=seed) for seed in (0, 1, 2, 2**32, 2**40)]).double()
    correlations = torch.corrcoef(streams) - torch.eye(5)
    assert correlations.abs().max() < 4.5 / COUNT**0.5


def test_the_order_of_counters_matters():
    assert int(noise(0, 1, 2)) != int(noise(0, 2, 1))
    assert int(noise(0, 1)) != int(noise(1, 0))
    assert int(noise(1)) != int(noise(1 << 32))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000, 2**31])
def test_below_is_exact_integer_arithmetic(n):
    bits = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
    assert below(bits, n).tolist() == [b * n // 2**32 for b in bits.tolist()]


def test_below_is_uniform():
    numbers = below(along(1), 7)
    assert set(numbers.tolist()) == set(range(7))
    assert abs(chi_square(numbers, 7)) < 4


def test_fresh_seeds_follow_torch():
    torch.manual_seed(4)
    first, second = draw_seed(), draw_seed()
    torch.manual_seed(4)
    assert draw_seed() == first
    assert first != second
    assert first.shape == ()
    assert first.dtype == torch.int64
