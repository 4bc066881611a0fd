"""Are emitted tokens distributed as the target says? A chi-square test over many contexts.

Every token comes from a context of its own with its own p. Expected counts are summed over the contexts, and
so are the covariances of the counts, which makes the p-value right (not merely safe) however much p varies.

Tokens may be grouped by anything known before they were drawn, such as the origin of the round's proposal or
the column; not by what came of them (accepted, bonus), which selects tokens by their value.

Legend: T observed tokens, V vocabulary, C cells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

# Counts of less variance are not normal enough for the chi-square distribution: they share one cell, and
# directions in which the counts hardly vary are left out.
MIN_VARIANCE = 10.0


@dataclass(frozen=True)
class Emitted:
    """One emitted token, the context (all tokens before it) it was emitted in, and its group."""

    context: Hashable
    token: int
    group: Hashable = None


def p_values(
    emitted: Iterable[Emitted], target_probs: Mapping[Hashable, np.ndarray]
) -> dict[Hashable, float]:
    """Per group, the probability of counts at least as far from the target's as those observed.

    Args:
        emitted: tokens in any order.
        target_probs: `[V]` for every context.

    Returns:
        By group; 0 if a token was emitted that the target never emits there.
    """
    groups: dict[Hashable, list[Emitted]] = defaultdict(list)
    for token in emitted:
        groups[token.group].append(token)
    return {
        group: p_value(
            np.array([one.token for one in members]),
            np.stack([target_probs[one.context] for one in members]),
        )
        for group, members in groups.items()
    }


def p_value(tokens: np.ndarray, target_probs: np.ndarray) -> float:
    """As `p_values`, of one group: `tokens` `[T]` with the p of each, `[T, V]`."""
    probs = np.asarray(target_probs, dtype=np.float64)
    if (probs[np.arange(len(tokens)), tokens] == 0).any():
        return 0.0
    probs = probs / probs.sum(axis=1, keepdims=True)
    counts = np.bincount(tokens, minlength=probs.shape[1]).astype(np.float64)
    rare = (probs * (1 - probs)).sum(axis=0) < MIN_VARIANCE  # [V]
    cells = np.column_stack([probs[:, ~rare], probs[:, rare].sum(axis=1)])  # [T, C]
    surplus = np.append(counts[~rare], counts[rare].sum()) - cells.sum(axis=0)  # [C]
    covariance = np.diag(cells.sum(axis=0)) - cells.T @ cells  # [C, C]
    variances, directions = np.linalg.eigh(covariance)
    used = variances >= MIN_VARIANCE
    assert used.any(), f"{len(tokens)} tokens are too few, or the target leaves no choice"
    statistic = ((surplus @ directions[:, used]) ** 2 / variances[used]).sum()
    return float(stats.chi2.sf(statistic, used.sum()))
