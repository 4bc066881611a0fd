"""The requests of the end-to-end tests: the plain server answers them all once, D3D servers are compared.

A case has a prompt of its own unless it is about where an answer ends: the scripted drafter knows an answer
by its prompt. Talks to no server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from serve.smollm2 import MASK_TOKEN_ID, smollm2_folder
from tests.e2e.prompts import PROMPTS

END_ID = 2  # <|im_end|>, the end of every answer
COMMA_ID = 28
YES_ID = 10539  # "Yes"
THURSDAY_ID = 14963  # " Thursday"
NUM_TOKENS = 24


@dataclass(frozen=True)
class Case:
    """One greedy request.

    Attributes:
        prompt: text with the chat template's tokens in it, or token ids.
        sampling: sampling parameters besides temperature 0 and `max_new_tokens`.
        fields: other fields of the request.
        cut_to: keep that many tokens of the prompt.
    """

    name: str
    prompt: str | tuple[int, ...]
    max_new_tokens: int = NUM_TOKENS
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    cut_to: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        if not isinstance(self.prompt, str):
            return self.prompt
        ids = tokenizer().encode(self.prompt, add_special_tokens=False)
        assert self.cut_to is None or len(ids) >= self.cut_to, f"{self.name} has only {len(ids)} tokens"
        return tuple(ids[: self.cut_to])

    @property
    def sampling_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_new_tokens": self.max_new_tokens, **self.sampling}

    def without_parameters(self) -> Case:
        """The same prompt, decoded without this case's sampling parameters."""
        return replace(self, name=f"{self.name}, without", sampling={})


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the end-to-end model."""
    return AutoTokenizer.from_pretrained(smollm2_folder())


def chat(message: str) -> str:
    """The message of a user as the model reads it."""
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def inventory(num_lines: int) -> str:
    """A text of about 15 tokens a line, none like another."""
    shapes, things = ("round", "long", "flat", "old", "heavy"), ("boxes", "lamps", "keys", "maps")
    lines = [
        f"Shelf {i}: {7 * i % 50 + 2} {shape} {thing} from hall {i * i % 9}."
        for i, (_, shape, thing) in enumerate(product(range(9), shapes, things))
    ]
    assert num_lines <= len(lines)
    return "\n".join(lines[:num_lines])


IDENTITY = tuple(Case(f"prompt {i}", chat(text)) for i, text in enumerate(PROMPTS))
_COUNT, _DAYS = IDENTITY[0], IDENTITY[3]

# The answers are "1. 1\n2. 2\n3. 3\n4. 4\n5. 5" and "The days of the week are:\nMonday, Tuesday, ...".
STOPS = (
    replace(_COUNT, name="stop string", sampling={"stop": ["4."]}),
    replace(_DAYS, name="stop string in a word", sampling={"stop": ["nesda", "Sunday"]}),
    replace(_DAYS, name="stop string kept", sampling={"stop": ["Thursday,"], "no_stop_trim": True}),
    replace(_DAYS, name="stop token", sampling={"stop_token_ids": [THURSDAY_ID]}),
    replace(_DAYS, name="stop regex", sampling={"stop_regex": "Fri[a-z]+"}),
)
LENGTHS = (
    replace(_COUNT, name="limit just before the stop", max_new_tokens=16, sampling={"stop": ["4."]}),
    replace(_COUNT, name="limit at the stop", max_new_tokens=17, sampling={"stop": ["4."]}),
    *(replace(_DAYS, name=f"limit {limit}", max_new_tokens=limit) for limit in (1, 2, 7, 17)),
)
PENALTIES = (
    Case("frequency", chat("Tell me about the sea."), sampling={"frequency_penalty": 1.5}),
    Case("presence", chat("Write a poem about rain."), sampling={"presence_penalty": 1.5}),
    Case("repetition", chat("Name four fruits."), sampling={"repetition_penalty": 1.3}),
    Case("a reward", chat("Say hello to my friend Tom."), sampling={"frequency_penalty": -1.5}),
    Case(
        "all penalties",
        chat("Repeat the word 'echo' twenty times."),
        sampling={
            "frequency_penalty": 0.6,
            "presence_penalty": 0.4,
            "repetition_penalty": 1.2,
            "min_new_tokens": 20,
        },
    ),
)
MINIMA = (
    Case("minimum", chat("What is the capital of Italy?"), sampling={"min_new_tokens": 16}),
    Case(
        "minimum and stop token",
        chat("Say only the word yes, and nothing else."),
        sampling={"min_new_tokens": 9, "stop_token_ids": [198]},
    ),
    Case("no end", chat("Is the sun a star? Answer yes or no."), sampling={"ignore_eos": True}),
)
BIASES = (
    Case("ban of the first token", chat("Say only the word yes."), sampling={"logit_bias": {YES_ID: -100}}),
    Case("ban of commas", chat("Name the days of the week."), sampling={"logit_bias": {COMMA_ID: -100}}),
    Case("a forced token", chat("Name a city."), 6, sampling={"logit_bias": {COMMA_ID: 100}}),
)
CAR_SCHEMA = (
    '{"type": "object", "properties": {"color": {"enum": ["red", "blue"]}, "wheels": {"type": "integer", '
    '"minimum": 0, "maximum": 9}}, "required": ["color", "wheels"], "additionalProperties": false}'
)
VERDICT = r"(Yes|No), because [a-z ]{5,20}\."
GRAMMARS = (
    Case("schema", chat("Describe a red car as JSON: color, wheels."), 48, {"json_schema": CAR_SCHEMA}),
    Case("regex", chat("Is 7 a prime number?"), 48, {"regex": VERDICT}),
)
LOGPROBS = (
    Case("logprobs", chat("What is snow?"), 16, fields={"top_logprobs_num": 3, "logprob_start_len": 0}),
    Case(
        "logprobs of penalised tokens",
        chat("Write three words about winter."),
        16,
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"top_logprobs_num": 3, "token_ids_logprob": [COMMA_ID, END_ID]},
    ),
)
MASK_IN_PROMPT = Case(
    "mask token in the prompt",
    (1, 4093, 198, MASK_TOKEN_ID, 14247, MASK_TOKEN_ID, MASK_TOKEN_ID, 2, 198, 1, 520, 9531, 198),
)
ECHOES = tuple(
    Case(f"echo {i}", tuple(1000 + 37 * i + 501 * j for j in range(8)), max_new_tokens=8) for i in range(24)
)
# With the eight above sixteen prompts, no two alike.
MORE = tuple(
    Case(f"short {i}", chat(text), 12)
    for i, text in enumerate(
        (
            "Name a river.",
            "What do bees make?",
            "Spell the word lamp.",
            "How many legs has a spider? Answer with a number and one sentence.",
            "Write one line about trains.",
            "Give me a synonym of fast.",
            "What is bread made of?",
            "Why do leaves fall in autumn?",
        )
    )
)
# Long enough together that with a scripted drafter everything occurs.
ESSAYS = tuple(
    Case(f"essay {i}", chat(text), 128)
    for i, text in enumerate(
        (
            "Write a long story about a lighthouse keeper and a whale.",
            "Describe a day in the life of a postman in a mountain village, hour by hour.",
            "Explain in detail how a letter travels from one country to another.",
        )
    )
)
_STOCK = inventory(35)
LONG = Case("long", chat(f"{_STOCK}\nWhat is on shelf 3?"), 16)
LONG_WITH_SUFFIX = replace(
    LONG, name="long, other end", prompt=chat(f"{_STOCK}\nHow many shelves are there?")
)
CHUNKED = Case("chunked", chat(f"{inventory(60)}\nWhat is on shelf 5?"))
# For a drafter of 192 positions in a context of 320 tokens; see conftest.
_TEXT = "The stock of our store:\n" + inventory(40)
SHORT_READ = Case("fits the drafter", _TEXT, 16, cut_to=150)
EDGES = (
    Case("edge in the answer", "1" + _TEXT, 48, cut_to=160),
    Case("edge in the prompt", "2" + _TEXT, 24, cut_to=224),
    Case("edge at the block", "3" + _TEXT, 12, cut_to=176),
    Case("edge before the block", "4" + _TEXT, 12, cut_to=175),
)
TO_THE_END = Case("to the end of the context", "5" + _TEXT, 32, cut_to=288)

# With the scripted drafter every accept length and every outcome occurs in these.
ALL_OUTCOMES = (*IDENTITY, *PENALTIES, *MINIMA, *ESSAYS)
WITH_EFFECT = (*PENALTIES, *MINIMA, *BIASES)
COMPARED = (
    *(*IDENTITY, *STOPS, *LENGTHS, *WITH_EFFECT, *GRAMMARS, *LOGPROBS, MASK_IN_PROMPT, *ECHOES, *MORE),
    *(*ESSAYS, LONG, LONG_WITH_SUFFIX, CHUNKED, SHORT_READ, *EDGES, TO_THE_END),
)
# Asked of the plain server alone: that a parameter changes an answer at all.
WITHOUT_EFFECT = tuple(case.without_parameters() for case in WITH_EFFECT)
