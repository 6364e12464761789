"""Routers of fleets: what they know, what they choose, and what they remember."""

from __future__ import annotations

import numpy as np
import pytest

from llamakeep.errors import InvalidValue
from llamakeep.simulate.routing import (
    ConversationRouter,
    Conversations,
    PrefixRouter,
    RandomRouter,
    Route,
    full_blocks,
    home_of,
    parse_route,
)
from llamakeep.simulate.trace import NEVER, Request, made_up

SIZE = 16


def request(
    *blocks: int, session: int = 0, timestamp: float = 0.0, tail: int = 0, size: int = SIZE
) -> Request:
    """A prompt of full blocks, and a tail with an id of its own."""
    ids = np.array([*blocks, *([10**6 + sum(blocks)] if tail else [])], np.int64)
    sizes = np.array([size] * len(blocks) + ([tail] if tail else []), np.int32)
    tokens = made_up(ids, sizes)
    uses = np.full(ids.size, NEVER, np.int32)
    return Request(timestamp, tokens, ids, sizes, len(blocks) * size, uses, session)


def test_only_what_can_be_kept_is_known_by_its_blocks() -> None:
    blocks, sizes = full_blocks(request(1, 2, tail=5))
    assert (blocks.tolist(), sizes) == ([1, 2], [SIZE, SIZE])


# -- random ----------------------------------------------------------------------------------------


def test_random_routes_follow_from_their_seed() -> None:
    def routes(seed: int) -> list[int]:
        router = RandomRouter(4, seed)
        return [router.route(request(1)) for _ in range(64)]

    assert routes(1) == routes(1) != routes(2)
    assert set(routes(1)) == {0, 1, 2, 3}
    assert RandomRouter(4).remembered == 0


# -- conversations ---------------------------------------------------------------------------------


def test_a_conversation_stays_where_it_is() -> None:
    router = ConversationRouter(8)
    homes = {
        session: {router.route(request(session, turn, session=session)) for turn in range(100, 105)}
        for session in range(1, 60)
    }
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 8
    assert router.remembered == 0


def test_without_a_session_a_prompt_goes_on_from_the_longest_earlier_one() -> None:
    conversations = Conversations()
    first = conversations.of(request(1, 2, tail=3))
    assert conversations.of(request(1, 2, 3, 4)) == first
    assert conversations.of(request(1, 2, 3, 4, 5)) == first
    # It parts from the others inside of them: another conversation, though it begins alike.
    other = conversations.of(request(1, 9, 8))
    assert other != first
    assert conversations.of(request(1, 9, 8, 7)) == other
    assert conversations.of(request(1, 2, 6)) == first  # the first turn, edited behind its end
    assert conversations.of(request(1, 2, session=77)) == 77
    # A prompt shorter than a block has nothing but its tail.
    short = request(tail=3)
    assert short.keep_tokens == 0
    assert conversations.of(short) == conversations.of(short) == int(short.blocks[0])


def test_the_ends_that_conversations_are_known_by_are_bounded() -> None:
    conversations = Conversations(max_ends=3)
    first = conversations.of(request(1))
    for block in range(2, 10):
        conversations.of(request(block))
        assert len(conversations) <= 3
        assert conversations.of(request(1)) == first  # used again each time
    conversations.of(request(20, 21))
    conversations.of(request(30, 31))
    conversations.of(request(40, 41))
    assert conversations.of(request(1, 5)) == 5  # the first one is forgotten


def test_a_new_replica_takes_its_share_and_moves_no_other_conversation() -> None:
    before = {session: home_of(session, 4) for session in range(4000)}
    after = {session: home_of(session, 5) for session in range(4000)}
    moved = [session for session in before if before[session] != after[session]]
    assert {after[session] for session in moved} == {4}
    assert len(moved) == pytest.approx(4000 / 5, rel=0.1)


# -- prefixes --------------------------------------------------------------------------------------


