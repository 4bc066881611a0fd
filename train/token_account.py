"""What became of the answers that a data set was made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

MAX_NOTES = 3


@dataclass(frozen=True)
class TokenAccount:
    """Counts of answers: used, and dropped for a reason.

    Attributes:
        answers: of the rows that are conversations.
        examples: made of them.
        malformed: rows that are no conversation; they count as one answer each.
        template: the server saw another number of prompt tokens than the template here gives, or the template
            refuses the conversation.
        long_prompt: no room for a response of two tokens within the longest length.
        short_response: fewer than two tokens.
        truncated: of the examples, responses cut to the longest length.
        unfinished: of the examples, answers the server cut at max_tokens; they have no end token.
        retokenised: of the examples, those without token ids of the server, made from the text.
        prompt_tokens, response_tokens: of the examples.
        notes: the first few of the dropped.
    """

    answers: int = 0
    examples: int = 0
    malformed: int = 0
    template: int = 0
    long_prompt: int = 0
    short_response: int = 0
    truncated: int = 0
    unfinished: int = 0
    retokenised: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def dropped(self) -> int:
        return self.malformed + self.template + self.long_prompt + self.short_response

    @property
    def dropped_share(self) -> float:
        return self.dropped / max(1, self.answers + self.malformed)

    def plus(self, *, note: str | None = None, **counts: int) -> TokenAccount:
        """With some counts raised."""
        raised = {name: getattr(self, name) + count for name, count in counts.items()}
        notes = self.notes if note is None or len(self.notes) >= MAX_NOTES else (*self.notes, note)
        return replace(self, **raised, notes=notes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> TokenAccount:
        """Inverse of `to_dict`."""
        return cls(**stored | {"notes": tuple(stored["notes"])})

    def __str__(self) -> str:
        kinds = ("malformed", "template", "long_prompt", "short_response")
        dropped = ", ".join(f"{name} {getattr(self, name)}" for name in kinds if getattr(self, name))
        also = ("truncated", "unfinished", "retokenised")
        used = ", ".join(f"{name} {getattr(self, name)}" for name in also if getattr(self, name))
        return (
            f"{self.examples} examples{_in_brackets(used)} with {self.prompt_tokens} prompt and "
            f"{self.response_tokens} response tokens; {self.dropped} dropped{_in_brackets(dropped)}"
        )


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
