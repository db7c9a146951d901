"""Safetensors headers: equal to the reference library on sound files, one sentence on the rest."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from kimi_cli.errors import CheckpointError, Exit
from kimi_cli.header import (
    DTYPE_BYTES,
    MAX_HEADER,
    Entry,
    ShortFile,
    Table,
    _parsed,
    _written_plainly,
    header_length,
    parse_header,
    read_header,
)
from kimi_cli.synth import BUILTIN


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def framed_json(header: object) -> bytes:
    return framed(json.dumps(header).encode())


def tensor(dtype: object, shape: object, begin: object, end: object) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(raw: bytes, size: int | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_header(raw, len(raw) if size is None else size, "DIR/a.safetensors")
    assert caught.value.exit_code == Exit.CHECKPOINT
    message = str(caught.value)
    assert message.startswith("DIR/a.safetensors") and len(message) < 300
    return message


@pytest.mark.parametrize("path", sorted(BUILTIN.glob("*.safetensors")), ids=lambda path: path.name)
def test_agrees_with_the_reference_library(path: Path) -> None:
    entries, raw = read_header(path), path.read_bytes()
    with safe_open(path, "np") as file:
        assert set(file.keys()) == set(entries)
        for name, entry in entries.items():
            view = file.get_slice(name)
            assert tuple(view.get_shape()) == entry.shape and view.get_dtype() == entry.dtype
            if entry.dtype != "BF16":  # which numpy lacks
                data = raw[entry.offset : entry.offset + entry.length]
                assert file.get_tensor(name).tobytes() == data


def test_entries_are_absolute_and_keep_the_header_order() -> None:
    raw = framed_json({"b": tensor("F32", [1, 2], 3, 11), "a": tensor("U8", [3], 0, 3)})
    assert parse_header(raw, len(raw) + 11, "x") == {
        "b": Entry("F32", (1, 2), len(raw) + 3, 8),
        "a": Entry("U8", (3,), len(raw), 3),
    }


def test_scalars_empty_tensors_and_metadata_are_sound() -> None:
    header = {
        "__metadata__": {"format": "pt", "note": 'a "quoted" word'},
        "scalar": tensor("F64", [], 0, 8),
        "empty": tensor("BF16", [0, 7], 8, 8),
    }
    raw = framed_json(header)
    assert list(parse_header(raw, len(raw) + 8, "x")) == ["scalar", "empty"]
    assert parse_header(framed(b"{}"), 10, "x") == {}
    assert parse_header(framed(b'{"__metadata__":{"a":"b"}}  '), 36, "x") == {}
    one = b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    for metadata in (b"null", b'{"note":"a}, b"}', b'{"note":"a},\\"b"}'):
        raw = framed(b'{"__metadata__":' + metadata + b"," + one)
        assert list(parse_header(raw, len(raw), "x")) == ["a"]


def test_bytes_after_the_header_do_not_matter() -> None:
    raw = framed_json({"a": tensor("U8", [2], 0, 2)}) + b"xy"
    assert parse_header(raw, len(raw), "x")["a"].length == 2


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "does not begin with"),
        (b" {}", "does not begin with"),
        (b"[]", "does not begin with"),
        (b"{", "header is not JSON"),
        (b'{"a":\xff}', "header is not UTF-8"),
        (b'{"a":' + b"[" * 100_000, "header is nested too deeply"),
        (b'{"a":1,"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 'the key "a" twice'),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', '"dtype" twice'),
        (
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
            b'"\\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            'the key "a" twice',
        ),
        (b'{"__metadata__":{},"__metadata__":{}}', '"__metadata__" twice'),
        (b'{"__metadata__":{"a":"b","a":"b"}}', '"a" twice'),
        (b'{"__metadata__":{"a":1}}', "__metadata__ is"),
        (b'{"__metadata__":[]}', "__metadata__ is []"),
        (b'{"a": {"dtype": "U8", "shape": [0], "data_offsets"5: [0, 0]}}', "not JSON at character"),
        (b'{"a": {"dtype": "U8", "shape": [0], "data_offsets":5 [0, 0]}}', "not JSON at character"),
        (b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]5}}', "not JSON at character"),
    ],
)
def test_text_that_is_no_header(header: bytes, said: str) -> None:
    assert said in refusal(framed(header))


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (None, '"t" has null, wanted dtype, shape, data_offsets'),
        (["dtype"], '"t" has ["dtype"]'),
        ({}, "has nothing, wanted"),
        ({"dtype": "U8", "shape": [1]}, "wanted dtype, shape, data_offsets"),
        ({**tensor("U8", [1], 0, 1), "extra": 1}, '"extra"'),
        (tensor("F4", [1], 0, 1), 'unknown dtype "F4"'),
        (tensor(["U8"], [1], 0, 1), 'unknown dtype ["U8"]'),
        (tensor("U8", "", 0, 1), 'shape ""'),
        (tensor("U8", {}, 0, 1), "shape an object"),
        (tensor("U8", [True], 0, 1), "shape [true]"),
        (tensor("U8", [1.0], 0, 1), "shape [1.0]"),
        (tensor("U8", [-1, -1], 0, 1), "shape [-1, -1]"),
        (tensor("U8", [10**400], 0, 1), "shape"),
        (tensor("U8", [1] * 9, 0, 1), "wanted up to 8 sizes"),
        (tensor("F32", [1 << 62] * 8, 0, 4), "more than 38 digits"),
        (tensor("U8", [1], False, True), "data_offsets [false, true]"),
        (tensor("U8", [1], 0.0, 1.0), "data_offsets [0.0, 1.0]"),
        (tensor("U8", [1], -1, 0), "data_offsets [-1, 0]"),
        (tensor("U8", [1], 1, 0), "has -1 bytes, wanted 1"),
        (tensor("U8", [1], 0, 10**30), "data_offsets"),
        ({"dtype": "U8", "shape": [1], "data_offsets": [0]}, "data_offsets [0]"),
        ({"dtype": "U8", "shape": [1], "data_offsets": "01"}, 'data_offsets "01"'),
        (tensor("BF16", [3], 0, 3), "has 3 bytes, wanted 6 for BF16 [3]"),
    ],
)
def test_entry_that_is_no_tensor(info: object, said: str) -> None:
    sound = tensor("U8", [0], 0, 0)
    assert said in refusal(framed_json({"sound": sound, "t": info}))


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([(0, 4), (5, 9)], '"t1" follows a hole: data offset 5, wanted 4'),
        ([(0, 4), (3, 9)], '"t1" overlaps the tensor before it: data offset 3, wanted 4'),
        ([(0, 4), (0, 4)], '"t1" overlaps'),
        ([(1, 4)], '"t0" follows a hole'),
    ],
)
def test_tensors_follow_each_other(spans: list[tuple[int, int]], said: str) -> None:
    raw = framed_json({f"t{n}": tensor("U8", [e - b], b, e) for n, (b, e) in enumerate(spans)})
    assert said in refusal(raw, len(raw) + 9)


def test_file_size_is_exact() -> None:
    raw = framed_json({"a": tensor("U8", [5000], 0, 5000)})
    assert refusal(raw, len(raw) + 5001).endswith("1 bytes after the last tensor")
    with pytest.raises(ShortFile) as caught:
        parse_header(raw, len(raw) + 1000, "a")
    assert str(caught.value) == "a is short by 4,000 bytes"
    assert caught.value.missing == 4000 and caught.value.table.lengths == [5000]


def test_file_that_ends_in_its_header() -> None:
    assert "has 0 bytes: not a safetensors file" in refusal(b"")
    assert "has 7 bytes" in refusal(b"1234567")
    raw = framed_json({"a": tensor("U8", [5], 0, 5)})
    assert "short by at least 3 bytes" in refusal(raw[:-3])
    assert "header ends after 20 bytes" in refusal(raw[:20], 1000)


@pytest.mark.parametrize("claim", [10**18, MAX_HEADER + 1, (1 << 64) - 1])
def test_huge_claim_allocates_nothing(tmp_path: Path, claim: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(claim.to_bytes(8, "little") + b"{}")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="claims a header of"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_quotes_without_end_are_not_cut_apart() -> None:
    raw = framed(b'{"' + b'ab"' * 1_000_000)
    tracemalloc.start()
    try:
        assert "not JSON" in refusal(raw)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(raw)
    finally:
        tracemalloc.stop()


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none does not exist"):
        read_header(tmp_path / "none")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_header(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"symbolic link to .*none, which does not exist"):
        read_header(tmp_path / "link")


def test_header_length() -> None:
    assert header_length((5).to_bytes(8, "little"), 13, "x") == 5


ANY = st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3)
INFOS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BYTES, "F4"]) | ANY,
        "shape": st.lists(st.integers(-1, 4) | ANY, max_size=3) | ANY,
        "data_offsets": st.lists(st.integers(0, 40) | ANY, min_size=1, max_size=3) | ANY,
    }
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), INFOS | ANY, max_size=3), st.integers(0, 400))
def test_any_header_is_read_or_refused(header: dict[str, object], size: int) -> None:
    raw = framed_json(header)
    try:
        entries = parse_header(raw, size, "x")
    except CheckpointError as error:
        assert str(error).startswith("x")
    else:
        assert sum(entry.length for entry in entries.values()) + len(raw) == size


@settings(deadline=None)
@given(st.binary(max_size=64), st.integers(0, 100))
def test_any_bytes_are_read_or_refused(text: bytes, size: int) -> None:
    for raw in (text, framed(text), framed(b"{" + text)):
        try:
            parse_header(raw, size, "x")
        except CheckpointError as error:
            assert str(error).startswith("x")


def either(read: Callable[[bytes, int, str], Table | None], text: bytes) -> Table | None:
    try:
        return read(text, 8, "x")
    except (ValueError, CheckpointError):
        return None


@st.composite
def plain_headers(draw: st.DrawFn) -> bytes:
    """As a library writes them, without a fault."""
    names = draw(st.lists(st.text("ab.1é", max_size=4), min_size=1, max_size=4, unique=True))
    header: dict[str, object] = {"__metadata__": {"a": "b"}} if draw(st.booleans()) else {}
    end = 0
    for name in names:
        shape = draw(st.lists(st.integers(0, 12), max_size=3))
        dtype = draw(st.sampled_from(["U8", "BF16", "F32"]))
        begin, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = tensor(dtype, shape, begin, end)
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (", ", ":")]))
    text = json.dumps(header, separators=separators, ensure_ascii=False).encode()
    return text + b" " * draw(st.integers(0, 3))


@given(plain_headers())
def test_a_plain_header_is_read_without_a_parser(text: bytes) -> None:
    table = _written_plainly(text, 8, "x")
    assert table is not None and table == _parsed(text, 8, "x")


EDITS = st.tuples(
    st.integers(0, 400),
    st.integers(0, 12),
    st.sampled_from(
        [
            b"", b" ", b'"', b"{", b"}", b"[", b"]", b":", b",", b"0", b"1", b"-", b".0", b"e1",
            b"}, ", b"\\", b"\n", b"\x7f", b"\xff", b"true", b'"a"', b"]},", b'":{', b'"dtype"',
            b"[[1]]", b'"shape":[1],', b'"U8"', b'"__metadata__":{"c":"d"},', b"\xef\xbb\xbf",
        ]
    ),
)  # fmt: skip


@settings(max_examples=500)
@given(plain_headers(), st.lists(EDITS, min_size=1, max_size=3))
def test_no_other_header_is_read_differently(text: bytes, edits: list[Any]) -> None:
    for at, length, put in edits:
        at %= len(text) + 1
        text = text[:at] + put + text[at + length :]
    table = either(_written_plainly, text)
    assert table is None or table == either(_parsed, text)
