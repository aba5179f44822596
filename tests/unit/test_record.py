"""Records survive JSON, and hand-edited files fail clearly."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral import __version__
from corral.base.errors import DataError
from corral.base.record import dump_json, from_json, load_json, nearest, renamed_from, save_record, to_json


class Colour(enum.StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    count: int
    share: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    many: tuple[Inner, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    colour: Colour = Colour.RED
    flag: bool = False


@given(
    st.builds(
        Outer,
        name=st.text(),
        inner=st.builds(Inner, st.integers(), st.none() | st.floats(allow_nan=False)),
        many=st.lists(st.builds(Inner, st.integers())).map(tuple),
        table=st.dictionaries(st.text(), st.integers()),
        flag=st.booleans(),
    )
)
def test_round_trip(value: Outer) -> None:
    assert from_json(Outer, json.loads(dump_json(value))) == value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "x", "inner": {"count": 1}, "colur": "red"}, "unknown key 'colur'"),
        ({"name": "x"}, "lacks 'inner'"),
        ({"name": 3, "inner": {"count": 1}}, "Outer.name must be text, not 3"),
        ({"name": "x", "inner": {"count": 1.5}}, "Outer.inner.count must be a whole number"),
        ({"name": "x", "inner": {"count": True}}, "Outer.inner.count must be a whole number"),
        ({"name": "x", "inner": {"count": 1}, "colour": "blue"}, "must be one of red"),
        ({"name": "x", "inner": [1]}, "Outer.inner must be an object"),
        ({"name": "x", "inner": {"count": 1}, "many": 3}, "Outer.many must be a list"),
    ],
)
def test_bad_data_is_told_by_place(data: object, words: str) -> None:
    with pytest.raises(DataError) as caught:
        from_json(Outer, data)
    assert words in caught.value.message


@dataclass(frozen=True)
class Fixed:
    alone: tuple[int] = (0,)
    pair: tuple[str, float] = ("", 0.0)
    triple: tuple[str, int, Inner | None] = ("", 0, None)


@pytest.mark.parametrize("value", [Fixed(), Fixed((3,), ("a", 1.5), ("b", 2, Inner(4)))])
def test_tuples_of_a_fixed_length_keep_the_type_of_each_place(value: Fixed) -> None:
    assert from_json(Fixed, to_json(value)) == value


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"alone": []}, "Fixed.alone must be a list of 1 values, not []"),
        ({"pair": ["a"]}, "Fixed.pair must be a list of 2 values, not ['a']"),
        ({"pair": ["a", 1.0, 2.0]}, "Fixed.pair must be a list of 2 values"),
        ({"triple": ["a", 1]}, "Fixed.triple must be a list of 3 values"),
        ({"triple": ["a", "b", None]}, "Fixed.triple[1] must be a whole number, not 'b'"),
        ({"triple": ["a", 1, {"count": "x"}]}, "Fixed.triple[2].count must be a whole number"),
    ],
)
def test_a_tuple_of_another_length_or_type_is_told_by_place(data: object, words: str) -> None:
    with pytest.raises(DataError) as caught:
        from_json(Fixed, data)
    assert words in caught.value.message


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(DataError) as caught:
        from_json(Outer, {"name": "x", "inner": {"count": 1}, "colur": "red"})
    assert "'colour'" in caught.value.remedy


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        load_json(Outer, tmp_path / "x.json")


def test_paths_become_text() -> None:
    assert to_json({"p": Path("/a")}) == {"p": "/a"}
    assert nearest("lama", ["llama", "zebra"]) == ["llama"]


@dataclass(frozen=True)
class Renamed:
    request: str = field(default="", metadata=renamed_from("wish"))


def test_a_renamed_field_is_read_under_its_old_name() -> None:
    assert from_json(Renamed, {"wish": "a"}) == from_json(Renamed, {"request": "a"}) == Renamed("a")
    assert to_json(Renamed("a")) == {"request": "a"}
    with pytest.raises(DataError, match="unknown key 'wishes'"):
        from_json(Renamed, {"wishes": "a"})


# Files that other versions of Corral read and write


@dataclass(frozen=True)
class NamedMember:
    name: str
    leaving: bool = False
    pause_s: float = 0.0


@dataclass(frozen=True)
class Herd:
    """As this version knows it."""

    name: str
    members: tuple[NamedMember, ...] = ()
    note: str = ""


def test_what_a_newer_version_wrote_is_read_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "herd.json"
    newer = {"name": "a", "colour": "red", "members": [{"name": "a-1", "leaving": False, "rack": {"row": 3}}]}
    path.write_text(json.dumps(newer))
    herd = load_json(Herd, path)
    assert herd == Herd("a", (NamedMember("a-1"),))
    save_record(path, replace(herd, members=(NamedMember("a-2"), NamedMember("a-1", leaving=True))))
    written = json.loads(path.read_text())
    assert written["colour"] == "red"
    assert written["members"] == [{"name": "a-2"}, {"name": "a-1", "leaving": True, "rack": {"row": 3}}]


def test_a_file_of_an_earlier_version_gains_only_keys_that_are_used(tmp_path: Path) -> None:
    path = tmp_path / "herd.json"
    path.write_text('{"name": "a", "members": [{"name": "a-1"}]}')
    save_record(path, load_json(Herd, path))
    assert json.loads(path.read_text()) == {"name": "a", "members": [{"name": "a-1"}]}
    save_record(path, Herd("a", (NamedMember("a-1", pause_s=2.0),), note="x"))
    assert json.loads(path.read_text())["members"] == [{"name": "a-1", "pause_s": 2.0}]


def test_a_new_file_says_its_format_and_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "herd.json"
    save_record(path, Herd("a"))
    written = json.loads(path.read_text())
    assert (written["file_format"], written["written_by"]) == (1, __version__)
    assert load_json(Herd, path) == Herd("a")


def test_a_later_format_is_refused_with_path_and_writer_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "herd.json"
    text = json.dumps({"file_format": 2, "written_by": "9.8.7", "name": "a"})
    path.write_text(text)
    for attempt in (lambda: load_json(Herd, path), lambda: save_record(path, Herd("a"))):
        with pytest.raises(DataError) as caught:
            attempt()
        assert str(path) in caught.value.message
        assert "Corral 9.8.7" in caught.value.message
        assert "9.8.7" in caught.value.remedy
    assert path.read_text() == text


def test_a_field_keeps_its_old_name_in_a_file_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"wish": "a"}')
    save_record(path, Renamed("b"))
    assert json.loads(path.read_text()) == {"wish": "b"}
