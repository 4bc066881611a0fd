"""What a logged round should have proposed: as the script says, or as the network says without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from d3d_sglang.reference import LogitsOf
from tests.e2e.asking import Reply
from tests.e2e.scripted.logits import SUPPORT
from tests.e2e.scripted.round_log import LoggedRound
from tests.e2e.scripted.script import Script

# Logits of a drafter cut from the target are around 20, and fp32 sums in another order differ by 1e-4.
TIE = 1e-3


def scripted_candidates(script: Script, one: LoggedRound) -> list[int]:
    """The candidates a scripted drafter has for a round, whatever its row and its batch went through.

    The round's proposal must be no sibling.
    """
    assert one.scene is not None, f"the drafter does not know what it reads: {one}"
    scene, start, anchor = script.scenes[one.scene], one.committed_len, one.block[0]
    ahead = int(one.origin == "full")  # starts a token earlier, with the bonus it guessed
    if ahead:
        start, anchor = start - 1, scene.token_ids[start - 1]
    ranked = script.ranked(scene, start, anchor=anchor, block_size=len(one.block), support=SUPPORT)
    return [tokens[0] for tokens in ranked][ahead:]


@dataclass(frozen=True)
class Cacheless:
    """A drafter as `reference.py` has it: reads all tokens at once, every time, and drafts one block."""

    logits: LogitsOf

    def assert_drafted(self, reply: Reply, rounds: Sequence[LoggedRound]) -> None:
        """The candidates of the rounds behind a reply are the most likely tokens; none is a sibling."""
        tokens = [*reply.case.prompt_ids, *reply.output_ids]
        for one in rounds:
            ahead = int(one.origin == "full")
            logits = self.logits(tokens[: one.committed_len + 1 - ahead])[ahead:][: one.prop_len]
            chosen = torch.tensor(one.block[1 : 1 + one.prop_len])[:, None]
            gap = logits.max(dim=1).values - logits.gather(1, chosen).squeeze(1)
            assert (gap <= TIE).all(), (
                f"{reply.case}: {one} has not {logits.argmax(dim=1).tolist()}, by {gap.tolist()}"
            )
