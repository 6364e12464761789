"""Grammars are read as llama.cpp reads them, and what would do it harm is refused before."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep import gbnf
from llamakeep.errors import GrammarError, InvalidValue
from llamakeep.gbnf import check_grammar
from llamakeep.gbnf.parsing import MOST_DEPTH, MOST_REPETITIONS, parse
from llamakeep.sampling import Sampling

JSON = r"""
root   ::= object  # comments are left out
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (
  value ("," ws value)*
)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
CHAIN = "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} [a-z]" for n in range(3000))

LATE = "abcdefghijklmnopqrstuvwxyz" * 2


def lines(*rules: str) -> str:
    return "\n".join(rules)


GOOD = {
    "json": JSON,
    "empty": 'root ::= ""',
    "any": "root ::= .*",
    "escapes": r'root ::= "\x41\u00e9\U0001F600\t\r\n\\\"\[\]" [\-\]^a-]',
    "names": 'root ::= 1-a | B2\n1-a ::= "x"\nB2 ::= [ä-ü]',
    "repetitions": 'root ::= "ab"{2} [x]{0} (y | "z"){1,} y{2,5}\ny ::= "y"',
    "right recursion": 'root ::= "a" root | "b"',
    "nested": "root ::= " + "(" * MOST_DEPTH + '"x"' + ")" * MOST_DEPTH,
    "many": 'root ::= "x"' + "{" + str(MOST_REPETITIONS) + "}",
    "windows": 'root ::= "a" |\r\n  "b"\r\nother ::= "c"\r\n',
}
BAD = {
    "nothing": ("", "no rule 'root'"),
    "no root": ('other ::= "x"', "no rule 'root'"),
    "no name": ('::= "x"', "line 1, column 1: expected a rule's name"),
    "no sign": ('root = "x"', "line 1, column 6: expected ::= after the name 'root'"),
    "next line": ('root ::= "x"\n  | other', "line 2, column 3: expected a rule's name"),
    "missing": ('root ::= "x" other', "line 1, column 14: there is no rule 'other'"),
    "twice": ('root ::= "x"\nroot ::= "y"', "line 2, column 1: the rule 'root' is there twice"),
    "open text": ('root ::= "x', "line 1, column 10: the text has no end"),
    "open class": ("root ::= [a-z", "line 1, column 10: the class of characters has no end"),
    "empty class": ("root ::= []", "the class has no characters"),
    "range": ("root ::= [z-a]", "ends before it begins"),
    "open group": ('root ::= ("x"', "the group has no end"),
    "closed twice": ('root ::= "x")', "line 1, column 13: expected a new line or the end"),
    "escape": (r'root ::= "\q"', r"\\q means nothing"),
    "hex": (r'root ::= "\u12"', "needs 4 hexadecimal digits"),
    "no letter": (r'root ::= "\U00110000"', "no character 00110000"),
    "repeats nothing": ("root ::= *", "nothing is before it"),
    "backwards": ('root ::= "x"{5,3}', "at least 5 and at most 3"),
    "huge": ('root ::= "x"{1,1000000}', "more than 2000 repetitions"),
    "huge number": ('root ::= "x"{99999999999999999999999}', "more than 2000 repetitions"),
    "huge inside": ('root ::= ("x"{0,1000}){0,1000}', "make 1,001,000 rules"),
    "huge text": ('root ::= "' + "x" * 10_000 + '"{1000}', "too large here"),
    "1 MB": ('root ::= "' + "x" * (1 << 20) + '"', "has 1,048,587 characters"),
    "deep": ("root ::= " + "(" * 100_000, "nested deeper than 128"),
    "deep stars": ("root ::= " + "(" * 200 + '"x"' + ")*" * 200, "nested deeper"),
    "left": ('root ::= root "x" | "y"', "'root' leads to itself before anything else"),
    "hidden left": (
        lines("root ::= a", 'a ::= b a "x" | "y"', "b ::= c", 'c ::= ""'),
        "'a' leads to itself",
    ),
    "empty loop": ('root ::= (("x")*)*', "leads to itself"),
    "long left": (CHAIN + '\nr3000 ::= "x"', "more than 2,048 rules within one another"),
    "wide left": (
        lines(
            "root ::= a0 | a0",
            *(f"a{n} ::= a{n + 1} | a{n + 1}" for n in range(40)),
            'a40 ::= "x"',
        ),
        "'a27' can begin in more than 4,096 ways",
    ),
    "doubles": ('root ::= s\ns ::= " " s "y" | " " s "z" | ""', "too ambiguous: after '  +'"),
    "nested choices": (
        lines(
            "root ::= a0",
            *(f'a{n} ::= "x" a{n + 1} "a" | "x" a{n + 1} "b"' for n in range(40)),
            'a40 ::= "x"',
        ),
        "too ambiguous: after 'x+'",
    ),
    "doubles late": (
        lines("root ::= " + '"' + "x" * 40 + '" s', 's ::= "a" s "y" | "a" s "z" | ""'),
        "too ambiguous from 's' on: after 'a+'",
    ),
    "overlap": (
        lines("root ::= s", 's ::= [a-c] s "y" | [0c-f] s "z" | [^a-b]'),
        "too ambiguous: after 'c+'",
    ),
    "many that grow": (
        lines(
            "root ::= a0",
            *(f'a{n} ::= "xa{n}" a{n + 1} "y" | "xb{n}"' for n in range(4000)),
            'a4000 ::= "z" a0 "z"',
        ),
        "too many ways to be checked; 4,001 of its rules",
    ),
    "hidden in a row": (f'root ::= "{LATE}" ' + "[a-z]? " * 900, "too ambiguous"),
    "hidden nesting": (
        lines(
            f'root ::= "{LATE}" r3',
            "r0 ::= [a-z]?",
            *(f"r{n} ::= " + f"r{n - 1} " * 10 for n in (1, 2, 3)),
        ),
        "too ambiguous within 'root': after 'a'",
    ),
    "hidden deep nesting": (
        lines(
            f'root ::= "{LATE}" r4',
            "r0 ::= [a-z]?",
            *(f"r{n} ::= " + f"r{n - 1} " * 10 for n in (1, 2, 3, 4)),
        ),
        "'r4' can begin in more than 4,096 ways",
    ),
    "hidden choices": (
        lines(
            f'root ::= "{LATE}" a0',
            *(f'a{n} ::= "x" a{n + 1} "a" | "x" a{n + 1} "b"' for n in range(40)),
            'a40 ::= "x"',
        ),
        "too ambiguous within 'root': after 'x+'",
    ),
    "grows by few": (
        lines(
            "root ::= r1{1,}",
            'r0 ::= " é<" | [a-z]? [\\x80-\\uFFFF] r1? | ("</s>" r1{2}){2}',
            'r1 ::= (r0 |  | r0{0,3} ( | )){0,0} "\\\\"* r0+',
        ),
        "too ambiguous",
    ),
    "in a row": ("root ::= " + "[a-z]* " * 900, "too ambiguous: after 'a'"),
    "NUL": ('root ::= "\0"', "NUL cannot be"),
    "no Unicode": ('root ::= "\ud800"', "half of a surrogate pair"),
    "token": ("root ::= <", "expected a token like"),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_llama_cpp_reads_is_read(name: str) -> None:
    text = GOOD[name]
    found = check_grammar(text)
    assert found.text == text
    assert check_grammar(text) is found


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name: str) -> None:
    text, said = BAD[name]
    with pytest.raises(GrammarError, match=said) as caught:
        check_grammar(text)
    assert caught.value.where == "" or caught.value.where in str(caught.value)
    assert len(str(caught.value)) < 400


