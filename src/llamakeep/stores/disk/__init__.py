"""States in a directory. Begin to read in `store.py`."""

from llamakeep.stores.disk.catalog import DiskEntry, DiskStats
from llamakeep.stores.disk.store import DiskStore

__all__ = ["DiskEntry", "DiskStats", "DiskStore"]
