"""Random numbers that depend on where they are used and on nothing else.

A coin is a pure function of a request's seed, a token position and a stream, so a request gets the same
coins in every batch, on every device and after a retraction, and a captured graph has no generator state to
carry. The bits are SplitMix64's (Steele, Lea, Flood 2014): its output function over a counter, which is the
position, from a state the seed is mixed into. Pure torch without host reads; imports nothing of ours.

Legend: N rows, M positions of a row.
"""

from __future__ import annotations

from typing import Final

import torch

# One stream for each use: the coins of two of them are unrelated even at the same seed and position.
# Arbitrary odd numbers; seeds of different requests would have to differ by exactly the xor of two of them
# for a stream of one request to repeat another stream of the other.
ACCEPT: Final = 0x1F83D9ABFB41BD6B  # is a candidate accepted
RESIDUAL: Final = 0x2B992DDFA23249D7  # which token is emitted after the last accepted candidate
DRAFT: Final = 0x5BE0CD19137E2179  # which token is proposed

COIN_BITS: Final = 24  # what a fp32 in [0, 1) can hold at equal steps


def _signed(bits: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return bits - (1 << 64) if bits >> 63 else bits


_STEP: Final = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, SplitMix64's counter increment
_FACTOR_1: Final = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2: Final = _signed(0x94D049BB133111EB)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, *, stream: int) -> torch.Tensor:
    """Coins in [0, 1), multiples of 2^-24, of the shape of `positions`, fp32.

    A coin may be tossed again in a later round: a round whose outcome hung on the coins of a position
    committed a token there, so no later round comes to that position.

    Args:
        seeds: `[N]` int64, any values.
        positions: `[N]` or `[N, M]` int64, the token positions the coins belong to.
        stream: ACCEPT, RESIDUAL or DRAFT.
    """
    state = _mix(seeds ^ stream)  # [N]
    bits = _mix((state if positions.dim() == 1 else state[:, None]) + positions * _STEP)
    return _shift_right(bits, 64 - COIN_BITS).to(torch.float32) * 2.0**-COIN_BITS


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function: a bijection in which every input bit changes half of the output bits."""
    x = (x ^ _shift_right(x, 30)) * _FACTOR_1
    x = (x ^ _shift_right(x, 27)) * _FACTOR_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Shift in zeros, as for an unsigned number: int64 `>>` repeats the sign bit, the mask takes it off."""
    return (x >> count) & ((1 << (64 - count)) - 1)
