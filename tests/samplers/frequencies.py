"""How far random draws may lie from the distribution that they should follow."""

from collections import Counter

# One false alarm in a million tests, were the seeds not fixed.
SIGMAS = 4.75


def chi_square_limit(degrees):
    """Quantile at 1 - 1e-6 of chi-square, after Wilson and Hilferty (1931)."""
    variance = 2 / (9 * degrees)
    return degrees * (1 - variance + SIGMAS * variance**0.5) ** 3


def assert_distribution(drawn, expected):
    """Draws have the support and, within chance, the frequencies of a distribution.

    Args:
        drawn: Outcomes.
        expected: Probability by outcome, all above 0.
    """
    counts = Counter(drawn)
    assert set(counts) == set(expected)
    statistic = 0.0
    for outcome, probability in expected.items():
        mean = len(drawn) * probability
        # Below five expected draws a cell chi-square does not hold.
        assert mean >= 5
        statistic += (counts[outcome] - mean) ** 2 / mean
    assert statistic < chi_square_limit(max(1, len(expected) - 1))
