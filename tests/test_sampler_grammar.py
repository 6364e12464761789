"""Answers that match a grammar: llama.cpp's grammar sampler, on a tiny model and made-up logits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest

from llamakeep.errors import GrammarError, KeeperClosed
from llamakeep.json_schema import compile_schema
from llamakeep.runtime.base import NO_TOKEN, Part
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.runtime.llama_cpp import LlamaCppRuntime
from llamakeep.runtime.llama_grammar import ConstrainedSampler
from llamakeep.runtime.llama_tokens import END, NEVER
from llamakeep.sampling import Sampling

pytestmark = pytest.mark.model

PROMPT = [11, 22, 33, 44, 55, 66]
LOOSE = Sampling(temperature=2, top_k=0, top_p=1, min_p=0, seed=7)
SHORT = 'root ::= [a-f]{2,6} "-" [0-9]{3}'
SETTINGS = {
    "greedy": Sampling(temperature=0),
    "usual": Sampling(seed=3),
    "loose": LOOSE,
    "penalties": Sampling(temperature=0, repeat_penalty=1.4, presence_penalty=1.0),
    "typical": Sampling(typical_p=0.5, min_keep=3, seed=5),
    "few": Sampling(top_k=1, seed=5),
    "biased": Sampling(seed=6, logit_bias=((100, 5.0), (64, -math.inf))),
}


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> Iterator[LlamaCppRuntime]:
    runtime = LlamaCppRuntime.load(
        model_dir / "tiny-attention.gguf", n_ctx=1024, n_seqs=3, n_threads=1
    )
    yield runtime
    runtime.close()


@pytest.fixture
def runtime(loaded: LlamaCppRuntime) -> LlamaCppRuntime:
    loaded.clear_all()
    return loaded


def answer(
    runtime: LlamaCppRuntime, sampling: Sampling, n_tokens: int = 100, beside: int = 0
) -> tuple[str, bool]:
    """The text of an answer, and whether it came to its end."""
    runtime.clear_all()
    sampler = runtime.sampler(sampling)
    sampler.accept(PROMPT)
    tokens, pieces, ended = PROMPT, b"", False
    for step in range(n_tokens):
        others = [Part(1 + other, [step, 100 + other]) for other in range(beside)]
        *_, index = runtime.decode([*others, Part(0, tokens)])
        assert index is not None
        token = sampler.sample(index)
        if ended := token == NO_TOKEN or runtime.vocab.is_end(token):
            break
        tokens = [token]
        pieces += runtime.vocab.piece(token)
    sampler.close()
    return pieces.decode("utf-8", "replace"), ended


class Made:
    """A sampler whose logits are made up: each time, some tokens are wanted in turn."""

    def __init__(self, runtime: LlamaCppRuntime, sampling: Sampling) -> None:
        self.vocab = runtime.vocab
        self.logits = np.zeros(runtime.n_vocab, np.float32)
        real = runtime.sampler(sampling)
        assert isinstance(real, ConstrainedSampler)
        real._output = lambda _: self.logits
        self.sampler = real

    def sample(self, *wanted: int) -> int:
        """Choose a token where these are wanted, the first most."""
        self.logits[:] = 0
        for rank, token in enumerate(wanted):
            self.logits[token] = 50 - rank
        return self.sampler.sample(0)

    def token(self, text: str) -> int:
        """The token that has just this text."""
        found = self.vocab.tokenize(text, add_special=False, parse_special=True)
        assert found.size == 1, (text, found)
        return int(found[0])

    def say(self, text: str) -> list[int]:
        """Want the tokens of a text, one after the other; return what was chosen."""
        tokens = self.vocab.tokenize(text, add_special=False, parse_special=True)
        return [self.sample(int(token)) - int(token) for token in tokens]


# -- what is chosen --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_an_answer_matches_and_ends(runtime: LlamaCppRuntime, name: str) -> None:
    text, ended = answer(runtime, replace(SETTINGS[name], grammar=SHORT))
    assert re.fullmatch(r"[a-f]{2,6}-[0-9]{3}", text)
    assert ended


@pytest.mark.parametrize("name", SETTINGS)
def test_a_grammar_that_allows_everything_changes_nothing(
    runtime: LlamaCppRuntime, name: str
) -> None:
    """But that special tokens, and parts of letters in the wrong place, are not sampled."""
    free = answer(runtime, SETTINGS[name], 8)
    assert answer(runtime, replace(SETTINGS[name], grammar="root ::= .*"), 8) == free


def test_a_seed_gives_the_same_answer_alone_and_beside_others(runtime: LlamaCppRuntime) -> None:
    sampling = replace(LOOSE, grammar=SHORT)
    texts = {answer(runtime, sampling, beside=beside)[0] for beside in (0, 0, 1, 2)}
    assert len(texts) == 1
    others = {answer(runtime, replace(sampling, seed=seed))[0] for seed in range(5)}
    assert len(others) > 2


def test_a_bias_is_obeyed(runtime: LlamaCppRuntime) -> None:
    vocab = runtime.vocab
    no_a = [(t, -math.inf) for t in range(vocab.n_vocab) if b"a" in vocab.piece(t)]
    sampling = replace(LOOSE, grammar=SHORT, logit_bias=tuple(no_a))
    for seed in range(5):
        text, ended = answer(runtime, replace(sampling, seed=seed))
        assert ended
        assert "a" not in text


def test_each_allowed_token_is_as_likely_as_among_those(runtime: LlamaCppRuntime) -> None:
    """Sampling first and again on refusal draws from the same distribution as masking first."""
    made = Made(runtime, replace(LOOSE, temperature=1, grammar="root ::= [ab]*"))
    a, b, other = (made.token(text) for text in "abc")
    made.logits[:] = -50
    made.logits[[a, b, other]] = [0, math.log(3), 1]
    drawn = [made.sampler.sample(0) for _ in range(3000)]
    assert set(drawn) == {a, b}
    assert drawn.count(b) / len(drawn) == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize(
    "grammar",
    [SHORT, compile_schema({"type": "object"}), 'root ::= "é" [^ä]* | [à-ÿ] "漢"+ [^a]'],
    ids=["short", "object", "letters"],
)
def test_few_tokens_are_looked_at_and_none_is_missed(
    runtime: LlamaCppRuntime, grammar: str
) -> None:
    """What a first byte rules out need not be asked of llama.cpp."""
    rng = np.random.default_rng(1)
    made = Made(runtime, Sampling(temperature=0, grammar=grammar))
    matcher = made.sampler._matcher
    assert matcher is not None
    tokens = runtime.vocab.grammar_tokens
    everything = np.flatnonzero(tokens.first < NEVER).astype(np.int32)
    for _ in range(40):
        expected = [t for t in matcher._left(everything).tolist() if matcher._is_open[t]]
        assert matcher.allowed().tolist() == expected
        assert all(matcher.allows(t) for t in expected[:5])
        going = [t for t in expected if tokens.first[t] != END]
        if not going:
            assert matcher.is_complete
            return
        matcher.accept(int(rng.choice(going)))


NEAR_THE_LIMITS = {
    "deep": "root ::= " + "(" * 128 + '"x"' + ")" * 128,
    "long to the left": "root ::= r0\n"
    + "\n".join(f"r{n} ::= r{n + 1} [a-z]" for n in range(1000))
    + '\nr1000 ::= "x"',
    "wide to the left": "root ::= a0 | a0\n"
    + "\n".join(f"a{n} ::= a{n + 1} | a{n + 1}" for n in range(11))
    + '\na11 ::= "x"',
    "repetitions": 'root ::= [a-z]{2000} "-" [a-z]{0,2000}',
    "alternatives": "root ::= " + " | ".join(f'"{n}x"' for n in range(1000)),
    "text": 'root ::= "' + "x" * 100_000 + '"',
    "rules": "root ::= r0\n"
    + "\n".join(f"r{n} ::= [a-z] r{n + 1}" for n in range(8000))
    + '\nr8000 ::= "x"',
    "ways": 'root ::= [a-z ]* [a-z ]* [a-z ]* "x"',
}


@pytest.mark.parametrize("name", NEAR_THE_LIMITS)
@pytest.mark.parametrize("settings", [Sampling(temperature=0), LOOSE], ids=["greedy", "loose"])
def test_what_is_near_the_limits_can_be_followed(
    runtime: LlamaCppRuntime, name: str, settings: Sampling
) -> None:
    """Beyond them, llama.cpp would end the process, or take minutes."""
    text, _ = answer(runtime, replace(settings, grammar=NEAR_THE_LIMITS[name]), 30)
    assert re.fullmatch("[a-z0-9 -]+", text)


# -- where a grammar ends --------------------------------------------------------------------------


def test_where_the_end_is_to_be_ignored_the_answer_ends_without_it(
    runtime: LlamaCppRuntime,
) -> None:
    sampling = Sampling(temperature=0, grammar='root ::= "xyz"', ignore_eos=True)
    assert answer(runtime, sampling) == ("xyz", True)
    made = Made(runtime, sampling)
    assert made.say("xyz") == [0] * len(
        runtime.vocab.tokenize("xyz", add_special=False, parse_special=False)
    )
    assert made.sample(5) == NO_TOKEN
    assert made.sample(5) == NO_TOKEN


def test_the_end_is_no_token_before_the_grammar_is_complete(runtime: LlamaCppRuntime) -> None:
    made = Made(runtime, Sampling(temperature=0, grammar='root ::= "x" "y"?'))
    end = runtime.vocab.eos
    assert end is not None
    assert made.sample(end) != end
    assert made.sample(end) == end


def test_where_no_token_goes_on_the_answer_fails(runtime: LlamaCppRuntime) -> None:
    vocab = runtime.vocab
    no_x = [(t, -math.inf) for t in range(vocab.n_vocab) if b"x" in vocab.piece(t)]
    for temperature in (0, 1):
        sampling = Sampling(temperature, grammar='root ::= "a" "x"', logit_bias=tuple(no_x))
        with pytest.raises(GrammarError, match="no token that may be sampled"):
            answer(runtime, sampling)


# -- special tokens --------------------------------------------------------------------------------


def test_a_special_token_is_no_text(runtime: LlamaCppRuntime) -> None:
    made = Made(runtime, Sampling(temperature=0, grammar="root ::= .*"))
    special = made.token("<|im_start|>")
    assert runtime.vocab.piece(special) == b""
    assert made.sample(special, 1000) == 1000


@pytest.mark.parametrize(
    "grammar", ['root ::= "<|im_start|>" [a-z]', "root ::= <|im_start|> [a-z]", "root ::= <[1]> ."]
)
def test_a_special_token_that_is_named_is_allowed(runtime: LlamaCppRuntime, grammar: str) -> None:
    made = Made(runtime, Sampling(temperature=0, grammar=grammar))
    special = made.token("<|im_start|>")
    assert special == 1
    assert made.sample(special, 5) == special
    assert made.sample(special, made.token("a")) == made.token("a")


def test_a_schemas_text_is_no_special_token(runtime: LlamaCppRuntime) -> None:
    made = Made(runtime, Sampling(temperature=0, grammar=compile_schema({"const": "<|im_start|>"})))
    special = made.token("<|im_start|>")
    pieces = b""
    while (token := made.sample(special)) != special and not runtime.vocab.is_end(token):
        pieces += runtime.vocab.piece(token)
    assert json.loads(pieces) == "<|im_start|>"


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ("root ::= <no such token>", "line 1, column 10: <no such token> is [0-9]+ tokens"),
        ('root ::= "x"\n| <[4096]>', "column 1: expected a rule's name"),
        ('root ::= "x" | <[4096]>', "line 1, column 16: token 4096 is none of 4096"),
        ("root ::= x", "line 1, column 10: there is no rule 'x'"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(
    runtime: LlamaCppRuntime, grammar: str, said: str
) -> None:
    with pytest.raises(GrammarError, match=said):
        runtime.vocab.check_grammar(grammar)
    with pytest.raises(GrammarError, match=said):
        runtime.sampler(Sampling(grammar=grammar))


def test_the_fake_refuses_with_the_same_error() -> None:
    fake = FakeRuntime("attention")
    for grammar, said in (("root ::= x", "no rule 'x'"), (SHORT, "follows no grammar")):
        with pytest.raises(GrammarError, match=said):
            fake.sampler(Sampling(grammar=grammar))
        with pytest.raises(GrammarError, match=said):
            fake.vocab.check_grammar(grammar)


# -- triggers --------------------------------------------------------------------------------------

CALL = 'root ::= "<tool>" [a-z]+ "</tool>"'


def triggered(runtime: LlamaCppRuntime, **more: float) -> Made:
    sampling = Sampling(temperature=0, grammar=CALL, grammar_triggers=("<tool>", "[TOOL]"))
    return Made(runtime, replace(sampling, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_before_a_trigger_everything_is_allowed(
    runtime: LlamaCppRuntime, temperature: float
) -> None:
    made = triggered(runtime, temperature=temperature)
    assert set(made.say("Well, 5 < 6 and <to be> or </tool> it is. 漢")) == {0}
    end = runtime.vocab.eos
    assert end is not None
    assert made.sample(end) == end


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_from_a_trigger_on_the_grammar_holds(runtime: LlamaCppRuntime, temperature: float) -> None:
    made = triggered(runtime, temperature=temperature)
    assert set(made.say("I call 5 <tool>")) == {0}
    five, end = made.token("5"), runtime.vocab.eos
    assert end is not None
    chosen = [made.sample(five, end) for _ in range(3)]
    text = b"".join(map(runtime.vocab.piece, chosen)).decode()
    assert re.fullmatch("[a-z]+(<(/(t(o(o(l>?)?)?)?)?)?)?", text)
    if text.isalpha():
        assert set(made.say("</tool>")) == {0}
        assert runtime.vocab.is_end(made.sample(five))


def test_a_trigger_that_goes_on_as_it_cannot_is_not_sampled(runtime: LlamaCppRuntime) -> None:
    grammar = 'root ::= "e" [a-m]+ ")"'
    made = Made(runtime, Sampling(temperature=0, grammar=grammar, grammar_triggers=("e",)))
    pieces = {token: runtime.vocab.piece(token) for token in range(17, runtime.n_vocab)}
    bad = [t for t, piece in pieces.items() if re.fullmatch(rb"[^e]*e[n-z].*", piece)][:20]
    good = next(t for t, piece in pieces.items() if re.fullmatch(rb"[^e]+e[a-d]+", piece))
    assert bad
    assert made.sample(*bad, good) == good
    assert made.sampler._matcher is not None


def test_a_trigger_whose_every_way_on_is_wrong_fails(runtime: LlamaCppRuntime) -> None:
    made = Made(runtime, Sampling(temperature=0, grammar='root ::= "x"', grammar_triggers=("e",)))
    some = [t for t in range(runtime.n_vocab) if b"e" in runtime.vocab.piece(t)]
    with pytest.raises(GrammarError, match="what follows a trigger"):
        made.sample(*some[:40])


def test_a_trigger_may_be_a_special_token(runtime: LlamaCppRuntime) -> None:
    grammar = 'root ::= "<|im_start|>" [a-z]+'
    sampling = Sampling(temperature=0, grammar=grammar, grammar_triggers=("<|im_start|>",))
    made = Made(runtime, sampling)
    special = made.token("<|im_start|>")
    assert made.sample(5) == 5
    assert made.sample(special) == special
    assert made.sample(special, made.token("5"), made.token("a")) == made.token("a")


# -- its life --------------------------------------------------------------------------------------


def test_a_closed_sampler_chooses_nothing(tiny_model: Callable[[str], Path]) -> None:
    runtime = LlamaCppRuntime.load(tiny_model("attention"), n_ctx=256, n_threads=1)
    [index] = runtime.decode([Part(0, PROMPT)])
    assert index is not None
    one, two, three = (runtime.sampler(Sampling(grammar=SHORT)) for _ in range(3))
    one.sample(index)
    one.close()
    one.close()
    with pytest.raises(KeeperClosed):
        one.sample(index)
    runtime.close()
    with pytest.raises(KeeperClosed):
        two.sample(index)
    two.close()
    del three  # not closed, freed with the object


SCHEMAS: Sequence[object] = (
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "n": True}},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2, "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{3,4}$"},
    {"anyOf": [{"type": "null"}, {"const": {"a": [1, "x"]}}, {"type": "boolean"}]},
)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_ends_validates(runtime: LlamaCppRuntime, number: int, seed: int) -> None:
    schema = SCHEMAS[number]
    sampling = replace(LOOSE, seed=seed, grammar=compile_schema(schema))
    text, ended = answer(runtime, sampling, 400)
    if ended:  # nonsense can be long
        assert jsonschema_rs.is_valid(schema, json.loads(text))
    else:
        assert number == 0
