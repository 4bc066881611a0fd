"""Which id may be the mask token, and which one to take when the user names none.

The mask token fills positions to be drafted, so it must be an id that never stands for text: an embedding row
beyond the tokenizer, or an added token that has no role and that no chat template writes. Pure: works on a
`Vocabulary`, touches no file.
"""

from __future__ import annotations

import re

from d3d_sglang.drafter.vocabulary import Vocabulary

# Families whose free id is known: (token that identifies the tokenizer, its id, the mask id).
KNOWN_FREE_IDS: tuple[tuple[str, int, int], ...] = (
    ("<empty_output>", 16, 16),  # SmolLM2: never trained, its embedding row equals those of other unused ids
    ("</think>", 151668, 151669),  # Qwen3: first row past the tokenizer, which other block drafters use too
)
# Names that say a token was set aside, best first.
RESERVED_PATTERNS = (
    re.compile(r"\bmask\b", re.IGNORECASE),
    re.compile(r"reserved|unused|empty", re.IGNORECASE),
)


def mask_token_problem(mask_token_id: int, vocabulary: Vocabulary, *, num_embeddings: int) -> str | None:
    """Why this id cannot be the mask token, as the end of a sentence; None if it can."""
    if not 0 <= mask_token_id < num_embeddings:
        return f"is out of range: allowed are 0 to {num_embeddings - 1}, the embedding rows of the model"
    role = vocabulary.roles.get(mask_token_id)
    if role is not None:
        return f"is the {role} token: it must be an id that never occurs in text"
    content = vocabulary.added.get(mask_token_id)
    if content is not None:
        used = content in vocabulary.chat_template
        return f"is {content!r}, which the chat template uses: it must never occur in text" if used else None
    ordinary = next((token for token, i in vocabulary.token_to_id.items() if i == mask_token_id), None)
    if ordinary is not None:
        return (
            f"is the ordinary token {ordinary!r}, which occurs in text: take a reserved added token or an "
            "embedding row beyond the tokenizer"
        )
    return None


def choose_mask_token(vocabulary: Vocabulary, *, num_embeddings: int) -> int:
    """The id to use when none is given: a known one, else a reserved added token, else a padding row.

    Raises:
        ValueError: the model has none of them.
    """
    for mask_token_id in _candidates(vocabulary):
        if mask_token_problem(mask_token_id, vocabulary, num_embeddings=num_embeddings) is None:
            return mask_token_id
    raise ValueError(
        f"no free id for the mask token: no reserved added token, and all {num_embeddings} embedding rows "
        "belong to the tokenizer. Name an id that never occurs in your text with --mask-token-id"
    )


def _candidates(vocabulary: Vocabulary) -> list[int]:
    known = [free for token, i, free in KNOWN_FREE_IDS if vocabulary.token_to_id.get(token) == i]
    # The last of a numbered run first: people who adapt a model take from the front.
    added = sorted(vocabulary.added.items(), reverse=True)
    reserved = [i for pattern in RESERVED_PATTERNS for i, content in added if pattern.search(content)]
    return [*known, *reserved, vocabulary.num_ids]
