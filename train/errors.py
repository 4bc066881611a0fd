"""The error of a run that cannot go on."""


class TrainingError(RuntimeError):
    """A run cannot go on for a reason outside the code; the message says what to do."""
