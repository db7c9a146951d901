"""The tokenizer against golden ids, a slower reading of its specification, and damaged files."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_cli.errors import TokenizerError, UsageError
from kimi_cli.tokenizer import TextStream, Tokenizer

DATA = Path(__file__).parent / "data"
TOKENIZER = DATA / "tokenizer"
MODEL = (TOKENIZER / "tiktoken.model").read_bytes()
CONFIG = (TOKENIZER / "tokenizer_config.json").read_bytes()
PLAIN = json.loads((DATA / "chat.json").read_text(encoding="utf-8"))["plain"]
KIMI = Tokenizer.load(TOKENIZER)
RANKS = 1536
UNHURRIED = settings(deadline=None)

EDGE = [
    "}\n///",
    "〇一二",
    "紅。白\n髮…。\n\n　　話說天下大勢",
    "“Hello,” 世界世世世界世界——I'm ChatGPT. CAN'T wait 'til 2026.世界世界",
    "x" * 100_000,
    "世" * 60_000,
    " " * 60_000 + "x",
    " \n" * 40_000,
    "\ufeffBOM first",
    "CRLF\r\n\r\nand a lone \r",
    "NUL \x00 inside",
    "\u0301" * 100,
    "👩\u200d👩\u200d👧 🇩🇪 é é ﬁ",
    " \x85 \x1c\x1d\x1e\x1f\u2028\u2029\u3000\xa0",
    "".join(KIMI.decode_bytes([i]).decode() for i in range(RANKS, RANKS + 256)),
]

# The specification's alternatives as it prints them, for the independent reading below.
ALTERNATIVES = r"""
[\p{Han}]+
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
\p{N}{1,3}
 ?[^\s\p{L}\p{N}]+[\r\n]*
\s*[\r\n]+
\s+(?!\S)
\s+
"""
PLAIN_ENCODING = tiktoken.Encoding(
    "plain",
    pat_str="|".join(ALTERNATIVES.strip("\n").split("\n")),
    mergeable_ranks={
        base64.b64decode(line.split()[0]): int(line.split()[1]) for line in MODEL.splitlines()
    },
    special_tokens={},
)


def reference_pieces(text: str) -> Iterator[str]:
    """The specification's cuts, one character at a time."""
    for begin in range(0, len(text), 400_000):
        piece, run, space = "", 0, False
        for character in text[begin : begin + 400_000]:
            run = run + 1 if character.isspace() == space else 1
            space = character.isspace()
            if run > 25_000:
                yield piece
                piece, run = "", 1
            piece += character
        yield piece


def reference_ids(text: str) -> list[int]:
    return [i for piece in reference_pieces(text) for i in PLAIN_ENCODING.encode_ordinary(piece)]


def written(folder: Path, model: bytes = MODEL, config: bytes = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_bytes(config)
    return folder


def edited_config(**names: object) -> bytes:
    """The config with entries of added_tokens_decoder replaced: id_1536="x" renames id 1536."""
    config = json.loads(CONFIG)
    for key, content in names.items():
        config["added_tokens_decoder"][key.removeprefix("id_")] = {"content": content}
    return json.dumps(config).encode()


@pytest.mark.parametrize("entry", PLAIN, ids=lambda entry: ascii(entry["text"])[:30])
def test_golden_plain(entry):
    text = entry["text"]
    if isinstance(text, dict):
        text = "".join(piece * times for piece, times in text["repeat"])
    assert KIMI.encode(text) == entry["ids"]
    assert KIMI.decode_bytes(entry["ids"]) == text.encode()


@pytest.mark.parametrize("text", EDGE, ids=lambda text: ascii(text)[:30])
def test_edge_text_round_trips_and_equals_the_slow_reading(text):
    ids = KIMI.encode(text)
    assert ids == reference_ids(text)
    assert KIMI.decode_bytes(ids) == text.encode()
    assert max(ids) < RANKS


@UNHURRIED
@given(st.text())
def test_any_text_equals_the_slow_reading(text):
    ids = KIMI.encode(text)
    assert ids == reference_ids(text)
    assert KIMI.decode_bytes(ids) == text.encode()


@pytest.mark.parametrize("seed", range(6))
def test_long_text_is_cut_as_specified(seed):
    chance = random.Random(seed)
    lengths = (1, 7, 24_999, 25_000, 25_001, 50_000, 50_001, 75_003)
    text = "".join(chance.choice(" \nab世1") * chance.choice(lengths) for _ in range(20))
    text += "x" * (400_001 - len(text))
    assert KIMI.encode(text) == reference_ids(text)


def test_regex_space_is_str_isspace():
    every = [chr(point) for point in range(sys.maxunicode + 1)]
    assert all(bool(re.match(r"\s", c)) == c.isspace() for c in every)


def test_vocabulary_and_names():
    assert KIMI.vocab_size == RANKS + 256
    assert KIMI.special("[BOS]") == 1536
    assert KIMI.special("<|sep|>") == 1541
    assert KIMI.special("<|reserved_token_1544|>") == 1544
    assert KIMI.end_ids == {1537, 1538}
    assert [i for i in range(-1, 1800) if KIMI.is_special(i)] == list(range(1536, 1792))
    assert KIMI.decode_bytes([1539, 1, 1791]) == b'<|open|>"[PAD]'
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json names no .* '<\|none\|>'"):
        KIMI.special("<|none|>")


def test_end_ids_only_where_named(tmp_path):
    unnamed = written(tmp_path, config=b'{"added_tokens_decoder": {}}')
    assert Tokenizer.load(unnamed).end_ids == frozenset()


@pytest.mark.parametrize("token_id", [-1, 1792, 1 << 31, 1 << 70])
def test_id_outside_the_vocabulary(token_id):
    with pytest.raises(UsageError, match=f"token id {token_id} is outside .* 0 to 1791"):
        KIMI.decode_bytes([0, token_id])


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("a\udcffb", b"a\xffb"),
        ("\udc80", b"\x80"),
        ("\ud800", b"\xef\xbf\xbd"),
        ("x\udfffy", b"x\xef\xbf\xbdy"),
        ("\ud83d\ude00", "😀".encode()),
        ("\udcc3\udca9", "é".encode()),
        ("\udce4\udcb8\udcad\udcff", "中".encode() + b"\xff"),
    ],
    ids=ascii,
)
def test_lone_surrogates(text, data):
    assert KIMI.decode_bytes(KIMI.encode(text)) == data


