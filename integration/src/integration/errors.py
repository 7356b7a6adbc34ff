"""The one exception that reaches a user as a sentence instead of a traceback."""

EXIT_USAGE = 2
# Other ranks are gone: to be started again as it was.
EXIT_LOST = 1


class UsageError(ValueError):
    """A mistake in what the caller gave; the message names the value and the remedy.

    Commands print it as one sentence and exit with ``EXIT_USAGE``; nothing has been
    written by then.
    """


class DivergedError(UsageError):
    """The loss is not finite any more; the message names the checkpoint of the step before."""


class UnwrittenError(UsageError):
    """A checkpoint could not be written; the message names the newest one that is complete."""
