"""The error tree.

    SemantideError
    |-- TransientError          try again: the cause may pass (broker away, disk full, lock held)
    |   |-- BrokerUnavailable   Redis cannot be reached
    |   |-- RankLost            another process of the same job ended or does not answer
    |   |-- StoreUnavailable    the object store cannot be reached, or refuses us
    |   `-- ClusterUnavailable  Kubernetes cannot be reached, or does not let us do what we need
    |-- PermanentError          trying again changes nothing; the message is parked with its cause
    |   |-- NotFound            no such artifact, job, user or model
    |   |-- Conflict            the request contradicts what is there (wrong catalog for a model, job already ended)
    |   |-- Corrupt             a file does not have the digest that it should have
    |   |-- SlowRequest         a request's body does not come
    |   `-- BadData             input rows that cannot be used; names row, field, value and remedy
    `-- JobCancelled            raised inside a job when somebody cancelled it

A caller's wrong argument is a ``ValueError``; a broken invariant of our own is an ``assert``.
A message says what was wrong, with what value, and what to do.
"""


class SemantideError(Exception):
    """Anything this system raises on purpose."""


class TransientError(SemantideError):
    """The cause may pass: the caller retries."""


class BrokerUnavailable(TransientError):
    """Redis cannot be reached."""


class RankLost(TransientError):
    """Another process of the same job ended or does not answer: all of them start again from the last checkpoint."""


class StoreUnavailable(TransientError):
    """The object store cannot be reached, or refuses us."""


class ClusterUnavailable(TransientError):
    """Kubernetes cannot be reached, or does not let us do what we need."""


class PermanentError(SemantideError):
    """Trying again changes nothing: the caller parks the message with its cause."""


class NotFound(PermanentError):
    """What was asked for does not exist."""


class Conflict(PermanentError):
    """The request contradicts what is there."""


class Corrupt(PermanentError):
    """Stored bytes do not have the digest that they should have."""


class SlowRequest(PermanentError):
    """A request's body does not come: its sender is let go."""


class BadData(PermanentError):
    """Input that cannot be used.

    The text names the row, the field, the value and the remedy.
    """


class JobCancelled(SemantideError):
    """Somebody cancelled the job that runs this code."""
