"""Why a request about a recorded episode is refused; each is one HTTP status (`routes.py`).

CaptureError
├── Gone            410  the episode has ended, or another lease of it was given
├── NoEpisode       404  no such episode can be
├── NotNow          503  nothing to lease, no server, queue away: the same request later may work
├── Conflict        409  the episode is not in a state for this; the message says what to do first
├── TooLong         400  the context leaves the model no room to answer
└── NotRecordable   501  this model has no tokenizer or chat template that can be continued exactly
"""

from __future__ import annotations


class CaptureError(Exception):
    """Base; the message is for the client."""

    status = 500


class Gone(CaptureError):
    """The episode has ended, or its lease is lost: no more calls."""

    status = 410


class NoEpisode(CaptureError):
    """The handle names no episode."""

    status = 404


class NotNow(CaptureError):
    """The queue, the servers or this server cannot serve it now; asking again may help."""

    status = 503


class Conflict(CaptureError):
    """Something has to be done first; the message says what."""

    status = 409


class TooLong(CaptureError):
    """The messages leave no room to answer in the model's context."""

    status = 400


class NotRecordable(CaptureError):
    """The model's tokenizer, template or reward function cannot be used."""

    status = 501
