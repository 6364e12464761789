"""What makes states incompatible changes the namespace, and nothing else does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue, ModelError
from llamakeep.fingerprint import (
    Adapter,
    Difference,
    Namespace,
    Settings,
    differences,
    explain,
    read_adapters,
)
from llamakeep.modelfile import fingerprint_file, inspect_file
from llamakeep.tokens import NAME_BYTES
from tests.test_gguf import file_of, tensor

if TYPE_CHECKING:
    from llama_cpp import Llama

ONE, TWO = Adapter("aa", 1.0), Adapter("bb", 1.0)
BASE = Namespace(
    model="m",
    layout="l",
    segment_tokens=256,
    family="hybrid",
    rolling=True,
    context={
        "rope_freq_base": 10000.0,
        "flash_attn": True,
        "type_k": 1,
        "kv_overrides": {"llama.rope.dimension_count": 8},
    },
    build={"llama_cpp_python": "0.3.36", "state_seq_version": 3},
    adapters=(ONE, TWO),
    salt="s",
    model_name="m.gguf",
)


def context(**changed: Any) -> Namespace:
    return replace(BASE, context={**BASE.context, **changed})


OTHERS: list[tuple[Namespace, set[str]]] = [
    (replace(BASE, model="n"), {"model"}),
    (replace(BASE, model="n", model_name="n.gguf"), {"model", "model_name"}),
    (replace(BASE, layout="k"), {"layout"}),
    (replace(BASE, segment_tokens=128), {"segment_tokens"}),
    (replace(BASE, family="recurrent"), {"family"}),
    (replace(BASE, rolling=False), {"rolling"}),
    (context(rope_freq_base=10000.5), {"context.rope_freq_base"}),
    (context(rope_freq_base=10000), {"context.rope_freq_base"}),
    (context(flash_attn=False), {"context.flash_attn"}),
    (context(flash_attn="True"), {"context.flash_attn"}),
    (context(flash_attn=1), {"context.flash_attn"}),
    (context(type_k=8), {"context.type_k"}),
    (context(yarn=0), {"context.yarn"}),
    (context(kv_overrides={}), {"context.kv_overrides.llama.rope.dimension_count"}),
    (
        context(kv_overrides={"llama.rope.dimension_count": 16}),
        {"context.kv_overrides.llama.rope.dimension_count"},
    ),
    (
        replace(BASE, context={"rope_freq_base": 10000.0, "flash_attn": True}),
        {"context.type_k", "context.kv_overrides.llama.rope.dimension_count"},
    ),
    (replace(BASE, build={**BASE.build, "state_seq_version": 4}), {"build.state_seq_version"}),
    (replace(BASE, build={**BASE.build, "llama_cpp_python": "1"}), {"build.llama_cpp_python"}),
    (replace(BASE, adapters=()), {"adapters.aa", "adapters.bb"}),
    (replace(BASE, adapters=(ONE,)), {"adapters.bb"}),
    (replace(BASE, adapters=(ONE, TWO, TWO)), {"adapters.bb #2"}),
    (replace(BASE, adapters=(ONE, replace(TWO, scale=0.5))), {"adapters.bb"}),
    (
        replace(BASE, adapters=(ONE, replace(TWO, content="cc"))),
        {"adapters.bb", "adapters.cc"},
    ),
    (replace(BASE, salt=""), {"salted"}),
    (replace(BASE, salt="t"), {"salt_id"}),
    (replace(BASE, salt=b"\xff"), {"salt_id"}),
    # The same letters in other parts.
    (replace(BASE, model="ml", layout=""), {"model", "layout"}),
    (replace(BASE, model="m", salt="l", layout="s"), {"salt_id", "layout"}),
]


@pytest.mark.parametrize(("other", "parts"), OTHERS)
def test_faults_4_43_and_47_every_part_makes_another_namespace(
    other: Namespace, parts: set[str]
) -> None:
    assert other.digest != BASE.digest
    assert other != BASE
    ours, theirs = BASE.describe(), other.describe()
    assert ours["digest"] != theirs["digest"]
    there = differences(ours, theirs)
    assert {difference.part for difference in there} == parts
    # Seen from the other side it is the same, turned round.
    back = [Difference(each.part, each.theirs, each.ours) for each in there]
    assert other.differences(ours) == back


def test_all_of_them_are_different() -> None:
    assert len({other.digest for other, _ in OTHERS}) == len(OTHERS) - 1  # one name is no part


def test_equal_parts_make_the_same_namespace() -> None:
    assert len(BASE.digest) == NAME_BYTES
    again = replace(BASE)
    assert again.digest == BASE.digest
    assert again == BASE
    assert len({again, BASE}) == 1
    assert BASE.digest != BASE
    turned = dict(reversed(BASE.context.items()))
    assert list(turned) != list(BASE.context)
    assert replace(BASE, context=turned) == BASE
    assert replace(BASE, salt=b"s") == BASE
    assert replace(BASE, model_name="copy.gguf") == BASE
    assert BASE.differences(replace(BASE, model_name="copy.gguf").describe()) == []


def test_a_digest_is_the_same_in_every_release_and_on_every_machine() -> None:
    """Stored names depend on it: whoever changes this forgets everything that was kept."""
    assert BASE.digest.hex() == "f511d990e205cd4b0ae662b9a48b27120514ec58c88cc09e7138c0bf44fa2c20"
    plain = Namespace("m", "l", 256)
    assert plain.digest.hex() == "836c8f052a99abb76d4f2b0c2a09253d829bc47253b4b1957bfd6ebb245f82fc"
    assert BASE.describe()["salt_id"] == "7fece808299126d0"


def test_a_namespace_cannot_be_changed_from_outside() -> None:
    inner = {"a": 1}
    given_context: dict[str, Any] = {"n": 1, "kv_overrides": inner}
    namespace = Namespace("m", "l", 256, context=given_context)
    before = namespace.describe()
    given_context["n"] = inner["a"] = 2
    described: dict[str, Any] = namespace.describe()
    described["context"]["kv_overrides"]["a"] = 3
    assert namespace.describe() == before
    assert namespace.digest == Namespace("m", "l", 256, context=before["context"]).digest
    with pytest.raises(TypeError):
        namespace.context["n"] = 2  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        namespace.model = "n"  # type: ignore[misc]


scalars = (
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.booleans()
)
settings_ = st.dictionaries(
    st.text(max_size=5),
    scalars | st.dictionaries(st.text(max_size=3), scalars, max_size=2),
    max_size=4,
)


def canonical(settings: Settings) -> str:
    """The JSON of settings; zero has no sign."""
    text = json.dumps(settings)
    return json.dumps(
        json.loads(text, parse_float=lambda digits: float(digits) + 0.0), sort_keys=True
    )


@given(one=settings_, two=settings_)
def test_namespaces_are_equal_only_where_their_settings_are(one: Settings, two: Settings) -> None:
    first, second = (replace(BASE, context=settings) for settings in (one, two))
    assert (first == second) == (canonical(one) == canonical(two))
    assert bool(first.differences(second.describe())) == (first != second)
    # What was written down and read back is still the same.
    assert replace(BASE, context=json.loads(json.dumps(one))) == first
    assert first.differences(json.loads(json.dumps(first.describe()))) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(InvalidValue, match=r"context\.rope_freq_base"):
        context(rope_freq_base=value)
    with pytest.raises(InvalidValue, match=r"context\.kv_overrides\.x"):
        context(kv_overrides={"x": value})
    with pytest.raises(InvalidValue, match="the scale of an adapter"):
        Adapter("a", value)


@pytest.mark.parametrize("value", [None, b"x", [1], 1j, {1}])
def test_settings_are_json(value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"build\.x must be a number or text"):
        replace(BASE, build={"x": value})


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(InvalidValue, match="segment_tokens"):
        replace(BASE, segment_tokens=0)
    with pytest.raises(InvalidValue, match="the salt must be text or bytes, not int"):
        replace(BASE, salt=5)  # type: ignore[arg-type]


def test_numbers_of_other_types_count_as_they_are() -> None:
    class Type(IntEnum):
        F16 = 1

    assert context(type_k=Type.F16) == BASE
    assert context(x=-0.0) == context(x=0.0)


# -- adapters --------------------------------------------------------------------------------------


def test_the_order_of_adapters_does_not_count() -> None:
    """llama.cpp adds them up, in the order of an unordered map."""
    assert replace(BASE, adapters=(TWO, ONE)) == BASE
    assert replace(BASE, adapters=(TWO, ONE)).adapters == (ONE, TWO)


def test_adapters_that_do_nothing_do_not_count() -> None:
    """llama.cpp leaves out those of scale 0; as single precision has it."""
    for zero in (0.0, -0.0, 0, 1e-60):
        assert replace(BASE, adapters=(ONE, Adapter("cc", zero), TWO)) == BASE


def test_scales_count_as_llama_cpp_has_them() -> None:
    single = float(np.float32(0.1))
    assert single != 0.1
    assert Adapter("a", 0.1) == Adapter("a", single)
    assert Adapter("a", 1) == Adapter("a", 1.0)
    assert Adapter("a", 0.1) != Adapter("a", float(np.nextafter(np.float32(0.1), np.float32(1))))
    for scale in (1e39, "much"):
        with pytest.raises(InvalidValue, match="the scale of an adapter"):
            Adapter("a", scale)  # type: ignore[arg-type]


@pytest.fixture
def two_files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for index, path in enumerate(paths):
        path.write_bytes(file_of([], [tensor("t", 0)], data=bytes([index]) * 32))
    return paths


def test_adapters_are_read_by_content(two_files: list[Path], tmp_path: Path) -> None:
    a, b = two_files
    adapters = read_adapters([(a, 0.5), (str(b), 1)])
    assert adapters == (
        Adapter(fingerprint_file(a), 0.5),
        Adapter(fingerprint_file(b), 1.0),
    )
    assert read_adapters([(a, 0.0), (b, 1.0)]) == adapters[1:]
    assert read_adapters([]) == ()
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(a.read_bytes())
    # Two files: llama.cpp adds both.
    assert read_adapters([(a, 0.5), (copy, 0.5)]) == (adapters[0], adapters[0])


def test_one_file_is_one_adapter(two_files: list[Path], tmp_path: Path) -> None:
    a, link = two_files[0], tmp_path / "link.gguf"
    link.symlink_to(a)
    assert read_adapters([(a, 0.5), (link, 0.5)]) == read_adapters([(a, 0.5)])
    assert read_adapters([(a, 0.0), (link, 0.5)]) == read_adapters([(a, 0.5)])
    with pytest.raises(InvalidValue, match=r"link\.gguf is given with two scales, 0\.5 and 1"):
        read_adapters([(a, 0.5), (link, 1)])


def test_an_adapter_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none\.gguf"):
        read_adapters([(tmp_path / "none.gguf", 1.0)])


# -- descriptions ----------------------------------------------------------------------------------


def test_a_description_is_json_and_says_all_but_the_salt() -> None:
    secret = "a tenant's secret"
    namespace = replace(BASE, salt=secret)
    described = namespace.describe()
    assert json.loads(json.dumps(described)) == described
    written = json.dumps(described) + repr(namespace)
    assert secret not in written
    assert secret.encode().hex() not in written
    assert described["salted"] is True
    assert len(described["salt_id"]) == 16
    assert described["digest"] == namespace.digest.hex()
    assert described["rolling"] is True
    assert described["model_name"] == "m.gguf"
    assert described["adapters"] == [
        {"content": "aa", "scale": 1.0},
        {"content": "bb", "scale": 1.0},
    ]
    unsalted = replace(BASE, salt="").describe()
    assert (unsalted["salted"], unsalted["salt_id"]) == (False, "")
    assert replace(BASE, salt=b"").describe() == unsalted


def test_equal_salts_are_known_by_their_id_whatever_else_differs() -> None:
    other = replace(BASE, model="n", salt=b"s").describe()
    assert other["salt_id"] == BASE.describe()["salt_id"]
    assert other["salt_id"] != replace(BASE, salt="t").describe()["salt_id"]


def test_a_namespace_is_shown_by_digest_and_name() -> None:
    assert repr(BASE) == f"<Namespace {BASE.digest.hex()[:12]} m.gguf>"
    assert repr(replace(BASE, model_name="", model="abc" * 9)).endswith(" abcabcabcabc>")


# -- differences -----------------------------------------------------------------------------------


def test_values_are_told_from_both_sides() -> None:
    assert BASE.differences(context(type_k=8).describe()) == [Difference("context.type_k", 1, 8)]
    assert BASE.differences(replace(BASE, build={}).describe()) == [
        Difference("build.llama_cpp_python", "0.3.36", None),
        Difference("build.state_seq_version", 3, None),
    ]


def test_what_explains_most_comes_first() -> None:
    other = Namespace("x", "y", 1, context={"a": 1}, build={"b": 1}, model_name="x.gguf")
    parts = [difference.part for difference in BASE.differences(other.describe())]
    tops = list(dict.fromkeys(part.partition(".")[0] for part in parts))
    assert tops == [
        "model",
        "model_name",
        "salted",
        "adapters",
        "segment_tokens",
        "family",
        "rolling",
        "context",
        "build",
        "layout",
    ]


def test_numbers_are_equal_where_their_json_is() -> None:
    assert differences({"a": 1}, {"a": True}) == [Difference("a", 1, True)]
    assert differences({"a": 1}, {"a": 1.0}) == [Difference("a", 1, 1.0)]
    assert differences({"a": 0}, {"a": None}) == [Difference("a", 0, None)]
    assert differences({"a": None}, {}) == []


def test_a_digest_alone_is_told_where_nothing_else_is() -> None:
    described = BASE.describe()
    assert differences(described, described) == []
    other = {**described, "digest": "00", "model_name": "z"}
    assert differences(described, other) == [Difference("digest", described["digest"], "00")]


json_ = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=12,
)
PARTS = sorted(BASE.describe())


@given(junk=json_, part=st.sampled_from(PARTS), inner=json_)
def test_no_description_is_too_odd(junk: Any, part: str, inner: Any) -> None:
    described = BASE.describe()
    for other in (junk, {part: junk}, {**described, part: inner}, {**described, "new": inner}):
        for found in (differences(described, other), differences(other, described)):
            said = explain(found)
            assert said.isascii()
            assert said.isprintable()
            assert len(said) < 600


def deep(n: int) -> Any:
    value: Any = 1
    for _ in range(n):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "junk",
    [
        {"context": deep(100_000)},
        {"context": {str(index): index for index in range(100_000)}},
        {str(index): index for index in range(100_000)},
        {"adapters": [{"content": "a", "scale": 1}] * 100_000},
        {"adapters": [deep(5_000)]},
        {"adapters": {"content": []}},
        {"adapters": "aaaa"},
        {"adapters": [None, 1, [], {}, {"content": [], "scale": {}}]},
        {"model": "x" * 1_000_000},
        {"x" * 1_000_000: 1},
        {"segment_tokens": 10**5_000},
        {"model": "a\nb\x1b[31m\u202e\ud800"},
        {1: {2: 3}},
        {"digest": math.nan, "context": {"type_k": math.inf}},
    ],
)
def test_nor_too_large(junk: Any) -> None:
    described = BASE.describe()
    for found in (differences(described, junk), differences(junk, described)):
        assert len(found) <= 2 * 256
        for each in found:
            said = explain([each])
            assert said.isascii()
            assert said.isprintable()
            assert len(said) < 250


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "nothing differs"),
        ([Difference("context.type_k", 1, 8)], "kept with context.type_k=8, now 1"),
        ([Difference("rolling", True, False)], "kept with rolling=false, now true"),
        ([Difference("context.x", None, 2.5)], "kept with context.x=2.5, now without"),
        ([Difference("context.x", "on", None)], "kept without context.x, now on"),
        ([Difference("salted", True, False)], "kept with another salt"),
        ([Difference("salt_id", "ab", "cd")], "kept with another salt"),
        ([Difference("build.v", "a b", "x\ny")], 'kept with build.v="x\\ny", now a b'),
        (
            [Difference("model", "0123456789abcdef" * 4, "fedcba9876543210" * 4)],
            "kept with model=fedcba987654, now 0123456789ab",
        ),
        (
            [Difference("adapters." + "0123456789abcdef" * 4, 0.5, 1.0)],
            "kept with adapters.0123456789ab=1.0, now 0.5",
        ),
        (
            [Difference(f"context.{name}", 1, 2) for name in "abcde"],
            "kept with context.a=2, now 1; kept with context.b=2, now 1; "
            "kept with context.c=2, now 1; and 2 more",
        ),
    ],
)
def test_a_miss_is_explained_in_a_sentence(found: list[Difference], said: str) -> None:
    assert explain(found) == said


# -- what a `Llama` is set to ----------------------------------------------------------------------

MakeLlama = Callable[..., "Llama"]


def settings_of(llm: Llama, **known: bool) -> dict[str, Any]:
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    return LlamaCppRuntime.context_settings(llm, **known)


PLAIN: dict[str, Any] = {"n_ctx": 512}


@pytest.mark.parametrize(
    "same",
    [
        {"n_ctx": 4096},
        {"n_ctx": 0},
        {"n_batch": 64},
        {"n_ubatch": 32},
        {"n_threads": 2},
        {"seed": 7},
        {"logits_all": True},
        {"use_mmap": False},
        {"kv_overrides": {}},
        {"rope_freq_scale": 1.0},
        {"yarn_ext_factor": -2.0},
        {"swa_full": False},
        {"last_n_tokens_size": 8},
        {"chat_format": "chatml"},
    ],
    ids=str,
)
def test_settings_without_effect_make_no_difference(
    tiny_llama: MakeLlama, same: dict[str, Any]
) -> None:
    """Fault 42 among them: states of a small context are good in a large one."""
    base = settings_of(tiny_llama("attention", **PLAIN), rope_factors=False)
    assert settings_of(tiny_llama("attention", **{**PLAIN, **same}), rope_factors=False) == base
    Namespace("m", "l", 256, context=base)


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ({"type_k": 8, "flash_attn": True}, {"type_k", "flash_attn_type"}),
        ({"type_k": 8, "type_v": 8, "flash_attn": True}, {"type_k", "type_v", "flash_attn_type"}),
        ({"flash_attn": True}, {"flash_attn_type"}),
        ({"rope_freq_base": 20000.0}, {"rope_freq_base"}),
        ({"rope_freq_scale": 0.5}, {"rope_freq_scale"}),
        ({"rope_scaling_type": 2, "rope_freq_scale": 0.5}, {"rope_scaling_type"}),
        ({"yarn_ext_factor": 1.0}, {"yarn_ext_factor"}),
        ({"yarn_attn_factor": 0.5}, {"yarn_attn_factor"}),
        ({"yarn_beta_fast": 16.0}, {"yarn_beta_fast"}),
        ({"yarn_beta_slow": 2.0}, {"yarn_beta_slow"}),
        ({"yarn_orig_ctx": 256}, {"yarn_orig_ctx"}),
        ({"attention_type": 1}, {"attention_type"}),
        ({"kv_overrides": {"llama.rope.freq_base": 2e4}}, {"kv_overrides.llama.rope.freq_base"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_fault_43_settings_with_effect_make_another_namespace(
    tiny_llama: MakeLlama, other: dict[str, Any], parts: set[str]
) -> None:
    def namespace(**options: Any) -> Namespace:
        llm = tiny_llama("attention", **{**PLAIN, **options})
        return Namespace("m", "l", 256, context=settings_of(llm, rope_factors=False))

    one, two = namespace(), namespace(**other)
    assert one.digest != two.digest
    found = {difference.part for difference in one.differences(two.describe())}
    assert {f"context.{part}" for part in parts} <= found
    assert found <= {f"context.{part}" for part in [*parts, "rope_freq_scale"]}


def test_scaling_turned_off_has_no_scale(tiny_llama: MakeLlama) -> None:
    """llama.cpp: "never scale if scaling type is none"."""
    off = [
        settings_of(tiny_llama("attention", rope_scaling_type=0, rope_freq_scale=scale))
        for scale in (0.0, 0.25)
    ]
    assert off[0] == off[1]


def test_a_full_window_counts_where_there_is_a_window(tiny_llama: MakeLlama) -> None:
    for family, counts in (("swa", True), ("hybrid-swa", True), ("recurrent", False)):
        full, short = (settings_of(tiny_llama(family, swa_full=full)) for full in (True, False))
        assert (full != short) == counts
        assert full["swa_full"] == counts


def test_where_the_work_is_done_counts_only_where_there_is_a_choice(
    tiny_llama: MakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    def all_of(**options: Any) -> dict[str, Any]:
        llm = tiny_llama("attention")
        llm.model_params.n_gpu_layers = options.get("n_gpu_layers", 0)
        for name in ("offload_kqv", "op_offload"):
            setattr(llm.context_params, name, options.get(name, True))
        return settings_of(llm)

    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: False)
    no_gpu = all_of()
    for options in ({"n_gpu_layers": 9}, {"offload_kqv": False}, {"op_offload": False}):
        assert all_of(**options) == no_gpu
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    assert all_of()["op_offload"]
    assert all_of(op_offload=False) != all_of()
    assert all_of(offload_kqv=False) == all_of()  # nothing is on the GPU that could use it
    two = all_of(n_gpu_layers=2)
    assert two["n_gpu_layers"] == 2
    assert two["offload_kqv"]
    assert all_of(n_gpu_layers=2, offload_kqv=False) != two
    # The tiny model has 4 layers, and the output is one more.
    everything = [all_of(n_gpu_layers=n) for n in (5, 99, 0x7FFFFFFF, -1)]
    assert everything[0]["n_gpu_layers"] == 5
    assert everything.count(everything[0]) == len(everything)


def test_fault_42_a_context_of_another_size_has_the_same_namespace(
    family: str, tiny_llama: MakeLlama
) -> None:
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    found = []
    for n_ctx in (512, 128, 4096):
        llm = tiny_llama(family, n_ctx=n_ctx)
        facts = inspect_file(llm.model_path)
        runtime = LlamaCppRuntime.adopt(llm)
        found.append(
            Namespace(
                model=facts.fingerprint,
                layout=runtime.traits.layout.hex(),
                segment_tokens=256,
                family=runtime.traits.family.value,
                rolling=runtime.traits.rolling,
                context=runtime.context_settings(llm, rope_factors=facts.rope_factors),
                build=runtime.build_facts(),
            )
        )
        runtime.close()
    assert found[0].family == family
    assert len(set(found)) == 1


def test_every_setting_can_be_part_of_a_namespace(family: str, tiny_llama: MakeLlama) -> None:
    described = Namespace("m", "l", 1, context=settings_of(tiny_llama(family))).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["context"]["n_gpu_layers"] == 0
    assert described["context"]["kv_overrides"] == {}
    assert described["context"]["long_rope"] is False


def test_the_build_is_told_by_its_versions() -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    facts = LlamaCppRuntime.build_facts()
    assert facts["llama_cpp_python"] == llama_cpp.__version__
    assert facts["state_seq_version"] == llama_cpp.LLAMA_STATE_SEQ_VERSION
    assert facts["session_version"] == llama_cpp.LLAMA_SESSION_VERSION
    assert facts["backends"]
    assert Namespace("m", "l", 1, build=facts).describe()["build"] == facts


def test_backends_are_told_where_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    info = b"CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX2 = 1 | "
    monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: info)
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: False)
    assert LlamaCppRuntime.build_facts()["backends"] == "CPU"
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    assert LlamaCppRuntime.build_facts()["backends"] == "CPU CUDA"


# -- rope factors that follow the context's size ---------------------------------------------------


@pytest.fixture
def longrope(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """The tiny attention model with two sets of rope factors; contexts over 256 take the long."""
    source, path = GGUFReader(tiny_model("attention")), tmp_path / "longrope.gguf"
    writer = GGUFWriter(path, "llama")
    for key, read in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            element = read.types[1] if len(read.types) > 1 else None
            writer.add_key_value(key, read.contents(), read.types[0], element)
    writer.add_string("llama.rope.scaling.type", "longrope")
    writer.add_uint32("llama.rope.scaling.original_context_length", 256)
    for each in source.tensors:
        writer.add_tensor(each.name, each.data)
    for name, factor in (("short", 1.0), ("long", 4.0)):
        writer.add_tensor(f"rope_factors_{name}.weight", np.full(16, factor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_context_that_takes_the_long_rope_factors_is_another(
    longrope: Path, make_llama: MakeLlama
) -> None:
    facts = inspect_file(longrope)
    assert facts.rope_factors
    logits, long = {}, {}
    for n_ctx in (128, 256, 512, 1024):
        llm = make_llama(longrope, n_ctx=n_ctx, logits_all=True)
        long[n_ctx] = settings_of(llm, rope_factors=facts.rope_factors)["long_rope"]
        llm.eval(list(range(3, 35)))
        logits[n_ctx] = llm.scores[31].copy()
    assert long == {128: False, 256: False, 512: True, 1024: True}
    # And so it is in llama.cpp.
    np.testing.assert_array_equal(logits[128], logits[256])
    np.testing.assert_array_equal(logits[512], logits[1024])
    assert np.abs(logits[256] - logits[512]).max() > 0.2


def test_the_original_size_may_be_overridden_or_unknown(
    longrope: Path, make_llama: MakeLlama
) -> None:
    override = {"llama.rope.scaling.original_context_length": 1024}
    llm = make_llama(longrope, n_ctx=512, kv_overrides=override)
    assert settings_of(llm)["long_rope"] is False
    assert settings_of(llm, rope_factors=False)["long_rope"] is False
    llm.metadata, llm.kv_overrides = {}, None
    assert settings_of(llm)["long_rope"] == 512  # then every size is a namespace of its own


def test_without_such_factors_the_size_of_the_context_does_not_count(tiny_llama: MakeLlama) -> None:
    """Unknown factors: only contexts beyond the trained size are others, where they would be."""
    for n_ctx in (256, 4096):
        llm = tiny_llama("attention", n_ctx=n_ctx)
        assert settings_of(llm)["long_rope"] is False
