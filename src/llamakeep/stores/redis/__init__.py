"""States on a server that machines share. Begin to read in `store.py`."""

from llamakeep.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