@UNHURRIED
@given(st.binary())
def test_any_argument_keeps_its_bytes(data):
    text = data.decode("utf-8", "surrogateescape")
    assert KIMI.decode_bytes(KIMI.encode(text)) == data


def test_escaped_valid_text_is_the_text():
    text = "naïve 漢字"
    assert KIMI.encode(text.encode().decode("ascii", "surrogateescape")) == KIMI.encode(text)


@UNHURRIED
@given(st.text(st.characters()))
def test_no_string_crashes(text):
    assert all(0 <= i < RANKS for i in KIMI.encode(text))


def single(data: bytes) -> list[int]:
    """`data` as single-byte tokens, so that every character is split."""
    return [
        i for value in data for i in KIMI.encode(bytes((value,)).decode("utf-8", "surrogateescape"))
    ]


@UNHURRIED
@given(st.one_of(st.binary(), st.text().map(str.encode)))
def test_streamed_text_is_the_whole_text(data):
    stream = TextStream(KIMI)
    pieces = [stream.push(i) for i in single(data)]
    assert "".join(pieces) + stream.finish() == data.decode("utf-8", "replace")


@UNHURRIED
@given(st.lists(st.integers(0, 1791)))
def test_streamed_ids_are_the_whole_decode(ids):
    stream = TextStream(KIMI)
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == KIMI.decode_bytes(ids).decode("utf-8", "replace")


