"""Replaying traces of requests against the caches of llamakeep, and the best that was possible."""
