"""Grammars that name tokens, and bytes that are no letters: what llama.cpp cannot accept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamakeep.errors import GrammarError
from llamakeep.gbnf.following import Follower
from llamakeep.gbnf.parsing import parse
from llamakeep.json_schema import compile_schema
from llamakeep.runtime.base import Part
from llamakeep.runtime.llama_cpp import LlamaCppRuntime
from llamakeep.runtime.unfinished import letters_of
from llamakeep.sampling import Sampling
from tests.test_sampler_grammar import PROMPT, Made

PROGRAM = """
import sys
from dataclasses import replace
from llamakeep.errors import GrammarError
from llamakeep.runtime.base import NO_TOKEN, Part
from llamakeep.runtime.llama_cpp import LlamaCppRuntime
from llamakeep.sampling import Sampling

runtime = LlamaCppRuntime.load(sys.argv[1], n_ctx=512, n_threads=1)
for seed in range(12):
    runtime.clear_all()
    sampling = Sampling(temperature=2, top_k=0, top_p=1, min_p=0, seed=seed, grammar=sys.argv[2])
    sampler = runtime.sampler(sampling)
    tokens = [11, 22, 33]
    for _ in range(20):
        [index] = runtime.decode([Part(0, tokens)])
        tokens = [sampler.sample(index)]
        if tokens[0] == NO_TOKEN or runtime.vocab.is_end(tokens[0]):
            break
print("it lives")
"""


@pytest.fixture(scope="module")
def runtime(model_dir: Path) -> Iterator[LlamaCppRuntime]:
    runtime = LlamaCppRuntime.load(model_dir / "tiny-attention.gguf", n_ctx=512, n_threads=1)
    runtime.decode([Part(0, PROMPT)])
    yield runtime
    runtime.close()


@pytest.mark.model
@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= [a-z] !<[0]>",
        "root ::= [a-z] !<[0]> [a-z]*",
        "root ::= ([a-z] !<[1000]>)*",
        'root ::= (.* !<[0]> "x")+',
        "root ::= !<[5]>* <|im_start|> .*",
    ],
)
def test_no_grammar_that_names_tokens_ends_the_process(model_dir: Path, grammar: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model_dir / "tiny-attention.gguf"), grammar],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "it lives\n", done.stderr[-2000:]


@pytest.mark.model
def test_a_token_that_a_grammar_names_is_whole(runtime: LlamaCppRuntime) -> None:
    """Behind a letter of its own text it is another token."""
    vocab = runtime.vocab
    pieces = [vocab.piece(token) for token in range(vocab.n_vocab)]
    long = next(t for t, p in enumerate(pieces) if p.isalpha() and p.islower() and len(p) == 3)
    first = pieces.index(pieces[long][:1])
    made = Made(runtime, Sampling(temperature=0, grammar=f"root ::= [a-z] <[{long}]>"))
    assert made.sample(long, first) == first
    assert made.sample(first, long) == long


@pytest.mark.model
def test_what_a_grammar_allows_can_be_accepted(runtime: LlamaCppRuntime) -> None:
    """Where letters and tokens may come at once, each way of llama.cpp's is followed."""
    rng = np.random.default_rng(4)
    for grammar in (
        "root ::= ([a-z] | !<[5]> [é])*",
        'root ::= "th" (!<[900]> | [a-z]{2,5} !<[901]>)* .',
        "root ::= (<[1000]> | [a-z]* !<[1001]>)+",
    ):
        made = Made(runtime, Sampling(temperature=0, grammar=grammar))
        matcher = made.sampler._matcher
        assert matcher is not None
        for _ in range(15):
            allowed = matcher.allowed()
            going = [token for token in allowed.tolist() if not runtime.vocab.is_end(token)]
            if not going:
                break
            assert all(matcher.allows(token) for token in going[:40])
            matcher.accept(int(rng.choice(going)))


@pytest.mark.model
def test_thoughts_are_sampled_in_long_tokens(runtime: LlamaCppRuntime) -> None:
    made = Made(
        runtime,
        Sampling(
            temperature=0, grammar="root ::= <|im_start|> !<|im_start|>* <|im_start|> [a-z ]*"
        ),
    )
    special = made.token("<|im_start|>")
    assert made.sample(special) == special
    assert set(made.say("What do they mean?")) == {0}
    assert made.sample(special) == special
    assert set(made.say("there it is")) == {0}


