"""What all caches of the module share: the abstract class, and where `verbose` is shown."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from typing import Any

from llamakeep.tokens import TokensLike

LOGGER = "llamakeep.llama_cache"
DEFAULT_CAPACITY_BYTES = 2 << 30


class BaseLlamaCache(ABC):
    """Base class of the caches for `llama_cpp.Llama`, and the contract of those that map tokens.

    Where llama_cpp is installed, its subclasses are registered as ones of
    `llama_cpp.llama_cache.BaseLlamaCache` too.

    Args:
        capacity_bytes: The limit on what is kept; about 2 GiB if not given.
    """

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        self.capacity_bytes = capacity_bytes

    @property
    @abstractmethod
    def cache_size(self) -> int:
        """Bytes that are kept now."""
        raise NotImplementedError

    def _find_longest_prefix_key(self, key: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the kept key that fits best, where a class has such a search; here nothing."""
        return None

    @abstractmethod
    def __getitem__(self, key: TokensLike) -> Any:
        """Return the state that is kept for the longest prefix of `key`."""
        raise NotImplementedError

    @abstractmethod
    def __contains__(self, key: TokensLike) -> bool:
        """Return whether there is one."""
        raise NotImplementedError

    @abstractmethod
    def __setitem__(self, key: TokensLike, value: Any) -> None:
        """Keep a state under its tokens."""
        raise NotImplementedError


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever is standard error when something is said."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        """Standard error as it is now; None where there is none, as under pythonw."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None:
            super().emit(record)


def verbose_logger() -> logging.Logger:
    """Return the logger for what `verbose` caches say: shown on standard error, nowhere else."""
    logger = logging.getLogger(f"{LOGGER}.verbose")
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
