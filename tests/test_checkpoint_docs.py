"""docs/eviction.md on checkpoints: its tables are there, and some of its figures made again."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs import make_checkpoint_tables as making
from docs.make_checkpoint_tables import TABLES, Column, Table, cells, markdown, measure, replaced
from llamakeep.cli import app
from llamakeep.policy import policy_names

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "eviction.md").read_text(encoding="utf-8")
COMMAND = "python -m docs.make_checkpoint_tables"


def table_of(name: str) -> list[list[str]]:
    """The cells of a table, titles first."""
    (found,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", TEXT, re.DOTALL)
    lines = [line for line in found.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_there(name: str) -> None:
    table, (titles, *rows) = TABLES[name], table_of(name)
    assert titles[1:] == [column.label for column in table.columns]
    assert [row[0].strip("`") for row in rows] == list(table.rows)
    for row in rows:
        assert all(re.fullmatch(r"(\*\*)?[\d,.]+(\*\*)?", cell) for cell in row[1:])
    for column in range(1, len(titles)):
        means = {row[0]: float(row[column].strip("*").replace(",", "")) for row in rows}
        marked = {row[0] for row in rows if row[column].startswith("**")}
        policies = [f"`{policy}`" for policy in table.policies]
        assert min(policies, key=lambda name: means[name]) in marked
        assert marked <= set(policies)
    assert f"`{name}`" in TEXT


def test_every_policy_of_checkpoints_is_judged() -> None:
    assert sorted(making.POLICIES) == policy_names("checkpoints")
    assert sorted(making.TREE_POLICIES) == policy_names("tree")


@pytest.mark.parametrize(
    ("name", "label"), [("count-hybrid", "prefix, 8"), ("bytes", "swa, exact")]
)
def test_a_column_is_true(name: str, label: str) -> None:
    table = TABLES[name]
    (column,) = [each for each in table.columns if each.label == label]
    assert len(column.seeds) >= 5
    found = [measure(column, seed, table.rows) for seed in column.seeds]
    titles, *rows = table_of(name)
    assert [row[titles.index(label)] for row in rows] == cells(table, column, found)


def test_its_commands_print_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = TEXT.replace("\\\n", "")
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    blocks = [block.strip("\n").splitlines() for block in found]
    (block,) = [each for each in blocks if each[0].startswith("    llamakeep chats")]
    make, simulate, _, *shown = (line[4:] for line in block)
    for command in (make, simulate):
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert (result.exit_code, result.stderr) == (0, "")
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert printed[: len(shown)] == [line.rstrip() for line in shown]
    # One seed of a column, by the script.
    (column,) = [each for each in TABLES["count-hybrid"].columns if each.label == "prefix, 8"]
    again = [line.split()[10] for line in shown[3:6]]
    by_script = measure(column, 0, ("oldest", "marginal", "foresight"))
    assert again == [f"{tokens:,}" for tokens in by_script]


def means(name: str) -> dict[str, dict[str, float]]:
    """What a table has, by row and column."""
    titles, *rows = table_of(name)
    return {
        row[0].strip("`"): {
            title: float(cell.strip("*").replace(",", ""))
            for title, cell in zip(titles[1:], row[1:], strict=True)
        }
        for row in rows
    }


def test_what_it_concludes_of_lists_is_in_its_tables() -> None:
    hybrid, swa = means("count-hybrid"), means("count-swa")
    unlimited = hybrid["no limit"]
    assert [round(unlimited[f"{mode}, 8"]) for mode in making.RESTORES] == [17, 79, 18]
    eight = {row: values["prefix, 8"] for row, values in hybrid.items()}
    assert [round(eight[row]) for row in ("marginal", "upstream", "oldest")] == [21, 33, 36]
    assert 21 <= eight["neighbor-gap"] <= 22
    less = [
        1 - hybrid["marginal"][f"upstream, {n}"] / hybrid["neighbor-gap"][f"upstream, {n}"]
        for n in (4, 8)
    ]
    assert [round(100 * share) for share in less] == [23, 13]
    for limit in (4, 8):
        exact = f"exact, {limit}"
        assert 0.5 < hybrid["oldest"][exact] / hybrid["marginal"][exact] < 0.55
    assert hybrid["foresight"]["prefix, 4"] < 1.05 * hybrid["marginal"]["prefix, 16"]
    assert hybrid["oldest"] == hybrid["lru"]
    assert swa["oldest"] == swa["lru"]
    worst = max(values["prefix, 4"] for row, values in hybrid.items() if row in making.POLICIES)
    assert hybrid["upstream"]["prefix, 4"] == worst
    best_three = sorted(hybrid[row]["prefix, 16"] for row in making.POLICIES)[:3]
    assert best_three[2] / best_three[0] < 1.075
    by_bytes = means("bytes")
    for restore in making.RESTORES:
        for row in making.POLICIES:
            if row != "upstream":
                assert by_bytes[row][f"hybrid, {restore}"] == hybrid[row][f"{restore}, 8"]
                assert by_bytes[row][f"swa, {restore}"] == swa[row][f"{restore}, 8"]


def test_what_it_concludes_of_entries_is_in_its_tables() -> None:
    for restore in making.RESTORES:
        for row, found in means(f"entries-upstream-{restore}").items():
            if row not in making.POLICIES:
                continue
            small, large = (
                [found[f"{keep}, {n} GiB"] for keep in ("all", "last", "none")] for n in (2, 16)
            )
            assert 1.095 < small[2] / small[1] < 1.125
            assert 1.305 < small[0] / small[1] < 1.825
            more = large[1] / large[0]
            assert 1.12 < more < 1.345 if restore == "exact" else 1.45 < more < 2
            assert large[1] < large[2]
    for found in list(means("entries-keep-prefix").values())[:-1]:
        assert found["none, 2 GiB"] < found["last, 2 GiB"] < found["all, 2 GiB"]
        assert found["all, 16 GiB"] < found["last, 16 GiB"] < found["none, 16 GiB"]
    for row, found in means("tree").items():
        if row in making.TREE_POLICIES:
            assert found["all of 2 GiB"] < found["1 GiB of 2 GiB"]
            assert found["all of 16 GiB"] < found["4 GiB of 16 GiB"]
    always = [row[0] for row in table_of("tree")[1:] if all(c.startswith("**") for c in row[1:])]
    assert always == ["`hazard`"]


def test_marginal_is_nowhere_told_apart_as_worse_than_neighbor_gap() -> None:
    """With `prefix` and `upstream`; and among the best wherever entries of 16 GiB are kept."""
    looked = 0
    for name, table in TABLES.items():
        if name == "tree":
            continue
        titles, *rows = table_of(name)
        cells_of = {row[0].strip("`"): row for row in rows}
        for column in table.columns:
            at = titles.index(column.label)
            bold = {row for row in making.POLICIES if cells_of[row][at].startswith("**")}
            if column.rules.restore in ("prefix", "upstream"):
                looked += 1
                assert "marginal" in bold or "neighbor-gap" not in bold
                if column.capacity == "16GiB":
                    assert "marginal" in bold
    assert looked > 40


def test_what_it_concludes_of_traces_is_in_its_table() -> None:
    found = means("traces")
    for trace in ("tau-bench", "LMCache"):
        for restore in making.RESTORES:
            column = [found[row][f"{trace}, {restore}"] for row in making.POLICIES]
            least = 0.935 if restore == "upstream" else 0.99
            assert least < min(column) / max(column) <= 1


def test_plots_and_names_are_there() -> None:
    for name in re.findall(r"!\[.*\]\((checkpoints-.*)\)", TEXT):
        picture = (DOCS / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 60_000
    named = re.findall(rf"{re.escape(COMMAND)} ([\w-]+)", TEXT)
    assert named
    assert set(named) <= {*TABLES, "plots"}


def test_bold_is_what_is_not_told_apart_from_the_best() -> None:
    column = Column("x", "alone", TABLES["tree"].columns[0].family, making.CheckpointRules())
    table = Table(
        "x", (column,), ("best", "close", "worse", "no policy"), ("best", "close", "worse")
    )
    best = [100_000] * 8
    close = [110_000] * 6 + [100_000, 90_000]  # worse in six seeds
    worse = [110_000] * 7 + [90_000]
    found = list(zip(best, close, worse, [0] * 8, strict=True))
    assert cells(table, column, found) == ["**100.0**", "**106.2**", "107.5", "0.0"]
    lines = markdown(table, [found]).splitlines()
    assert lines[:3] == ["| | x |", "|---|---:|", "| `best` | **100.0** |"]
    assert lines[-1] == "| no policy | 0.0 |"


def test_a_table_takes_its_place() -> None:
    text = "a\n<!-- one -->\nold\n<!-- /one -->\nb\n<!-- two -->\n<!-- /two -->\n"
    new = replaced(text, "one", "| n |")
    assert new == "a\n<!-- one -->\n\n| n |\n\n<!-- /one -->\nb\n<!-- two -->\n<!-- /two -->\n"
    with pytest.raises(ValueError, match="no place for three"):
        replaced(text, "three", "")