def test_a_prefix_goes_where_it_was_sent() -> None:
    router = PrefixRouter(3)
    assert router.route(request(1, 2, 3, 4, tail=2)) == 0  # all are equal: the first one
    assert router.route(request(5, 6, tail=2)) == 1  # equal again, but for the load
    assert router.route(request(7, tail=2)) == 2
    assert router.known_tokens(request(1, 2, 3, 9)) == [3 * SIZE, 0, 0]
    assert router.route(request(1, 2, 3, 4, 8)) == 0
    assert router.route(request(5, 6, 8)) == 1


def test_what_a_replica_was_sent_too_much_counts_against_it() -> None:
    """Load and prefix, in tokens, by hand."""
    router = PrefixRouter(2)
    # 0 gets 64 tokens to evaluate; the mean is 32, allowed are 40: it is 24 above that.
    assert router.route(request(1, 2, 3, 4)) == 0
    # 16 tokens known there are less than 24: the other one, whose load is 32 then.
    assert router.route(request(1, 9)) == 1
    # Loads 64 and 32, allowed 60: 0 is 4 above that, and knows 32 tokens where 1 knows 16.
    assert router.known_tokens(request(1, 2, 8)) == [32, 16]
    assert router.route(request(1, 2, 8)) == 0
    # 80 and 32, allowed 70: 10 above, and 16 known on both.
    assert router.route(request(1, 7)) == 1


def test_load_is_half_after_a_minute() -> None:
    def second(after_s: float) -> int:
        router = PrefixRouter(2)
        router.route(request(1, 2, 3, 4))
        return router.route(request(1, 9, timestamp=after_s))

    # 24 tokens above what is allowed, 16 of them known there: 12 are, after a minute.
    assert second(0.0) == 1
    assert second(60.0) == 0


def test_a_prefix_router_forgets_ends_before_beginnings() -> None:
    router = PrefixRouter(1, blocks=3)
    router.route(request(1, 2, 3, 4, 5))
    assert router.remembered == 3
    assert router.known_tokens(request(1, 2, 3, 4, 5)) == [3 * SIZE]
    router.route(request(8, 9))
    assert router.remembered == 3
    assert router.known_tokens(request(1, 2, 3)) == [SIZE]
    assert router.known_tokens(request(8, 9)) == [2 * SIZE]


def test_its_memory_is_bounded() -> None:
    rng = np.random.default_rng(0)
    router = PrefixRouter(3, blocks=10)
    for _ in range(300):
        start = int(rng.integers(1000)) * 100
        router.route(request(*range(start, start + int(rng.integers(1, 20)))))
        assert router.remembered <= 30
    assert router.remembered == 30


# -- what is written -------------------------------------------------------------------------------


def test_routes_are_written_like_this() -> None:
    assert parse_route("random") == Route()
    assert parse_route("random:seed=7") == Route("random", seed=7)
    assert parse_route("prefix:blocks=5") == Route("prefix", blocks=5)
    for text in ("random", "random:seed=7", "conversation", "prefix", "prefix:blocks=5"):
        assert str(parse_route(text)) == text
    assert type(parse_route("conversation").open(2)) is ConversationRouter
    assert type(parse_route("random").open(2)) is RandomRouter


def test_a_prefix_router_remembers_what_its_route_says() -> None:
    prompt = request(*range(1, 9))
    for route, n_blocks in ((parse_route("prefix"), 2), (parse_route("prefix:blocks=5"), 5)):
        router = route.open(1, 2)
        router.route(prompt)
        assert router.remembered == n_blocks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nearest", "a route must be one of random, conversation, prefix, not 'nearest'"),
        ("", "not ''"),
        ("random:blocks=1", "route 'random' has no option 'blocks'; known: seed"),
        ("conversation:seed=1", "route 'conversation' has no option 'seed'; it has none"),
        ("conversation:", "route 'conversation' has no option ''"),
        ("prefix:blocks=many", "blocks must be a whole number, not 'many'"),
        ("prefix:blocks=0", "blocks must be a whole number, not '0'"),
        ("random:seed", "seed must be a whole number, not ''"),
    ],
)
def test_what_is_no_route(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        parse_route(text)
