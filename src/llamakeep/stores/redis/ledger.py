"""What all clients together keep on a Redis server: counted, so that it can be bounded.

A server bounds its memory, not what one prefix takes of it. So what is stored is entered in a
ledger before it is written. The ledger is four keys in one slot:

::

    expires   sorted set   name -> when its keys expire (milliseconds of the server's clock)
    entries   hash         name -> "bytes chunks nonce"
    pending   sorted set   name -> until when its writer is waited for
    used      integer      the sum of the bytes of all entries

Everything else about the store merges by itself, whoever writes when. A sum does not, so these
four are changed by scripts, which the server runs one at a time. They go by its clock, not by the
clients'. An entry never expires before the keys that it counts: it is entered first, and gets the
same time or a later one.

A nonce tells an entry from a later one of the same name, so that nobody takes away what was
written since they looked.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from llamakeep.stores.redis.breaker import Unreachable
from llamakeep.stores.redis.keys import RedisKeys

if TYPE_CHECKING:
    from llamakeep.stores.redis.link import Command, RedisLink

_PURGED_AT_ONCE = 1000
_MAX_ROUNDS = 1 << 16

# KEYS: expires, entries, pending, used. Purging and releasing begin with HDEL, which a full server
# still runs; it lets a script that has changed something finish.
_HEAD = f"""
local expires, entries, pending, used = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function whole(number) return string.format('%.0f', number) end
local function drop(name, entry)
  redis.call('HDEL', entries, name)
  redis.call('ZREM', expires, name)
  redis.call('ZREM', pending, name)
  redis.call('DECRBY', used, string.match(entry, '^%d+'))
end
local gone = redis.call('ZRANGEBYSCORE', expires, '-inf', whole(now), 'LIMIT', 0, {_PURGED_AT_ONCE})
for _, name in ipairs(gone) do
  local entry = redis.call('HGET', entries, name)
  if entry then drop(name, entry) else redis.call('ZREM', expires, name) end
end
"""

# ARGV: name, bytes, entry, capacity (-1: none), milliseconds to live, to be waited for, the entry
# that this one may replace.
_RESERVE = (
    _HEAD
    + """
local name, size, entry, capacity = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local old = redis.call('HGET', entries, name)
if old and old ~= ARGV[7] then
  local until_ = redis.call('ZSCORE', pending, name)
  if not until_ then return {'kept', old} end
  if tonumber(until_) > now then return {'busy', old} end
  return {'stale', old}