@pytest.mark.model
def test_a_token_that_can_never_be_named_is_refused(runtime: LlamaCppRuntime) -> None:
    tokens = runtime.vocab.grammar_tokens
    part, end = int(tokens.of_byte[0xE0]), int(tokens.ends[0])
    for number, why in ((part, "it is a part of a letter"), (end, "it ends the answer")):
        with pytest.raises(GrammarError, match=f"line 1, column 16: token {number} can .*{why}"):
            runtime.vocab.check_grammar(f"root ::= [a-z] <[{number}]>")
        runtime.vocab.check_grammar(f"root ::= [a-z] !<[{number}]>")


def follow(follower: Follower, n_tokens: int) -> None:
    for _ in range(n_tokens):
        follower.accept(1, "a")


def test_more_ways_than_can_be_followed_are_refused() -> None:
    grammar = parse('root ::= s\ns ::= !<[0]> s "y" | !<[0]> s "z" | ""')
    follower = Follower(grammar, {})
    with pytest.raises(GrammarError, match="more than 4,096 ways"):
        follow(follower, 20)


def test_a_stack_may_be_deep() -> None:
    follower = Follower(parse('root ::= !<[0]> root "y" | "z"'), {})
    follow(follower, 5000)
    follower.accept(2, "z" + "y" * 4999)
    assert follower.goes_on(0, "y")
    assert not follower.goes_on(0, "yy")


def test_what_may_come_behind_a_letter_is_known() -> None:
    follower = Follower(parse('root ::= [a-z] (root | "x" later)? .*\nlater ::= !<[3]>'), {})
    assert follower.others_later()
    assert follower.others_here() is None
    follower.accept(9, "ax")
    assert follower.others_here() == {3}
    follower.accept(9, "!")
    assert not follower.others_later()


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ("", b"")),
        ("aé漢😀".encode(), ("aé漢😀", b"")),
        (b"a\xe6\xbc", ("a", b"\xe6\xbc")),
        (b"\xed\x9f", ("", b"\xed\x9f")),
        (b"\xc0", None),
        (b"\xe0\x96", None),
        (b"\xf0\x80", None),
        (b"\xed\xa0", None),
        (b"\xf4\x90", None),
        (b"\xf5", None),
        (b"\x80", None),
        (b"\xe6a", None),
    ],
)
def test_bytes_that_can_become_no_letter_are_found(
    data: bytes, expected: tuple[str, bytes] | None
) -> None:
    assert letters_of(data) == expected


@pytest.mark.model
@pytest.mark.parametrize(
    "wanted",
    [
        b"\xe0\x96\xb2",
        b"\xf0\x80\xa2\x80",
        b"\xed\xa0\x80",
        b"\xf4\xa0\xa2\x80",
        b"\xc1\x80",
    ],
    ids=["overlong", "longer", "surrogate", "above", "ascii"],
)
def test_an_answer_that_is_held_is_utf8(runtime: LlamaCppRuntime, wanted: bytes) -> None:
    schema = {"type": "string", "minLength": 3, "maxLength": 3}
    made = Made(runtime, Sampling(temperature=0, grammar=compile_schema(schema)))
    vocab = runtime.vocab
    of_byte = vocab.grammar_tokens.of_byte
    assert made.say('"') == [0]
    text = b'"' + b"".join(
        vocab.piece(made.sample(*(int(of_byte[byte]) for byte in wanted[at % len(wanted) :])))
        for at in range(60)
        if made.sampler._matcher is not None and not made.sampler._matcher.is_complete
    )
    said = json.loads(text.decode())
    assert len(said) == 3


@pytest.mark.model
def test_an_answer_does_not_end_within_a_letter(runtime: LlamaCppRuntime) -> None:
    made = Made(runtime, Sampling(temperature=0, grammar="root ::= [é-ü]*"))
    begin, end = int(runtime.vocab.grammar_tokens.of_byte[0xC3]), runtime.vocab.eos
    assert end is not None
    assert made.sample(begin) == begin
    chosen = made.sample(end)
    assert chosen != end
    (b"\xc3" + runtime.vocab.piece(chosen)).decode()
    assert made.sample(end) == end


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("seconds", [0.2, 0.7, 2000.0])
def test_what_takes_too_long_is_not_followed_further(
    runtime: LlamaCppRuntime, seconds: float
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += seconds
        return now[0]

    made = Made(runtime, Sampling(temperature=0, grammar="root ::= [ab]*"))
    a = made.token("a")
    made.sampler._clock = clock
    made.sampler._matcher = made.sampler._begin()
    if seconds < 0.5:
        assert made.sample(a) == a
        return
    with pytest.raises(GrammarError, match=f"took {seconds * 1000:,.0f} ms for 1 tokens"):
        made.sample(a)
