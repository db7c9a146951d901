"""Damaged checkpoints through the installed command: file, tensor and offset, and no text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import kimi, linked_model, own_trunk, replace_file, sentence
from shim import faulty, spread
from streamed import Streamed

from kimi_cli.builtin import TINY
from kimi_cli.header import Entry, read_header
from kimi_cli.tensors import expert_prefix

Record = Callable[[str, object], None]

SHARD = "model-00002-of-000007.safetensors"
WORDS = ("--ids", "1,2,3", "-n", 6, "--ignore-eos", "--quiet")


def header(name: str = SHARD) -> dict[str, Entry]:
    return read_header(TINY / name)


def data(name: str = SHARD) -> bytearray:
    return bytearray((TINY / name).read_bytes())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return linked_model(tmp_path / "m")


def told(model: Path, code: int, *parts: str, repacked: bool = True) -> None:
    """`verify` finds it and `repack` refuses it with `code`; each says all of `parts`."""
    done = kimi("verify", "-m", model, check=5)
    text = done.stdout.decode()
    assert all(part in text for part in parts), text
    if repacked:
        text = sentence(kimi("repack", "-m", model, "--out", model.parent / "t", check=code))
        assert all(part in text for part in parts), text
        assert not (model.parent / "t" / "trunk.json").exists()


def refused(model: Path, code: int, *parts: str) -> None:
    """`generate` prints nothing but a sentence that says all of `parts`."""
    text = sentence(kimi("generate", "-m", model, *WORDS, check=code))
    assert all(part in text for part in parts), text


# ---- shards that are not what they were ----


@pytest.mark.fault("damage: a shard one byte, one page or one tensor short", "said, exit code 3")
@pytest.mark.parametrize("cut", ["byte", "page", "tensor"])
def test_a_short_shard(model: Path, cut: str) -> None:
    raw, last = data(), max(header().values(), key=lambda entry: entry.offset)
    size = {"byte": len(raw) - 1, "page": len(raw) - 4096, "tensor": last.offset}[cut]
    replace_file(model / SHARD, bytes(raw[:size]))
    name = next(n for n, e in header().items() if e.offset <= size < e.offset + e.length)
    layer = name.split("layers.")[1].replace(".", " ", 1)
    told(model, 3, SHARD, f"by {len(raw) - size:,} bytes", f"layer {layer}, at offset {size}")
    refused(model, 3, f"{SHARD} has size {size}, wanted {len(raw)}", "kimi verify -m")


@pytest.mark.fault("damage: a shard replaced by another of the same size", "said, exit code 3")
def test_another_shard_of_the_same_size(model: Path) -> None:
    raw = data()
    for name, entry in header().items():
        if "A_log" not in name:  # whose padding would tell
            place = slice(entry.offset, entry.offset + entry.length)
            raw[place] = raw[place][2:] + raw[place][:2]
    replace_file(model / SHARD, bytes(raw))
    told(model, 3, SHARD, "has another first data, last data", repacked=False)
    refused(model, 3, f"{SHARD} has checksum of its first data", "finds it damaged")


@pytest.mark.fault("damage: a flipped bit in a shard's header", "said, exit code 3")
@pytest.mark.parametrize(("offset", "bit"), [(0, 3), (9, 0), (700, 6)])
def test_a_flipped_bit_in_a_header(model: Path, offset: int, bit: int) -> None:
    raw = data()
    raw[offset] ^= 1 << bit
    replace_file(model / SHARD, bytes(raw))
    told(model, 3, SHARD)
    refused(model, 3, SHARD)


def edited(edit: Callable[[dict[str, dict[str, list[int]]]], None]) -> bytes:
    """The shard with another header of the same length."""
    raw = data()
    length = int.from_bytes(raw[:8], "little")
    parsed = json.loads(raw[8 : 8 + length])
    edit(parsed)
    text = json.dumps(parsed, separators=(",", ":")).encode()
    assert len(text) <= length
    return bytes(raw[:8]) + text.ljust(length) + bytes(raw[8 + length :])


@pytest.mark.fault("damage: two tensors sharing bytes", "said, exit code 3")
def test_two_tensors_share_bytes(model: Path) -> None:
    names = [expert_prefix(4, expert) + "w1.weight_packed" for expert in (0, 1)]

    def edit(found: dict[str, dict[str, list[int]]]) -> None:
        found[names[1]]["data_offsets"] = found[names[0]]["data_offsets"]

    replace_file(model / SHARD, edited(edit))
    told(model, 3, SHARD, f'"{names[1]}" overlaps the tensor before it: data offset ')
    refused(model, 3, SHARD, "header")


@pytest.mark.fault("damage: an expert that is missing", "said, exit code 3")
def test_a_missing_expert(model: Path) -> None:
    name = expert_prefix(4, 1)

    def edit(found: dict[str, dict[str, list[int]]]) -> None:
        for key in [key for key in found if key.startswith(name)]:
            found[key.replace("language_model", "mm_projector", 1)[:-1]] = found.pop(key)

    replace_file(model / SHARD, edited(edit))
    index = json.loads((TINY / "model.safetensors.index.json").read_text())
    for key in [key for key in index["weight_map"] if key.startswith(name)]:
        del index["weight_map"][key]
    replace_file(model / "model.safetensors.index.json", json.dumps(index).encode())
    told(model, 3, "layer 4 expert 1")
    refused(model, 3, SHARD, "header")


@pytest.mark.fault("damage: a shard that is a dangling link", "said, exit code 3")
def test_a_dangling_link(model: Path) -> None:
    (model / SHARD).unlink()
    (model / SHARD).symlink_to("../blobs/gone")
    told(model, 3, SHARD, "is a symbolic link to ../blobs/gone, which does not exist")
    refused(model, 3, f"{SHARD} is not there")


# ---- bytes that are not what they were ----


@pytest.mark.fault("damage: a scale byte of 255", "said where it is met, exit code 1 or 3")
def test_a_scale_of_255(model: Path) -> None:
    raw, places = data(), {}
    for name, entry in header().items():
        if name.endswith("w2.weight_scale"):
            middle = entry.offset + entry.length // 2
            if 1 << 17 < middle < len(raw) - (1 << 16):  # where no fingerprint sees it
                raw[middle], places[middle] = 255, name
    assert len(places) > 6  # enough for one to be chosen
    replace_file(model / SHARD, bytes(raw))
    done = kimi("generate", "-m", model, *WORDS, check=3)
    assert done.stdout.strip() == b""
    text = done.stderr.decode()
    assert SHARD in text and "scale byte 255 (NaN) at offset" in text
    offset = int(text.split("at offset ")[1].split(":")[0])
    assert places[offset] in text
    own_trunk(model)
    text = kimi("verify", "-m", model, "--deep", check=5).stdout.decode()
    assert f"{places[offset]}: scale byte 255 (NaN) at offset {offset}" in text


@pytest.mark.fault("damage: NaN or infinity in weights", "repack says where, exit code 3")
@pytest.mark.parametrize(("bits", "what"), [(b"\xc0\x7f", "NaN"), (b"\x80\xff", "infinity")])
def test_weights_that_are_no_numbers(model: Path, tmp_path: Path, bits: bytes, what: str) -> None:
    raw, name = data(), "language_model.model.layers.4.self_attn.q_proj.weight"
    offset = header()[name].offset + 2 * 100
    raw[offset : offset + 2] = bits
    replace_file(model / SHARD, bytes(raw))
    text = sentence(kimi("repack", "-m", model, "--out", tmp_path / "t", check=3))
    assert text.startswith(
        f"{model / SHARD}: {name} has {what} at element 100, offset {offset}: the file is "
        "damaged, run hf download"
    )
    assert not (tmp_path / "t" / "trunk.json").exists()


# ---- while it runs ----


def ends(out: bytes, good: bytes) -> None:
    """What was printed is the beginning of what is right, and nothing after it."""
    assert out.endswith(b"\n") or not out
    assert good.startswith(out.rstrip(b"\n")), out


@pytest.mark.fault(
    "damage: an I/O error in any read of a run",
    "file, tensor and offset are named, the text ends, exit code 1 (3 while it is opened)",
)
def test_an_io_error_in_any_read(
    tmp_path: Path, streamed: Streamed, long: bool, record_property: Record
) -> None:
    fired, place = tmp_path / "fired", streamed.model.parent
    _, calls = faulty(fired, f"read {place} 1+ none", *streamed.words)
    assert len(calls) > 300
    met, chosen = set(), spread(len(calls), 60 if long else 8)
    for number in chosen:
        done, hit = faulty(fired, f"read {place} {number} EIO", *streamed.words, check=None)
        said, name = done.stderr.decode(), Path(hit[0][1]).name
        ends(done.stdout, streamed.good)
        if done.returncode == 0:  # the first read of a file only asks whether it can be direct
            assert done.stdout == streamed.good and said == ""
            continue
        assert said.count("\n") == 1 and said.startswith("kimi: ") and name in said, said
        assert "Input/output error" in said
        if done.returncode == 1:  # in the middle: which bytes of it, and what they are
            assert re.search(r": reading \d+ bytes of \S.* at \d+ failed: ", said), said
            met.add(name)
        else:
            assert done.returncode == 3, said
    assert len(met) > 1
    record_property("tried", len(chosen))


@pytest.mark.fault(
    "damage: a file that shrinks while it is read", "said, the text ends, exit code 1"
)
@pytest.mark.parametrize("name", ["layer-000.safetensors", "model-00002-of-000002.safetensors"])
def test_a_file_that_shrinks(streamed: Streamed, tmp_path: Path, name: str) -> None:
    model = Path(shutil.copytree(streamed.model, tmp_path / "m"))
    path = next(path for path in (model / name, model / "kimi-trunk" / name) if path.exists())
    words = ("generate", "-m", model, *streamed.words[3:])
    done, hit = faulty(tmp_path / "fired", f"read {name} 30 cut", *words, check=1)
    assert hit == [("read", str(path))]
    ends(done.stdout, streamed.good)
    said = done.stderr.decode()
    assert said.startswith(f"kimi: {path}: ends at byte ") and said.count("\n") == 1
    assert re.search(r"wanted \d+ bytes of \S.* at \d+: the file has been cut short$", said), said


@pytest.mark.fault("damage: a flipped bit in a trunk block that is streamed", "said, exit code 1")
def test_a_flipped_bit_in_a_streamed_block(streamed: Streamed, tmp_path: Path) -> None:
    trunk = Path(shutil.copytree(streamed.model / "kimi-trunk", tmp_path / "t"))
    path = trunk / "layer-000.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    done = kimi(*streamed.words, "--trunk", trunk, check=1)
    assert done.stdout.strip() == b""
    said = done.stderr.decode()
    assert re.search(
        r"layer-000\S+: damaged between bytes \d+ and \d+ \(.*mlp\..*\): checksum", said
    )


@pytest.mark.fault(
    "system calls: reads and writes that come short or are interrupted", "the same text and files"
)
@pytest.mark.parametrize("effect", ["short", "EINTR"])
def test_calls_that_do_less_than_asked(
    tmp_path: Path, streamed: Streamed, effect: str, record_property: Record
) -> None:
    fired, rules = tmp_path / "fired", f"read * %2 {effect}; write * %2 {effect}"
    session, logits, trace = (tmp_path / name for name in ("s", "l.npy", "t.jsonl"))
    outputs = ("--logits", logits, "--trace", trace)
    kimi(*streamed.words, *outputs)
    files = [path.read_bytes() for path in (logits, trace)]
    done, count = faulty(
        fired, rules, *streamed.words, *outputs, "--session", session, "--save-every", 2
    )
    assert done.stdout == streamed.good
    assert [path.read_bytes() for path in (logits, trace)] == files
    done, more = faulty(fired, rules, "session", session)
    assert b"answer 8, not finished" in done.stdout
    faulty(fired, rules, "repack", "-m", TINY, "--out", tmp_path / "t", "--quiet")
    for path in (TINY / "kimi-trunk").glob("*.safetensors"):
        assert (tmp_path / "t" / path.name).read_bytes() == path.read_bytes()
    assert not [*tmp_path.rglob("*.tmp"), *tmp_path.rglob("*.part")]
    record_property("tried", len(count) + len(more))
