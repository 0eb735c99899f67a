"""Bootstrap intervals against a plain loop over the same draws, and against what theory says."""

from __future__ import annotations

import numpy as np
import pytest

from gradscope.metrics.bootstrap import draws, mean_interval, median_interval, paired_difference


def loop(values: np.ndarray, image: np.ndarray, statistic: object, resamples: int, seed: int) -> tuple[float, float]:
    """For every draw write out the drawn queries one by one, then take the statistic."""
    names = np.unique(image)
    results = []
    for weight in np.concatenate(list(draws(len(names), resamples=resamples, seed=seed))):
        drawn: list[float] = []
        for name, times in zip(names, weight, strict=True):
            drawn += list(values[image == name]) * int(times)
        results.append(statistic(drawn))  # type: ignore[operator]
    return tuple(np.quantile(results, [0.025, 0.975]))


@pytest.mark.parametrize("n_queries", [1, 9, 40])
def test_intervals_equal_the_loop(n_queries: int) -> None:
    generator = np.random.default_rng()
    image = generator.integers(0, max(1, n_queries // 2), n_queries) * 7 - 3  # labels need not be 0..I-1
    values = generator.integers(1, 6, n_queries).astype(float)
    low, high = mean_interval(np.stack([values, -values], axis=1), image, resamples=50, seed=3)
    expected = loop(values, image, np.mean, 50, 3)
    np.testing.assert_allclose([low[0], high[0]], expected, rtol=1e-12)
    np.testing.assert_allclose([-high[1], -low[1]], expected, rtol=1e-12)
    np.testing.assert_allclose(median_interval(values, image, resamples=50, seed=3), loop(values, image, np.median, 50, 3))


def test_the_interval_has_the_width_theory_gives() -> None:
    """Independent hits with probability p: half width 1.96 sqrt(p (1 - p) / n), within the noise of 2000 resamples."""
    hits = (np.arange(2000) < 600).astype(float)
    low, high = mean_interval(hits, np.arange(2000))
    expected = 1.96 * np.sqrt(0.3 * 0.7 / 2000)
    assert (high - low)[0] / 2 == pytest.approx(expected, rel=0.08)
    assert low[0] < 0.3 < high[0]


def test_captions_of_one_image_move_together() -> None:
    """Five equal captions per image carry no more information than one."""
    hits = (np.arange(400) % 3 == 0).astype(float)
    once = mean_interval(hits, np.arange(400))
    five = mean_interval(np.repeat(hits, 5), np.repeat(np.arange(400), 5))
    apart = mean_interval(np.repeat(hits, 5), np.arange(2000))
    np.testing.assert_allclose(once, five)
    assert (apart[1] - apart[0])[0] < 0.6 * (five[1] - five[0])[0]


def test_draws_are_seeded_and_do_not_depend_on_the_chunk() -> None:
    one = np.concatenate(list(draws(30, resamples=100, seed=5)))
    assert np.array_equal(one, np.concatenate(list(draws(30, resamples=100, seed=5))))
    assert not np.array_equal(one, np.concatenate(list(draws(30, resamples=100, seed=6))))
    assert (one.sum(1) == 30).all()
    assert one.shape == (100, 30)
    assert sum(len(part) for part in draws(1_500_000, resamples=3, seed=0)) == 3


def test_a_paired_difference_is_narrower_than_two_intervals() -> None:
    generator = np.random.default_rng()
    first = (generator.random(1000) < 0.5).astype(float)
    second = np.where(generator.random(1000) < 0.04, 1.0, first)  # b is a, with a few more hits
    image = np.arange(1000)
    result = paired_difference(second, first, image, resamples=500)
    assert result.value == pytest.approx(second.mean() - first.mean())
    assert 0 <= result.low <= result.value <= result.high
    assert result.high - result.low < 0.03
    assert (result.n_queries, result.n_images) == (1000, 1000)
    np.testing.assert_allclose([result.low, result.high], np.ravel(mean_interval(second - first, image, resamples=500)))
    same = paired_difference(first, first, image, resamples=20)
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="same queries"):
        paired_difference([1.0], [1.0, 0.0], [0])
    with pytest.raises(ValueError, match="labels"):
        mean_interval([1.0, 0.0], [0])
    with pytest.raises(ValueError, match="labels"):
        mean_interval([], [])
