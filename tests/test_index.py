"""The index as a stream: pairs and tallies, however the file is cut and spaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_cli import index
from kimi_cli.errors import CheckpointError


def test_index_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"tensor.{n}": f"file-{n % 7}" for n in range(500)} | {'odd "name"\\': "file-é"}
    path = tmp_path / "index.json"
    for tail in ("}", ',"format":{"total_size":1}}'):
        for indent in (None, 1):
            text = json.dumps({"metadata": {}, "weight_map": names}, indent=indent)
            path.write_text(text[:-1] + tail)
            for chunk in (40, 41, 64, 1000, 1 << 20):
                monkeypatch.setattr(index, "_CHUNK", chunk)
                found = [pair for pairs in index.scan_index(path) for pair in pairs]
                assert dict(found) == names and len(found) == len(names)
    by_file = {file: {n for n in names if names[n] == file} for file in names.values()}
    assert index.tally_index(path) == {file: index.tally(group) for file, group in by_file.items()}


PAIRS = st.lists(st.tuples(st.text("ab.é", max_size=3), st.sampled_from("fg")), max_size=4)
EDITS = st.tuples(
    st.integers(0, 60),
    st.integers(0, 4),
    st.sampled_from(
        [b"", b" ", b"\n", b'"', b",", b":", b"1", b"\\", b'","', b'":"', b"\x00", b"\xff", b"[]"]
    ),
)


@settings(max_examples=500)
@given(PAIRS, st.sampled_from([(",", ":"), (",\n ", ": ")]), st.lists(EDITS, max_size=2))
def test_pairs_are_cut_out_as_a_parser_reads_them(
    pairs: list[tuple[str, str]], separators: tuple[str, str], edits: list[tuple[int, int, bytes]]
) -> None:
    comma, colon = separators
    run = comma.join(f'"{name}"{colon}"{file}"' for name, file in pairs).encode()
    assert index._written_plainly(run) == index._parsed(run)
    for at, length, put in edits:
        at %= len(run) + 1
        run = run[:at] + put + run[at + length :]
    found = index._written_plainly(run)
    if found is not None:
        assert found == index._parsed(run)


def test_trailing_comma_at_the_end_of_a_piece(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    pad = b" " * (1 << 20)
    path.write_bytes(b'{"weight_map": {"a": "b",' + pad + b"}}")
    with pytest.raises(CheckpointError, match="ends in a comma"):
        list(index.scan_index(path))