def test_stream_holds_back_a_part_of_a_character():
    stream = TextStream(KIMI)
    assert [stream.push(i) for i in single("é😀".encode())] == ["", "é", "", "", "", "😀"]
    assert stream.push(single(b"\xf0")[0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    with pytest.raises(UsageError):
        stream.push(1792)


LINES = MODEL.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (MODEL + b"AAAA\n", "line 1537 is malformed.*found b'AAAA'"),
        (MODEL + b"AAAA 1536 7\n", "line 1537 is malformed"),
        (MODEL + b"A 1536\n", "line 1537: wanted a token in base64, found b'A'"),
        (MODEL + b"AA*A 1536\n", "line 1537: wanted a token in base64"),
        (MODEL + b"==== 1536\n", "line 1537: wanted a token in base64"),
        (MODEL + b"\xff\xfe 1536\n", r"line 1537: wanted a token in base64, found b'\\xff\\xfe'"),
        (MODEL + b"zMzMzM -1\n", "line 1537: wanted a token in base64"),
        (MODEL + b"zMzM -1\n", "line 1537: wanted a rank from 0 .*found b'-1'"),
        (MODEL + b"zMzM 1.0\n", "line 1537: wanted a rank"),
        (MODEL + b"zMzM 99999999999999999999\n", "line 1537: wanted a rank"),
        (MODEL + b"zMzM 1048576\n", "line 1537: wanted a rank"),
        (MODEL + b"z" * 100_000 + b" 1536\n", "line 1537 is malformed"),
        (MODEL + LINES[3], "line 1537 repeats the token of rank 3"),
        (MODEL + b"zMzM 3\n", "line 1537 repeats rank 3"),
        (MODEL + b"zMzM 1537\n", "has no token of rank 1536: .*0 to 1537, found 1537"),
        (b"".join(LINES[:700] + LINES[701:]), "has no token of rank 700"),
        (b"".join(LINES[:200]), "single byte 0x"),
        (MODEL[:-3], "line 1536 repeats rank 15"),
    ],
)
def test_damaged_model_file(tmp_path, model, says):
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.load(written(tmp_path, model))
    assert str(caught.value).startswith(str(tmp_path / "tiktoken.model"))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_order_line_ends_and_blank_lines_do_not_matter(tmp_path):
    shuffled = random.Random(0).sample(LINES, len(LINES))
    model = b"\n" + b"".join(shuffled).replace(b"\n", b"\r\n") + b"\r\n"
    other = Tokenizer.load(written(tmp_path, model))
    assert other.encode(EDGE[3]) == KIMI.encode(EDGE[3])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"", "is not JSON at character 0"),
        (b"\xff", "is not UTF-8 at byte 0"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is holding a number of too many digits"),
        (b"[]", "wanted an object added_tokens_decoder"),
        (b'{"added_tokens_decoder": []}', "wanted an object added_tokens_decoder"),
        (edited_config(id_1535="x"), "ids from 1536 to 1791.*found '1535'"),
        (edited_config(id_1792="x"), "ids from 1536 to 1791"),
        (edited_config(id_01536="x"), "ids from 1536 to 1791"),
        (edited_config(id_x="x"), "ids from 1536 to 1791"),
        (edited_config(id_1536=7), "1536 wants a content string"),
        (edited_config(id_1536=""), "1536 wants a content string"),
        (edited_config(id_1536="\ud800"), "1536 wants a content string"),
        (edited_config(id_1536="[EOS]"), r"ids 1536 and 1537 share the name '\[EOS\]'"),
        (edited_config(id_1536="<|reserved_token_1544|>"), "ids 1536 and 1544 share"),
        (edited_config(id_1536="x" * 257), "1536 has a name of 257 characters, wanted at most 256"),
        (b" " * ((4 << 20) + 1), "is larger than 4194304 bytes"),
    ],
)
def test_damaged_config_file(tmp_path, config, says):
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.load(written(tmp_path, config=config))
    assert str(caught.value).startswith(str(tmp_path / "tokenizer_config.json"))


def test_longest_names_of_every_control_token_load(tmp_path):
    long = {f"id_{n}": f"{n}{'é(' * 126}" for n in range(1536, 1792)}
    found = Tokenizer.load(written(tmp_path, config=edited_config(**long)))
    assert found.special(f"1791{'é(' * 126}") == 1791


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    path = written(tmp_path) / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(TokenizerError, match="cannot be read: it is not a regular file"):
        Tokenizer.load(tmp_path)


def test_missing_files(tmp_path):
    assert Tokenizer.load_optional(tmp_path) is None
    assert Tokenizer.load_optional(tmp_path / "nowhere") is None
    with pytest.raises(TokenizerError, match=r"tiktoken\.model cannot be read: No such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tiktoken.model").symlink_to(tmp_path / "gone")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load_optional(tmp_path)
    (tmp_path / "tiktoken.model").unlink()
    shutil.copy(TOKENIZER / "tiktoken.model", tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.load_optional(tmp_path)
    (tmp_path / "tiktoken.model").unlink()
    (tmp_path / "tiktoken.model").mkdir()
    with pytest.raises(TokenizerError, match="cannot be read: Is a directory"):
        Tokenizer.load_optional(tmp_path)
    with pytest.raises(TokenizerError, match="cannot be read: Not a directory"):
        Tokenizer.load_optional(TOKENIZER / "tiktoken.model")


any_model = st.one_of(
    st.binary(),
    st.lists(st.sampled_from([*LINES[:5], b"\n", b"zMzM 1536\n", b"x"])).map(
        lambda extra: MODEL + b"".join(extra)
    ),
    st.tuples(st.integers(0, len(MODEL)), st.integers(0, 9), st.binary(max_size=9)).map(
        lambda cut: MODEL[: cut[0]] + cut[2] + MODEL[cut[0] + cut[1] :]
    ),
)
any_config = st.one_of(
    st.just(CONFIG),
    st.binary(),
    st.dictionaries(
        st.sampled_from(["1536", "1791", "1535", "x"]),
        st.one_of(st.none(), st.text(), st.dictionaries(st.just("content"), st.text())),
    ).map(lambda names: json.dumps({"added_tokens_decoder": names}).encode()),
)


@settings(UNHURRIED, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=any_model, config=any_config)
def test_any_files_load_or_are_refused(tmp_path, model, config):
    try:
        tokenizer = Tokenizer.load(written(tmp_path, model, config))
    except TokenizerError as error:
        assert "\n" not in str(error)
    else:
        assert tokenizer.decode_bytes(tokenizer.encode("as ever")) == b"as ever"


def test_tiktoken_is_imported_only_to_load():
    code = "import sys, kimi_cli.tokenizer, kimi_cli.chat; sys.exit('tiktoken' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
