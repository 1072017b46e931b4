"""What can go wrong with weights.

WeightsError            one sentence in `message`, what to type or do next in `hint`
  NotSeeded             the bucket carries no seal
  BadSource             the source cannot be seeded as it is (missing shard, odd name, branch as revision)
  SourceChanged         the source is no longer what the plan or its own checksums say
  SourceDenied          the source wants a token, or another one
  NoBucket              what was given names no place for weights
  BucketTaken           the bucket holds, or is getting, something else
  BucketFull            the store has no room or no quota left
  BucketDenied          the store refuses us
  Corrupt               stored bytes are not what the manifest says
  TryAgain           worth another try: a cut connection, 429, 503; `retry_after_s` where the server said
  Conflict              a precondition did not hold: someone else was there first
  Missing               no such object
  SessionGone           a resumable upload that the store no longer knows
"""

from __future__ import annotations

from kimisession.errors import DoesNotFit, KimiError, UsageMistake


class WeightsError(KimiError):
    """One sentence: what happened; and in `hint`: what to type or do next."""


class NotSeeded(WeightsError, DoesNotFit):
    """The bucket carries no seal, so nothing in it may be served."""


class BadSource(WeightsError, UsageMistake):
    """The source cannot be seeded as it is."""


class SourceChanged(WeightsError):
    """The source is no longer what the plan was made with, or its bytes do not match its own checksum."""


class SourceDenied(WeightsError):
    """The source wants a token, or another one."""


class NoBucket(WeightsError, UsageMistake):
    """What was given names no place for weights."""


class BucketTaken(WeightsError):
    """The bucket holds, or is getting, another revision or files of another origin."""


class BucketFull(WeightsError):
    """The store has no room or no quota left."""


class BucketDenied(WeightsError):
    """The store refuses us: no credentials, or not these."""


class Corrupt(WeightsError, DoesNotFit):
    """Stored bytes are not what the manifest says."""


class TryAgain(WeightsError):
    """Worth another try; after `retry_after_s` seconds where the server said so."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, "type the same command again; it goes on where it stopped")
        self.retry_after_s = retry_after_s


class Conflict(WeightsError):
    """A precondition did not hold: someone else was there first."""


class Missing(WeightsError):
    """There is no such object."""


class SessionGone(WeightsError):
    """The store no longer knows this resumable upload; start that file again."""
