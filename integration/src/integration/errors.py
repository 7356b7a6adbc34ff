"""Errors that commands print as one sentence instead of a traceback."""

EXIT_USAGE = 2
# Other ranks are lost; the same command can be started again.
EXIT_LOST = 1


class UsageError(ValueError):
    """Invalid options, paths or environment; the message names the value and the remedy.

    Commands print it as one sentence and exit with ``EXIT_USAGE``. It is raised before anything is
    written.
    """


class DivergedError(UsageError):
    """The loss is no longer finite; the message names the checkpoint of the previous step."""


class UnwrittenError(UsageError):
    """A checkpoint could not be written; the message names the newest complete one."""
