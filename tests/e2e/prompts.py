"""Eight prompts for the end-to-end tests: arithmetic, code, lists, translation, text to continue.

Short, so that a test on a small CPU spends its time decoding, and of different lengths, so that rows of a
batch are never aligned.
"""

from __future__ import annotations

PROMPTS: tuple[str, ...] = (
    "Count from one to ten in words.",
    "A baker fills 7 trays with 12 rolls each and sells 59 rolls. How many rolls are left? Show the steps.",
    "Write a Python function `is_leap_year(year)` with a short docstring.",
    "List the days of the week, one a line, each with its number.",
    "Translate into French: Where is the nearest train station?",
    "Explain to a child of six why the moon seems to follow us when we walk home. Use short sentences.",
    "Complete the line: The quick brown fox",
    "Here is a shopping list: apples, flour, two lemons, butter, eggs, cinnamon. Sort it by the alphabet, "
    "then say in one sentence what could be baked with it.",
)
