"""`--record`: every request that ended becomes a line of a log, to be explained or simulated."""

from __future__ import annotations

import logging

from llamakeep.engine import Engine, Observer, Record
from llamakeep.errors import StoreError
from llamakeep.explain import RecordLog

logger = logging.getLogger("llamakeep")


class Recorder(Observer):
    """Writes what an engine answers to a log.

    A log that cannot be written any more is reported once; the server goes on.

    Args:
        engine: Answers the requests.
        log: Where they are written; closed when the engine is.

    Attributes:
        n_lost: Requests that could not be written.
    """

    def __init__(self, engine: Engine, log: RecordLog) -> None:
        self.n_lost = 0
        self._engine = engine
        self._log = log

    def ended(self, record: Record) -> None:
        """Write a request."""
        served = self._engine.history.find(record.id)
        if served is None or not served.keeps:  # too long to be remembered, or private
            return
        text = (
            self._engine.vocab.text(served.prompt, special=True) if self._log.with_texts else None
        )
        try:
            self._log.add(
                served.prompt,
                namespace=served.namespace,
                request_id=served.label or str(served.id),
                session_id=served.session,
                output_tokens=record.generated_tokens,
                circumstances=self._engine.history.circumstances(served),
                text=text,
            )
        except StoreError as error:
            if not self.n_lost:
                logger.error("requests are not recorded any more: %s", error)
            self.n_lost += 1

    def closed(self) -> None:
        """Close the log."""
        self._log.close()
