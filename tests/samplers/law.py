"""How far random draws may lie from the law they are said to follow."""

from collections import Counter

# One false alarm in a million tests, were the seeds not fixed.
SIGMAS = 4.75


def chi_square_limit(degrees):
    """Quantile at 1 - 1e-6 of chi-square, after Wilson and Hilferty (1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + SIGMAS * part**0.5) ** 3


def assert_law(drawn, law):
    """What was drawn has the support, and within chance the frequencies, of a law.

    Args:
        drawn: Outcomes.
        law: Probability by outcome, all above 0.
    """
    counts = Counter(drawn)
    assert set(counts) == set(law)
    statistic = 0.0
    for outcome, probability in law.items():
        mean = len(drawn) * probability
        # Below five expected draws a cell the chi-square law does not hold.
        assert mean >= 5
        statistic += (counts[outcome] - mean) ** 2 / mean
    assert statistic < chi_square_limit(max(1, len(law) - 1))