end
local sum = tonumber(redis.call('GET', used) or '0')
if old then sum = sum - tonumber(string.match(old, '^%d+')) end
if capacity >= 0 and sum + tonumber(size) > capacity then return {'full', whole(sum)} end
if old then drop(name, old) end
local at = whole(now + tonumber(ARGV[5]))
redis.call('HSET', entries, name, entry)
redis.call('ZADD', expires, at, name)
redis.call('ZADD', pending, whole(now + tonumber(ARGV[6])), name)
redis.call('INCRBY', used, size)
local stale = redis.call('ZRANGEBYSCORE', pending, '-inf', whole(now), 'LIMIT', 0, 4)
local reply = {'ok', at}
for _, other in ipairs(stale) do
  local its = redis.call('HGET', entries, other)
  if its then reply[#reply + 1] = other; reply[#reply + 1] = its end
end
return reply
"""
)

# ARGV: name, entry.
_COMMIT = (
    _HEAD
    + """
if redis.call('HGET', entries, ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('ZREM', pending, ARGV[1])
return 1
"""
)

# ARGV: name, entry, name, entry, ...
_RELEASE = (
    _HEAD
    + """
local n = 0
for i = 1, #ARGV, 2 do
  if redis.call('HGET', entries, ARGV[i]) == ARGV[i + 1] then
    drop(ARGV[i], ARGV[i + 1])
    n = n + 1
  end
end
return n
"""
)

# ARGV: milliseconds to live, names. Returns when that is, and each name's chunks.
_EXTEND = (
    _HEAD
    + """
local at = whole(now + tonumber(ARGV[1]))
local reply = {at}
for i = 2, #ARGV do
  local entry = redis.call('HGET', entries, ARGV[i])
  if entry then redis.call('ZADD', expires, 'GT', at, ARGV[i]) end
  reply[i] = entry and string.match(entry, '^%d+ (%d+)') or '0'
end
return reply
"""
)

_TOTALS = (
    _HEAD
    + """
return {redis.call('GET', used) or '0', redis.call('HLEN', entries), redis.call('ZCARD', pending)}
"""
)

# The sum is what the entries say. ARGV: none.
_RECOUNT = (
    _HEAD
    + """
local sum = 0
for _, entry in ipairs(redis.call('HVALS', entries)) do
  sum = sum + tonumber(string.match(entry, '^%d+'))
end
if sum == 0 then redis.call('DEL', used) else redis.call('SET', used, whole(sum)) end
return whole(sum)
"""
)

Outcome: TypeAlias = Literal["ok", "kept", "busy", "stale", "full"]

_OUTCOMES: dict[bytes, Outcome] = {
    b"ok": "ok",
    b"kept": "kept",
    b"busy": "busy",
    b"stale": "stale",
    b"full": "full",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """What the ledger says about a name.

    Attributes:
        raw: As it stands there, nonce included.
        n_bytes: What it counts for.
        n_chunks: How many keys it has.
    """

    raw: bytes
    n_bytes: int
    n_chunks: int

    @classmethod
    def new(cls, n_bytes: int, n_chunks: int) -> Entry:
        """Return an entry that is like no other."""
        raw = f"{n_bytes} {n_chunks} {secrets.token_hex(8)}".encode()
        return cls(raw, n_bytes, n_chunks)

    @classmethod
    def parse(cls, raw: bytes) -> Entry:
        """Return what an entry says; one that makes no sense counts for nothing."""
        try:
            n_bytes, n_chunks, _ = raw.split()
            return cls(raw, int(n_bytes), int(n_chunks))
        except ValueError:
            return cls(raw, 0, 1)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What came of asking for room.

    Attributes:
        outcome: `ok`; `full`; or the name is entered already: it is `kept`, or its writer is
            `busy`, or that one fell silent and is `stale`.
        expires_ms: When `ok`: the keys have to expire at that time of the server's clock.
        entry: When `ok` the new entry, else the one that is there.
        abandoned: When `ok`: entries of others whose writers fell silent.
    """

    outcome: Outcome
    expires_ms: int
    entry: Entry
    abandoned: tuple[tuple[bytes, Entry], ...] = ()


@dataclass(frozen=True, slots=True)
class Totals:
    """The ledger's sums: bytes, names, and how many of these are still being written."""

    used_bytes: int
    n_names: int
    n_pending: int


class RedisLedger:
    """The ledger of one prefix. From any thread; each call is one round trip.

    Args:
        link: To the server.
        keys: Of the prefix.
        capacity_bytes: The limit, or None for none.
        ttl_ms: How long something lives after its last use.
        lease_ms: How long the writer of something is waited for.
    """

    def __init__(
        self,
        link: RedisLink,
        keys: RedisKeys,
        capacity_bytes: int | None,
        *,
        ttl_ms: int,
        lease_ms: int,
    ) -> None:
        self._link = link
        self._limit = -1 if capacity_bytes is None else capacity_bytes
        self._ttl_ms = ttl_ms
        self._lease_ms = lease_ms
        self._keys = tuple(keys.ledger(what) for what in ("expires", "entries", "pending", "used"))

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of the ledger."""
        return self._keys

    def reserving(self, name: bytes, entry: Entry, instead: bytes = b"") -> Command:
        """Return the command that asks for room; `reserved` reads its reply.

        Args:
            name: To enter.
            entry: What to enter.
            instead: The entry that it may take the place of: nothing is left of that one.
        """
        return self._script(
            _RESERVE,
            name,
            entry.n_bytes,
            entry.raw,
            self._limit,
            self._ttl_ms,
            self._lease_ms,
            instead,
        )

    def reserved(self, reply: Any, entry: Entry) -> Reservation:
        """Return what the server said to `reserving`.

        Raises:
            Unreachable: When it did not run the script.
        """
        rows = self._link.rows(reply)
        outcome = _OUTCOMES.get(rows[0]) if len(rows) > 1 and isinstance(rows[0], bytes) else None
        if outcome is None:
            raise self._link.nonsense(reply)
        rest = rows[1:]
        if outcome == "ok":
            parts = [self._link.text(part) for part in rest[1:]]
            pairs = zip(parts[::2], parts[1::2], strict=False)
            abandoned = tuple((name, Entry.parse(raw)) for name, raw in pairs)
            return Reservation("ok", self._link.whole(rest[0]), entry, abandoned)
        if outcome == "full":
            return Reservation("full", 0, entry)
        return Reservation(outcome, 0, self.parsed(rest[0]))

    def committing(self, name: bytes, entry: Entry) -> Command:
        """Return the command that says that all is written; 1 when the entry still stands."""
        return self._script(_COMMIT, name, entry.raw)

    def releasing(self, entries: Sequence[tuple[bytes, Entry]]) -> Command:
        """Return the command that takes entries out, where they are still the same."""
        flat = [part for name, entry in entries for part in (name, entry.raw)]
        return self._script(_RELEASE, *flat)

    def extend(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        """Let names live on.

        Returns:
            The time until which, in milliseconds of the server's clock, and of each name how many
            chunks it has, 0 for one that is not entered.

        Raises:
            Unreachable: When the server cannot be asked.
        """
        numbers = [self._link.whole(one) for one in self._rows(_EXTEND, self._ttl_ms, *names)]
        if len(numbers) != len(names) + 1:
            raise self._link.nonsense(numbers)
        return numbers[0], numbers[1:]

    def reading(self, name: bytes) -> Command:
        """Return the command that reads an entry."""
        return ("HGET", self._keys[1], name)

    def parsed(self, reply: Any) -> Entry:
        """Return the entry that a reply is.

        Raises:
            Unreachable: When it is none.
        """
        return Entry.parse(self._link.text(reply))

    def totals(self) -> Totals:
        """Return the sums, without what has expired.

        Raises:
            Unreachable: When the server cannot be asked.
        """
        numbers = [self._link.whole(one) for one in self._rows(_TOTALS)]
        if len(numbers) != 3:
            raise self._link.nonsense(numbers)
        return Totals(*numbers)

    def recount(self) -> None:
        """Make the sum that of the entries.

        Raises:
            Unreachable: When the server cannot be asked.
        """
        self._one(self._script(_RECOUNT))

    def pending(self) -> set[bytes]:
        """Return the names that are still being written.

        Raises:
            Unreachable: When the server cannot be asked.
        """
        return set(self._texts(("ZRANGE", self._keys[2], 0, -1)))

    def oldest(self, n: int) -> list[tuple[bytes, Entry]]:
        """Return those entries whose turn to expire comes first.

        Raises:
            Unreachable: When the server cannot be asked.
        """
        names = self._texts(("ZRANGE", self._keys[0], 0, n - 1))
        raws = self._link.run([self.reading(name) for name in names])
        return [
            (name, self.parsed(raw))
            for name, raw in zip(names, raws, strict=True)
            if raw is not None
        ]

    def expiries(self, names: Sequence[bytes]) -> list[float | None]:
        """Return when names expire, in milliseconds of the server's clock.

        Raises:
            Unreachable: When the server cannot be asked.
        """
        commands = [("ZSCORE", self._keys[0], name) for name in names]
        replies = self._link.run(commands)
        return [reply if isinstance(reply, float) else None for reply in replies]

    def walk(self) -> Iterator[list[tuple[bytes, Entry]]]:
        """Yield the entries, some at a time; one may come twice when others write meanwhile.

        Raises:
            Unreachable: When the server cannot be asked.
        """
        cursor = 0
        for _ in range(_MAX_ROUNDS):
            cursor, found = self._one(("HSCAN", self._keys[1], cursor, "COUNT", 1000))
            yield [(self._link.text(name), self.parsed(raw)) for name, raw in found.items()]
            if not cursor:
                break

    def _script(self, script: str, *arguments: object) -> Command:
        # EVAL, not EVALSHA: a kilobyte more, and nothing to do when the server was restarted.
        return ("EVAL", script, len(self._keys), *self._keys, *arguments)

    def _rows(self, script: str, *arguments: object) -> list[Any]:
        return self._link.rows(self._one(self._script(script, *arguments)))

    def _texts(self, command: Command) -> list[bytes]:
        return [self._link.text(one) for one in self._link.rows(self._one(command))]

    def _one(self, command: Command) -> Any:
        (reply,) = self._link.run([command])
        if isinstance(reply, Exception):
            raise Unreachable(str(reply))
        return reply
