"""The whole inference method of the paper (section 3.4) for one request, as an executable specification.

Written to be read: nothing is cached, and branches that a server packs into one pass are drafted one by one;
they do not see each other. Imports nothing of ours, since fast paths are tested against this file.

Legend: L length, B block size, V vocabulary, C coverage, F fanout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Origin = Literal["redraft", "hit", "full"]  # drafted on demand, ahead of a rejection, of full acceptance
LogitsOf = Callable[[list[int]], torch.Tensor]
NEVER = float("-inf")


@dataclass(frozen=True)
class Proposal:
    """Candidates for the tokens after an anchor, and the drafter's logits `[len(tokens), V]` behind them."""

    tokens: list[int]
    logits: torch.Tensor
    origin: Origin


@dataclass(frozen=True)
class Round:
    """One verification: of the candidates `draft`, accept_len stood, and the target added `bonus`."""

    anchor: int
    draft: list[int]
    accept_len: int
    bonus: int
    origin: Origin

    @property
    def prop_len(self) -> int:
        """Candidates this round had: B-1, or fewer after full acceptance was drafted ahead."""
        return len(self.draft)


@dataclass(frozen=True)
class Generation:
    """Output tokens, cut after the first end token and at the limit, and the rounds that made them."""

    output_ids: list[int]
    rounds: list[Round]

    @property
    def tau(self) -> float:
        """Output tokens per round; the first token is not a round's, it comes from the prefill."""
        return (len(self.output_ids) - 1) / len(self.rounds)


def target_logits(model: Any) -> LogitsOf:
    """Tokens -> fp32 logits `[L, V]` of a transformers causal LM."""
    return lambda tokens: model(torch.tensor([tokens])).logits[0].detach().float()


def block_logits(model: Any, *, block_size: int, mask_token_id: int) -> LogitsOf:
    """Tokens, the last of them the anchor -> fp32 logits `[B-1, V]` for the positions after it.

    The block `[anchor, M x (B-1)]` sees all earlier tokens, which are read causally, and itself in both
    directions. A masked position predicts the token at that same position, never the mask token.
    """

    def logits(tokens: list[int]) -> torch.Tensor:
        sequence = torch.tensor([[*tokens, *[mask_token_id] * (block_size - 1)]])
        # Additive: transformers' eager attention takes a boolean mask for numbers to add.
        mask = torch.full((1, 1, *[sequence.shape[1]] * 2), NEVER, dtype=model.dtype).triu(1)  # causal,
        mask[:, :, -block_size:] = 0  # but the block sees everything
        full: torch.Tensor = model(sequence, attention_mask=mask, use_cache=False).logits[0].detach().float()
        full[:, mask_token_id] = NEVER
        return full[len(tokens) :]

    return logits


@dataclass(frozen=True)
class Method:
    """Speculative decoding of a target by a drafter.

    Mode "sync" drafts on demand only; "async" also ahead, for the first C-1 rejection positions with F
    anchors each and for full acceptance. At temperature 0 the target is greedy, above it it samples with
    `generator`; drafts are point masses, and accepting what equals the sample is then rejection sampling.
    """

    target: LogitsOf
    drafter: LogitsOf
    mode: Literal["sync", "async"] = "async"
    coverage: int = 12  # C
    fanout: int = 2  # F
    temperature: float = 0.0
    generator: torch.Generator | None = None

    def generate(self, prompt_ids: list[int], max_new_tokens: int, *, eos_ids: frozenset[int]) -> Generation:
        """Decode until a token of `eos_ids` or `max_new_tokens` tokens are out."""
        output = self.choose(prompt_ids, 1)  # the target's own first token is the first anchor
        rounds: list[Round] = []
        prepared: Proposal | None = None
        while len(output) < max_new_tokens and eos_ids.isdisjoint(output):
            tokens = [*prompt_ids, *output]
            proposal = prepared or self.draft(tokens)
            branches = self.draft_ahead(tokens, proposal) if self.mode == "async" else {}
            accept_len, bonus = self.verify(tokens, proposal)
            rounds.append(Round(output[-1], proposal.tokens, accept_len, bonus, proposal.origin))
            output += [*proposal.tokens[:accept_len], bonus]
            prepared = branches.get((accept_len, bonus))  # a hit, or None: draft on demand
        end = next((i + 1 for i, token in enumerate(output) if token in eos_ids), len(output))
        return Generation(output[: min(end, max_new_tokens)], rounds)

    def draft(self, tokens: list[int], origin: Origin = "redraft") -> Proposal:
        """One pass: B-1 candidates after the anchor `tokens[-1]`."""
        logits = self.drafter(tokens)
        return Proposal(logits.argmax(dim=-1).tolist(), logits, origin)

    def draft_ahead(self, tokens: list[int], proposal: Proposal) -> dict[tuple[int, int], Proposal]:
        """Next proposals by outcome (accept_len, bonus) of verifying `proposal` after `tokens`."""
        branches: dict[tuple[int, int], Proposal] = {}
        for accepted, candidate in enumerate(proposal.tokens[: self.coverage - 1]):
            alternatives = proposal.logits[accepted].clone()
            alternatives[candidate] = NEVER
            for bonus in alternatives.topk(self.fanout).indices.tolist():
                branches[accepted, bonus] = self.draft([*tokens, *proposal.tokens[:accepted], bonus], "hit")
        # The bonus is not known yet: the last candidate is the anchor, the first predicted token the guess.
        guess = self.draft([*tokens, *proposal.tokens], "full")
        branches[len(proposal.tokens), guess.tokens[0]] = Proposal(guess.tokens[1:], guess.logits[1:], "full")
        return branches

    def verify(self, tokens: list[int], proposal: Proposal) -> tuple[int, int]:
        """One target pass: (accept_len, bonus). Candidates stand while the target chooses the same."""
        chosen = self.choose([*tokens, *proposal.tokens], len(proposal.tokens) + 1)
        accept_len = 0
        while accept_len < len(proposal.tokens) and chosen[accept_len] == proposal.tokens[accept_len]:
            accept_len += 1
        return accept_len, chosen[accept_len]

    def choose(self, tokens: list[int], count: int) -> list[int]:
        """The target's choices after each of the last `count` prefixes of `tokens`."""
        logits = self.target(tokens)[-count:]
        if self.temperature == 0:
            return logits.argmax(dim=-1).tolist()
        probs = (logits / self.temperature).softmax(dim=-1)
        return torch.multinomial(probs, 1, generator=self.generator).squeeze(1).tolist()
