"""Every error that a person may meet, with what to type next. Drawn as a tree:

KimiError                    1   something went wrong
  UsageMistake               2   the words on the command line, a profile, a config file
  NoCapacity                 3   no machine to be had where we asked
    QuotaExceeded            3
  BudgetRefused              4   the caps do not allow it
  DoesNotFit                 5   it will not start there: hardware, port, weights
  EngineFailed               6   the session came up and died, or did not answer
  LeakSuspected              7   something may be running and billed; outranks every other
    Unconfirmed              7   gone could not be proven
  TimedOut                 124   it did not get ready within its limits
  Interrupted              130   Ctrl-C
  EngineMissing              1   a part that this needs is not installed
NotYetGone                   -   a signal between engine and controller: ask again
"""

#: What makes the parts installed that rented machines need. From the checkout: kimisession is on no package index, and who
#: owns that name there is not known.
INSTALL_CLOUD = 'in the checkout: pipx install --force ".[cloud]", or pip install ".[cloud]" in a virtual environment'


class KimiError(Exception):
    """`message`: one sentence, what happened. `hint`: what to type next, may be empty."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageMistake(KimiError):
    """What was typed or written cannot be meant. Nothing was created."""

    exit_code = 2


class NoCapacity(KimiError):
    """No machine where we asked. `tried` lists the places in order."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "", tried: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.tried = tried


class QuotaExceeded(NoCapacity):
    """The account may not have such a machine."""


class BudgetRefused(KimiError):
    """The dollar cap does not allow it."""

    exit_code = 4


class DoesNotFit(KimiError):
    """It will not start there, and no machine was rented to find out."""

    exit_code = 5


class EngineFailed(KimiError):
    """The session ended instead of getting ready, or does not answer."""

    exit_code = 6


class LeakSuspected(KimiError):
    """Something of ours may be running and billed."""

    exit_code = 7


class Unconfirmed(LeakSuspected):
    """A teardown could not be proven."""


class TimedOut(KimiError):
    """The session did not get ready within the limits of its profile, and was ended."""

    exit_code = 124


class Interrupted(KimiError):
    """Ctrl-C."""

    exit_code = 130


class EngineMissing(KimiError):
    """A place to run needs something that is not installed."""


class NotYetGone(Exception):
    """Deletion is under way; ask again. Never shown to people."""
