"""`--record`: every request that ended becomes a line of a log, to be explained or simulated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from llamakeep.engine import Engine, Observer, Record
from llamakeep.errors import StoreError
from llamakeep.explain import RecordLog, Served

logger = logging.getLogger("llamakeep")

PRIVATE: Final = "private"
FAILED: Final = "failed"
LOST: Final = (PRIVATE, FAILED)
"""Why a request is not in the log."""


class Recorder(Observer):
    """Writes what an engine answers to a log.

    A request that may leave nothing behind is left out: ids of blocks are made of its content, too.
    What is left out or cannot be written is counted, and reported once; the server goes on.

    Args:
        engine: Answers the requests.
        log: Where they are written; closed when the engine is.
        on_lost: Called with one of `LOST` for each request that is not written.

    Attributes:
        n_lost: Requests that could not be written.
        n_private: Requests that were left out.
    """

    def __init__(
        self,
        engine: Engine,
        log: RecordLog,
        on_lost: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.n_lost = self.n_private = 0
        self._engine = engine
        self._log = log
        self._on_lost = on_lost

    def served(self, record: Record, served: Served) -> None:
        """Write a request."""
        if not served.keeps:
            if not self.n_private:
                logger.info("requests that may leave nothing behind (cache_mode) are not recorded")
            self.n_private += 1
            self._on_lost(PRIVATE)
            return
        try:
            self._add(record, served)
        except Exception as error:  # of one request: the others, and the answers, go on
            if not self.n_lost:
                known = isinstance(error, StoreError)
                logger.error(
                    "a request is not recorded, and others may not be: %s",
                    str(error) if known else type(error).__name__,
                    exc_info=None if known else error,
                )
            self.n_lost += 1
            self._on_lost(FAILED)

    def _add(self, record: Record, served: Served) -> None:
        vocab = self._engine.vocab
        self._log.add(
            served.prompt,
            namespace=served.namespace,
            request_id=served.label or str(served.id),
            session_id=served.session,
            output_tokens=record.generated_tokens,
            circumstances=self._engine.history.circumstances(served, salts=self._log.with_texts),
            text=vocab.text(served.prompt, special=True) if self._log.with_texts else None,
        )

    def closed(self) -> None:
        """Close the log."""
        self._log.close()
