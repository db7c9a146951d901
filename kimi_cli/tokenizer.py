"""The checkpoint's tokenizer: text to token ids, and ids back to bytes.

Control tokens never come out of text here: `encode` sees ordinary bytes only, and whoever wants a
control token asks for it by name. tiktoken is imported when a tokenizer is loaded, not before.
"""

from __future__ import annotations

import binascii
import codecs
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_cli.errors import TokenizerError, UsageError
from kimi_cli.jsonfile import parse_json
from kimi_cli.regular import open_regular

if TYPE_CHECKING:
    import tiktoken

SPECIALS = 256  # special ids, directly after the ranks

_SLICE = 400_000  # characters encoded at once
_RUN = 25_000  # longest run of one str.isspace() class within a slice
_MOST_RANKS = 1 << 20  # six times the released vocabulary: a larger rank is damage
_LONGEST_LINE = 1 << 14  # bytes of one line of tiktoken.model
_LONGEST_NAME = 256  # characters of a control token's name: all of them become one pattern
_MOST_CONFIG = 4 << 20  # bytes of tokenizer_config.json

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# str.isspace() and \s agree on every character, so these are the reference's two classes.
_CLASS_RUN = re.compile(r"\s+|\S+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_SURROGATE_LOST = re.compile("[\ud800-\udc7f\udd00-\udfff]")
_ESCAPED_BYTES = re.compile("([\udc80-\udcff]+)")


class Tokenizer:
    """The vocabulary of one checkpoint. Immutable once loaded; threads may share it.

    Ids 0 to ranks - 1 are byte sequences, the `SPECIALS` ids after them are control tokens.
    """

    def __init__(
        self, encoding: tiktoken.Encoding, special_ids: dict[str, int], source: Path
    ) -> None:
        """Wrap an `encoding` whose last ids are `special_ids` (by name), as `source` names them."""
        self._encoding = encoding
        self._source = source
        self._special_ids = special_ids
        self.vocab_size = max(special_ids.values()) + 1
        self._first_special = self.vocab_size - len(special_ids)
        self.end_ids = frozenset(
            special_ids[name] for name in ("[EOS]", "<|end_of_msg|>") if name in special_ids
        )

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read `tiktoken.model` and `tokenizer_config.json` of `model_dir`.

        Raises TokenizerError when either is missing, unreadable or not what it should be.
        """
        source = model_dir / "tokenizer_config.json"
        ranks = _read_ranks(model_dir / "tiktoken.model")
        special_ids = _read_special_ids(source, len(ranks))
        import tiktoken

        encoding = tiktoken.Encoding(
            "kimi-k3", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens=special_ids
        )
        # The encoder works on its own copy; it keeps this one alive only to be pickled.
        ranks.clear()
        return cls(encoding, special_ids, source)

    @classmethod
    def load_optional(cls, model_dir: Path) -> Tokenizer | None:
        """As `load`, but None when there is no `tiktoken.model` at all.

        A dangling link or an unreadable file is still a TokenizerError.
        """
        try:
            (model_dir / "tiktoken.model").lstat()
        except FileNotFoundError:
            return None
        except OSError:
            pass  # load says what is wrong with it
        return cls.load(model_dir)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as ordinary text: no BOS, no control token, whatever it spells.

        Any str will do. A byte of a command line that was not UTF-8 (a surrogate of Python's
        surrogateescape) becomes that byte's own token, so that `decode_bytes` returns it; any
        other lone surrogate becomes U+FFFD.
        """
        ids: list[int] = []
        for piece in _cut(_mend(text)):
            for part in _ESCAPED_BYTES.split(piece):
                if _ESCAPED_BYTES.match(part):
                    for value in part.encode("ascii", "surrogateescape"):
                        ids.append(self._encoding.encode_single_token(bytes((value,))))
                elif part:
                    ids += self._encoding.encode_ordinary(part)
        return ids

    def special(self, name: str) -> int:
        """Id of the control token called `name`; TokenizerError when there is none."""
        if name not in self._special_ids:
            raise TokenizerError(
                f"{self._source} names no control token {shown(name)}: wanted it in "
                f"added_tokens_decoder, found {len(self._special_ids)} others"
            )
        return self._special_ids[name]

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is one of the control tokens."""
        return self._first_special <= token_id < self.vocab_size

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes `ids` stand for; a control token stands for its name in UTF-8.

        Raises UsageError for an id outside the vocabulary.
        """
        return b"".join(self._token_bytes(token_id) for token_id in ids)

    def _token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(
                f"token id {token_id} is outside the vocabulary: wanted 0 to {self.vocab_size - 1}"
            )
        return self._encoding.decode_single_token_bytes(token_id)


class TextStream:
    """Text of ids that arrive one at a time, never a part of a character. For one thread.

    Bytes that cannot become UTF-8 turn into U+FFFD, as in `bytes.decode(errors="replace")`: the
    pieces joined are what decoding all the bytes at once would give.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, perhaps empty; UsageError as in `decode_bytes`."""
        return self._decoder.decode(self._tokenizer.decode_bytes((token_id,)))

    def finish(self) -> str:
        """The rest: U+FFFD where a character was left unfinished. The stream starts afresh."""
        return self._decoder.decode(b"", final=True)


def _mend(text: str) -> str:
    """`text` whose only surrogates are escaped bytes that are no part of valid UTF-8."""
    if not _SURROGATE.search(text):
        return text
    text = _SURROGATE_PAIR.sub(
        lambda pair: pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text
    )
    text = _SURROGATE_LOST.sub("\ufffd", text)
    # Under an ASCII locale a valid character arrives as several escaped bytes: join those.
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def _cut(text: str) -> Iterator[str]:
    """The pieces of `text` that are encoded one by one, cut as the reference cuts them."""
    for begin in range(0, len(text), _SLICE):
        part = text[begin : begin + _SLICE]
        start = 0
        for run in _CLASS_RUN.finditer(part):
            for cut in range(run.start() + _RUN, run.end(), _RUN):
                yield part[start:cut]
                start = cut
        yield part[start:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank; the ranks are 0 to n - 1 in any order, blank lines mean nothing."""
    ranks: dict[bytes, int] = {}
    seen = bytearray()  # by rank
    try:
        with open_regular(path) as file:
            for number in itertools.count(1):
                line = file.readline(_LONGEST_LINE)
                if not line:
                    break
                if line.isspace():
                    continue
                token, rank = _parse_line(line, f"{path} line {number}")
                if token in ranks:
                    raise TokenizerError(
                        f"{path} line {number} repeats the token of rank {ranks[token]}: "
                        f"wanted every token once, found it with rank {rank} too"
                    )
                if rank >= len(seen):
                    seen.extend(bytes(rank + 1 - len(seen)))
                if seen[rank]:
                    raise TokenizerError(
                        f"{path} line {number} repeats rank {rank}: wanted every rank once"
                    )
                seen[rank] = 1
                ranks[token] = rank
    except OSError as error:
        raise _unreadable(path, error) from error
    if not ranks:
        raise TokenizerError(f"{path} is empty: wanted one token and its rank a line, found none")
    if len(ranks) != len(seen):
        raise TokenizerError(
            f"{path} has no token of rank {seen.index(0)}: wanted every rank from 0 to "
            f"{len(seen) - 1}, found {len(ranks)} of them"
        )
    for value in range(256):
        if bytes((value,)) not in ranks:
            raise TokenizerError(
                f"{path} has no token for the single byte 0x{value:02x}: wanted all 256"
            )
    return ranks


def _parse_line(line: bytes, where: str) -> tuple[bytes, int]:
    """One line's token and rank; `where` names the line in what TokenizerError says."""
    fields = line.split()
    if len(fields) != 2:
        raise TokenizerError(
            f"{where} is malformed: wanted a base64 token, a space and a rank, "
            f"found {shown(line.strip())}"
        )
    try:
        token = binascii.a2b_base64(fields[0])
    except binascii.Error:
        token = b""
    # The decoder skips what is not base64; only what encodes back to the same field was base64.
    if binascii.b2a_base64(token, newline=False) != fields[0]:
        raise TokenizerError(f"{where}: wanted a token in base64, found {shown(fields[0])}")
    if not fields[1].isdigit() or len(fields[1]) > 9 or int(fields[1]) >= _MOST_RANKS:
        raise TokenizerError(
            f"{where}: wanted a rank from 0 to {_MOST_RANKS - 1}, found {shown(fields[1])}"
        )
    return token, int(fields[1])


def _read_special_ids(path: Path, first: int) -> dict[str, int]:
    """Name to id of the special ids from `first` on, by `added_tokens_decoder` of the config."""
    try:
        with open_regular(path) as file:
            raw = file.read(_MOST_CONFIG + 1)
        if len(raw) > _MOST_CONFIG:
            raise TokenizerError(f"{path} is larger than {_MOST_CONFIG} bytes")
        config: Any = parse_json(raw)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise TokenizerError(f"{path} is {error}") from error
    added = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(added, dict):
        raise TokenizerError(f"{path}: wanted an object added_tokens_decoder, found none")
    names = {
        token_id: f"<|reserved_token_{token_id}|>" for token_id in range(first, first + SPECIALS)
    }
    known = {str(token_id): token_id for token_id in names}
    for key, entry in added.items():
        if key not in known:
            raise TokenizerError(
                f"{path}: added_tokens_decoder wants ids from {first} to {first + SPECIALS - 1}, "
                f"which follow the ranks of tiktoken.model, found {shown(key)}"
            )
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content or _SURROGATE.search(content):
            raise TokenizerError(
                f"{path}: added_tokens_decoder {key} wants a content string, found none"
            )
        if len(content) > _LONGEST_NAME:
            raise TokenizerError(
                f"{path}: added_tokens_decoder {key} has a name of {len(content)} characters, "
                f"wanted at most {_LONGEST_NAME}"
            )
        names[known[key]] = content
    special_ids: dict[str, int] = {}
    for token_id, name in names.items():
        if name in special_ids:
            raise TokenizerError(
                f"{path}: ids {special_ids[name]} and {token_id} share the name {shown(name)}: "
                "wanted one id a name"
            )
        special_ids[name] = token_id
    return special_ids


def _unreadable(path: Path, error: OSError) -> TokenizerError:
    return TokenizerError(f"{path} cannot be read: {error.strerror or error}")


def shown(value: str | bytes) -> str:
    """`value` as a sentence can hold it: quoted, escaped, at most 40 characters of it."""
    return ascii(value[:40]) + ("..." if len(value) > 40 else "")
