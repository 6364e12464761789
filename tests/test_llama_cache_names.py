"""`llamakeep.llama_cache` has the names of `llama_cpp.llama_cache`, and what they take."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from abc import ABC
from pathlib import Path
from typing import Any

import pytest

from llamakeep import llama_cache
from tests.llama_states import legacy_state

REFERENCE = Path(__file__).parents[2] / "shared" / "reference" / "llama_cache_module.txt"

GIB_2 = 2 << 30

METHODS: dict[str, dict[str, str]] = {
    "BaseLlamaCache": {
        "__init__": f"(self, capacity_bytes={GIB_2})",
        "cache_size": "(self)",
        "_find_longest_prefix_key": "(self, key)",
        "__getitem__": "(self, key)",
        "__contains__": "(self, key)",
        "__setitem__": "(self, key, value)",
    },
    "LlamaRAMCache": {
        "__init__": f"(self, capacity_bytes={GIB_2}, verbose=False)",
        "cache_size": "(self)",
        "_find_longest_prefix_key": "(self, key)",
        "__getitem__": "(self, key)",
        "__contains__": "(self, key)",
        "__setitem__": "(self, key, value)",
    },
    "LlamaDiskCache": {
        "__init__": (
            f"(self, cache_dir='.cache/llama_cache', capacity_bytes={GIB_2}, verbose=False)"
        ),
        "cache_size": "(self)",
        "_find_longest_prefix_key": "(self, key)",
        "__getitem__": "(self, key)",
        "__contains__": "(self, key)",
        "__setitem__": "(self, key, value)",
    },
    "TrieNode": {"__init__": "(self)"},
    "LlamaTrieCache": {
        "__init__": f"(self, capacity_bytes={GIB_2})",
        "cache_size": "(self)",
        "_find_longest_prefix_node": "(self, key)",
        "__getitem__": "(self, key)",
        "__contains__": "(self, key)",
        "_prune": "(self, key)",
        "__setitem__": "(self, key, value)",
    },
    "HybridCheckpoint": {},
    "HybridCheckpointCache": {
        "__init__": "(self, ctx, max_checkpoints=16, on_device=False, verbose=False)",
        "cache_size": "(self)",
        "clear": "(self)",
        "close": "(self)",
        "__del__": "(self)",
        "_hash_prefix": "(self, tokens, length)",
        "_evict_checkpoints_if_needed": "(self)",
        "find_best_checkpoint": "(self, tokens, seq_id=0)",
        "save_checkpoint": "(self, current_pos, tokens, seq_id=0)",
        "restore_checkpoint": "(self, cp, seq_id=0)",
        "__getitem__": "(self, key)",
        "__setitem__": "(self, key, value)",
        "__contains__": "(self, key)",
    },
}
"""Every method and property that the reference documents, with its arguments and defaults."""

ATTRIBUTES = {
    "LlamaRAMCache": ["capacity_bytes", "cache_state", "_current_size", "verbose"],
    "LlamaDiskCache": ["cache_dir", "cache", "verbose", "capacity_bytes"],
    "LlamaTrieCache": ["root", "_current_size", "lru_tracker", "capacity_bytes"],
    "TrieNode": ["children", "state"],
}


def function_of(kind: type, name: str) -> Any:
    found = inspect.getattr_static(kind, name)
    return found.fget if isinstance(found, property) else found


def told(function: Any) -> str:
    """Return a signature without annotations and without arguments that we added."""
    parameters = inspect.signature(function).parameters.values()
    known = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in parameters
        if each.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    return str(inspect.Signature(known))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in METHODS.items() for name in names]
)
def test_methods(kind: str, name: str) -> None:
    assert told(function_of(getattr(llama_cache, kind), name)) == METHODS[kind][name]


@pytest.mark.parametrize("kind", ["BaseLlamaCache", *ATTRIBUTES, "HybridCheckpointCache"])
def test_what_we_add_need_not_be_given(kind: str) -> None:
    for parameter in inspect.signature(getattr(llama_cache, kind)).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert parameter.default is not inspect.Parameter.empty


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, names in METHODS.items() for name in names if name == "cache_size"],
)
def test_sizes_are_properties(kind: str, name: str) -> None:
    assert isinstance(inspect.getattr_static(getattr(llama_cache, kind), name), property)


def test_the_base_class() -> None:
    base = llama_cache.BaseLlamaCache
    assert issubclass(base, ABC)
    assert base.__abstractmethods__ == {"cache_size", "__getitem__", "__contains__", "__setitem__"}
    with pytest.raises(TypeError, match="abstract"):
        base()  # type: ignore[abstract]
    assert base._find_longest_prefix_key(None, (1,)) is None  # type: ignore[arg-type]
    for kind in (
        llama_cache.LlamaRAMCache,
        llama_cache.LlamaDiskCache,
        llama_cache.LlamaTrieCache,
        llama_cache.HybridCheckpointCache,
    ):
        assert issubclass(kind, base)


def test_the_alias() -> None:
    assert llama_cache.LlamaCache is llama_cache.LlamaTrieCache


def test_registered_with_llama_cpp() -> None:
    theirs = pytest.importorskip("llama_cpp.llama_cache")
    for kind in ("BaseLlamaCache", *METHODS):
        if kind not in ("TrieNode", "HybridCheckpoint"):
            assert issubclass(getattr(llama_cache, kind), theirs.BaseLlamaCache)
    assert isinstance(llama_cache.LlamaRAMCache(), theirs.BaseLlamaCache)


def test_attributes(tmp_path: Path) -> None:
    made = {
        "LlamaRAMCache": llama_cache.LlamaRAMCache(),
        "LlamaTrieCache": llama_cache.LlamaTrieCache(),
        "LlamaDiskCache": llama_cache.LlamaDiskCache(str(tmp_path / "cache"), namespace="test"),
        "TrieNode": llama_cache.TrieNode(),
    }
    for kind, names in ATTRIBUTES.items():
        for name in names:
            assert hasattr(made[kind], name), f"{kind}.{name}"
    assert made["LlamaDiskCache"].cache_dir == str(tmp_path / "cache")  # type: ignore[union-attr]
    for kind in ("LlamaRAMCache", "LlamaTrieCache", "LlamaDiskCache"):
        assert made[kind].capacity_bytes == GIB_2  # type: ignore[union-attr]
    node = made["TrieNode"]
    assert isinstance(node, llama_cache.TrieNode)
    assert (node.children, node.state) == ({}, None)


def test_fields_of_a_checkpoint() -> None:
    required = dataclasses.MISSING
    assert [
        (field.name, field.type, field.default)
        for field in dataclasses.fields(llama_cache.HybridCheckpoint)
    ] == [
        ("pos", "int", required),
        ("data", "bytes", required),
        ("hash_val", "str", required),
        ("size", "int", required),
        ("seq_id", "int", required),
        ("pos_min", "int", -1),
        ("pos_max", "int | None", None),
    ]


def test_the_modules_names() -> None:
    assert sorted(llama_cache.__all__) == sorted(
        {*METHODS, "LlamaCache", "ContextTracking", "track"}
    )
    for name in llama_cache.__all__:
        assert hasattr(llama_cache, name)


@pytest.mark.skipif(not REFERENCE.exists(), reason="the reference is not here")
def test_the_table_is_the_references() -> None:
    """Every ``def`` that the reference gives for a class stands in the table."""
    text = REFERENCE.read_text()
    found: dict[str, dict[str, str]] = {kind: {} for kind in METHODS}
    kind = ""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line in METHODS:
            kind = line
        match = re.match(r"\s*def (\w+)\(", line)
        if not match or not kind:
            continue
        block = []
        for piece in lines[index:]:
            block.append(piece)
            if re.search(r"\).*:\s*$", piece):
                break
        source = textwrap.dedent("\n".join(block)) + "\n    ...\n"
        tree = ast.parse(source).body[0]
        assert isinstance(tree, ast.FunctionDef)
        given = tree.args.args
        defaults = [None] * (len(given) - len(tree.args.defaults)) + [
            eval(ast.unparse(each)) if not isinstance(each, ast.Constant) else each.value
            for each in tree.args.defaults
        ]
        shown = [
            each.arg if index < len(given) - len(tree.args.defaults) else f"{each.arg}={value!r}"
            for index, (each, value) in enumerate(zip(given, defaults, strict=True))
        ]
        found[kind].setdefault(match[1], f"({', '.join(shown)})")
    assert {kind: names for kind, names in found.items() if names} == {
        kind: names for kind, names in METHODS.items() if names
    }


# -- views -----------------------------------------------------------------------------------------


def test_cache_state_is_a_view() -> None:
    cache = llama_cache.LlamaRAMCache()
    view = cache.cache_state
    assert (len(view), list(view)) == (0, [])
    cache[(1, 2)] = legacy_state([1, 2], b"a")
    cache[(1, 3)] = legacy_state([1, 3], b"b")
    assert list(view) == [(1, 2), (1, 3)]
    assert view[(1, 2)].llama_state == b"a"
    assert list(view) == [(1, 2), (1, 3)], "looking uses nothing"
    cache[(1, 2)]
    assert list(view) == [(1, 3), (1, 2)]
    assert list(reversed(view)) == [(1, 2), (1, 3)]
    assert [state.llama_state for state in view.values()] == [b"b", b"a"]
    assert (1, 2) in view
    assert (1,) not in view
    assert "text" not in view
    with pytest.raises(KeyError):
        view[(1,)]
    with pytest.raises(TypeError):
        view[(1, 2)] = None  # type: ignore[index]
    with pytest.raises(AttributeError):
        cache.cache_state = {}  # type: ignore[misc]
    assert cache._current_size == cache.cache_size == 2
    assert cache._find_longest_prefix_key((1, 2, 9)) == (1, 2)
    assert cache._find_longest_prefix_key((9,)) is None


def test_the_trie_is_a_view() -> None:
    cache = llama_cache.LlamaTrieCache()
    root = cache.root
    assert (dict(root.children), root.state) == ({}, None)
    cache[(1, 2)] = legacy_state([1, 2], b"a")
    cache[(1, 2, 3)] = legacy_state([1, 2, 3], b"b")
    cache[(1, 4)] = legacy_state([1, 4], b"c")
    assert sorted(root.children) == [1]
    one = root.children[1]
    assert isinstance(one, llama_cache.TrieNode)
    assert one.state is None
    assert sorted(one.children) == [2, 4]
    assert one.children[2].state.llama_state == b"a"
    assert one.children[2].children[3].state.llama_state == b"b"
    assert dict(one.children[4].children) == {}
    with pytest.raises(KeyError):
        one.children[9]
    with pytest.raises(AttributeError):
        one.state = None
    assert list(cache.lru_tracker) == [(1, 2), (1, 2, 3), (1, 4)]
    assert cache.lru_tracker[(1, 2)].state.llama_state == b"a"
    node, key = cache._find_longest_prefix_node((1, 2, 9))
    assert node is not None
    assert (node.state.llama_state, key) == (b"a", (1, 2))
    assert cache._find_longest_prefix_node((2,)) == (None, None)
    assert cache._current_size == cache.cache_size == 3
    cache._prune((1, 2))
    cache._prune((8, 8))
    assert list(cache.lru_tracker) == [(1, 2, 3), (1, 4)]
    assert cache.cache_size == 2
    assert one.children[2].state is None
    cache._prune((1, 2, 3))
    assert sorted(one.children) == [4], "what leads nowhere is gone"


def test_diskcaches_part(tmp_path: Path) -> None:
    disk = llama_cache.LlamaDiskCache(tmp_path / "cache", namespace="test")
    assert disk.cache
    assert disk.cache.volume() == 0
    disk[(1, 2)] = legacy_state([1, 2], b"a" * 1000)
    disk[(1, 3)] = legacy_state([1, 3], b"b" * 1000)
    assert disk.cache_size == disk.cache.volume() > 2000
    assert len(disk.cache) == 2
    assert list(disk.cache.iterkeys()) == list(disk.cache) == [(1, 2), (1, 3)]
    assert disk.cache[(1, 2)].llama_state == b"a" * 1000
    assert (1, 2) in disk.cache
    assert (1,) not in disk.cache
    with pytest.raises(KeyError):
        disk.cache[(1,)]
    disk.cache[(5,)] = legacy_state([5], b"c")
    assert disk[(5, 6)].llama_state == b"c"
    del disk.cache[(5,)]
    with pytest.raises(KeyError):
        del disk.cache[(5,)]
    assert (5, 6) not in disk
    assert Path(disk.cache.directory) == tmp_path / "cache"
    disk.cache.close()
    disk.close()
    assert (1, 2) not in disk
    with pytest.raises(KeyError):
        disk[(1, 2)]
    disk[(1, 2)] = legacy_state([1, 2], b"a")
    assert disk.counters["refused_closed"] > 0
    assert disk.cache_size == 0