def test_repetitions_are_laid_out_as_llama_cpp_does() -> None:
    grammar = parse('root ::= ("a" "b"){2,4} [c]* "de"+')
    assert [name.partition("_")[0] for name in grammar.names] == ["root"] * 6
    [root] = grammar.rules[0]
    assert len(root) == 2 + 1 + 1 + 2 + 1
    assert grammar.literals == {"a", "b", "de"}


def test_what_matters_of_a_grammar_is_kept() -> None:
    found = check_grammar('root ::= "[TOOL]" <think> !<[7]> [^ä] "x"')
    assert found.literals.split("\0") == ["[TOOL]", "x"]
    assert [(token.text, token.id, token.negated) for token in found.tokens] == [
        ("<think>", -1, False),
        ("", 7, True),
    ]
    assert found.excludes_letters
    assert found.ends
    assert not check_grammar('root ::= "x" root').ends
    assert not check_grammar('root ::= [^a-z"] [ä]').excludes_letters


def test_what_was_found_is_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: gbnf.KeptGrammars[gbnf.CheckedGrammar] = gbnf.KeptGrammars(
        200, lambda found: len(found.literals)
    )
    monkeypatch.setattr(gbnf, "_checked", kept)
    texts = [f'root ::= "{n:020}"' for n in range(5)]
    first = check_grammar(texts[0])
    assert check_grammar(texts[0]) is first
    for text in texts[1:]:
        check_grammar(text)
    assert check_grammar(texts[0]) is not first
    assert 0 < kept.n_chars <= 200
    kept.check()


@given(st.text(alphabet=' \n"[](){}|*+?^-<>!.:=\\x0aRr,1', max_size=40))
def test_no_text_is_more_than_refused(text: str) -> None:
    for whole in (text, "root ::= " + text):
        with contextlib.suppress(GrammarError):
            assert check_grammar(whole).text == whole


@pytest.mark.parametrize(
    ("triggers", "said"),
    [(("",), "1 to 256 characters"), (("x" * 257,), "1 to 256"), (("x",) * 65, "65 grammar_")],
)
def test_triggers_have_limits(triggers: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        Sampling(grammar='root ::= "x"', grammar_triggers=triggers)
    with pytest.raises(InvalidValue, match="need a grammar"):
        Sampling(grammar_triggers=("x",))


# -- llama.cpp itself ------------------------------------------------------------------------------


PROGRAM = """
import json, sys, llama_cpp
params = llama_cpp.llama_model_default_params()
params.vocab_only = True
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
vocab = llama_cpp.llama_model_get_vocab(model)
for text in json.load(sys.stdin):
    sampler = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
    print(int(bool(sampler)), flush=True)
    if sampler:
        llama_cpp.llama_sampler_free(sampler)
"""
PARTS = ['"a"', '"b\\n"', "[a-c]", "[^x]", "x", "y", "(", ")", "|", "*", "+", "?", "{2}", "{1,}"]
PARTS += ["{0,3}", ".", " ", "\n", "# c\n", "x ::= ", "y ::= ", "\r\n", '""', "<[7]>", "!<[9]>"]


def test_llama_cpp_takes_what_was_checked(smollm2_path: Path) -> None:
    """In a process of its own, which what it cannot take might end."""
    rng = random.Random(5)
    texts = list(GOOD.values())
    while len(texts) < 400:
        text = "root ::= " + "".join(rng.choices(PARTS, k=rng.randint(1, 14)))
        with contextlib.suppress(GrammarError):
            texts.append(check_grammar(text).text)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(smollm2_path)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=60,
    )
    taken = done.stdout.split()
    assert done.returncode == 0, texts[len(taken)]
    assert [text for text, is_taken in zip(texts, taken, strict=True) if is_taken == "0"] == []
