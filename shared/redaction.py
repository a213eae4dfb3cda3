"""Keeps secrets of this deployment out of what it says: log lines, spans, error answers, records of jobs.

Whoever writes a message should not have them at hand; this is the net below, for what a client library quotes. A secret of fewer than six characters is not looked for: it would tear ordinary words.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Status

from semantide.shared.api_keys import configured_keys, local_key
from semantide.shared.config import Settings

_HIDDEN = "***"
_SHORTEST = 6
_USER = re.compile(r"(/v1/users/)[^?\s\"]+")


def _password(url: str) -> Iterable[str]:
    try:
        found = urlsplit(url)
    except ValueError:
        return ()
    # Of an address that a person typed wrong, too: what stands before the last @ and after the first colon.
    loose = found.netloc.rpartition("@")[0].partition(":")[2]
    return filter(None, (found.password, unquote(found.password or ""), loose))


class Redaction:
    """Replaces some secrets, however they are escaped."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {
            form for secret in secrets for form in (secret, quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]) if len(secret) >= _SHORTEST
        }
        self._pattern = re.compile("|".join(map(re.escape, sorted(forms, key=lambda form: (-len(form), form))))) if forms else None

    @classmethod
    def of(cls, settings: Settings) -> Redaction:
        """The secrets of a deployment: API keys, the key of pseudonyms, and the passwords of its addresses."""
        try:
            secrets = [key.secret for key in configured_keys(settings.api_keys)]
        except ValueError:
            secrets = []
        secrets += filter(None, [local_key(settings.data_dir), settings.user_id_key])
        for url in (settings.redis_url, settings.artifacts_url, settings.otlp_endpoint, settings.url, settings.ray_address):
            secrets += _password(url)
        return cls(secrets)

    def text(self, text: str) -> str:
        """The text without them."""
        return text if self._pattern is None else self._pattern.sub(_HIDDEN, text)

    def value(self, value: Any) -> Any:
        """An attribute of a span without them, and without the id of a user in a path."""
        if isinstance(value, str):
            return _USER.sub(r"\1{user}", self.text(value))
        return tuple(map(self.value, value)) if isinstance(value, Sequence) and not isinstance(value, bytes) else value


class RedactedLines(logging.Formatter):
    """A formatter whose lines another one makes."""

    def __init__(self, formatter: logging.Formatter, redaction: Redaction) -> None:
        super().__init__()
        self._formatter, self._redaction = formatter, redaction

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return self._redaction.text(self._formatter.format(record))


class RedactedSpans(SpanExporter):
    """Hands spans on without secrets."""

    def __init__(self, exporter: SpanExporter, redaction: Redaction) -> None:
        self._exporter, self._value = exporter, redaction.value

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them."""
        return self._exporter.export([_redacted(span, self._value) for span in spans])

    def shutdown(self) -> None:
        """End what is behind."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what waits."""
        return self._exporter.force_flush(timeout_millis)


def _redacted(span: ReadableSpan, value: Callable[[Any], Any]) -> ReadableSpan:
    def attributes(said: Any) -> dict[str, Any]:
        return {name: value(each) for name, each in (said or {}).items()}

    return ReadableSpan(
        name=value(span.name),
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=attributes(span.attributes),
        events=[Event(event.name, attributes(event.attributes), event.timestamp) for event in span.events],
        links=span.links,
        kind=span.kind,
        status=Status(span.status.status_code, value(span.status.description)) if span.status.description else span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
