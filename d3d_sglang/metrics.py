"""What the worker counts: rounds, accepted lengths, fall-backs to plain decoding.

Counts come from numbers that are on the host anyway, one round late, so counting never waits for a device.
Imports nothing but the standard library.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)


class RoundStats:
    """Counters of one worker since it started.

    `accept_histogram[k]` is the number of (row, round) pairs in which k candidates were accepted, the bonus
    not counted. `tau` is the mean number of tokens a round adds to a row, the bonus counted.
    """

    def __init__(self, *, block_size: int) -> None:
        self._accept_histogram = [0] * block_size
        self._rounds = 0
        self._fallbacks: Counter[str] = Counter()

    def record_round(self, num_accepted: list[int]) -> None:
        """Count one verify round; `num_accepted[i]` is the accept length of row i (0..B-1)."""
        self._rounds += 1
        for accepted in num_accepted:
            self._accept_histogram[accepted] += 1

    def record_fallback(self, reason: str, detail: str) -> None:
        """Count a row that decodes without drafts; the first of each reason is also logged."""
        if reason not in self._fallbacks:
            logger.warning(
                "D3D: a request decodes without drafts (%s): %s. Further ones are counted.", reason, detail
            )
        self._fallbacks[reason] += 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready counts for `/d3d/state`."""
        row_rounds = sum(self._accept_histogram)
        accepted = sum(k * count for k, count in enumerate(self._accept_histogram))
        return {
            "rounds": self._rounds,
            "row_rounds": row_rounds,
            "accepted_tokens": accepted,
            "tau": (accepted + row_rounds) / row_rounds if row_rounds else None,
            "accept_length_histogram": list(self._accept_histogram),
            "fallbacks": dict(self._fallbacks),
        }
