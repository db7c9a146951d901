"""A byte-pair vocabulary, trained on counted words and written as `tiktoken.model`.

Words are cut as the checkpoint's own pattern cuts ASCII text; ranks are the 256 bytes, then the
merges in the order in which they were made.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path

from kimi_cli.builtin import TINY

RANKS = 2048
SPECIALS = 256
VOCAB = RANKS + SPECIALS

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORD = re.compile(
    rf"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+{_SUFFIX}|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*{_SUFFIX}"
    r"|[0-9]{1,3}| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def count_words(text: str) -> Counter[str]:
    """How often each piece that is tokenised on its own occurs in ASCII `text`."""
    if not text.isascii():
        raise ValueError("the pattern here is the checkpoint's for ASCII text only")
    return Counter(_WORD.findall(text))


def train_ranks(words: Mapping[str, int], ranks: int = RANKS) -> list[bytes]:
    """`ranks` tokens by rank: the bytes, then the most frequent pair again and again (the smaller
    pair of bytes strings where two are equally frequent)."""
    tokens = [bytes((value,)) for value in range(256)]
    split = {word: [bytes((b,)) for b in word.encode()] for word in words}
    pairs: Counter[tuple[bytes, bytes]] = Counter()
    where: defaultdict[tuple[bytes, bytes], set[str]] = defaultdict(set)

    def count(word: str, sign: int) -> None:
        parts = split[word]
        for pair in pairwise(parts):
            pairs[pair] += sign * words[word]
            changed.add(pair)
            if sign > 0:
                where[pair].add(word)

    changed: set[tuple[bytes, bytes]] = set()
    for word in words:
        count(word, 1)
    heap = [(-number, pair) for pair, number in pairs.items()]
    heapify(heap)
    known = set(tokens)
    while len(tokens) < ranks:
        number, best = heappop(heap)
        if -number != pairs[best]:
            continue  # an entry of before its count changed
        joined = best[0] + best[1]
        changed.clear()
        for word in where.pop(best):
            count(word, -1)
            split[word] = _merge(split[word], best)
            count(word, 1)
        pairs.pop(best)
        changed.discard(best)
        for pair in changed:
            heappush(heap, (-pairs[pair], pair))
        if joined not in known:
            known.add(joined)
            tokens.append(joined)
    return tokens


def _merge(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    n = 0
    while n < len(parts):
        if n + 1 < len(parts) and (parts[n], parts[n + 1]) == pair:
            out.append(parts[n] + parts[n + 1])
            n += 2
        else:
            out.append(parts[n])
            n += 1
    return out


def encode_word(word: bytes, rank: Mapping[bytes, int]) -> list[int]:
    """Ids of one piece, by definition: join the pair of lowest rank until none is left."""
    parts = [bytes((value,)) for value in word]
    while True:
        joins = [(rank[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in rank]
        if not joins:
            return [rank[part] for part in parts]
        n = min(joins)[1]
        parts[n : n + 2] = [parts[n] + parts[n + 1]]


def encode_plain(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Ids of ASCII `text`, slowly: what the checkpoint's tokenizer is held against."""
    rank = {token: n for n, token in enumerate(tokens)}
    return [i for word in _WORD.findall(text) for i in encode_word(word.encode(), rank)]


def write_tokenizer(out_dir: Path, tokens: list[bytes]) -> None:
    """Writes tiktoken.model and tokenizer_config.json, the special ids after the ranks."""
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (out_dir / "tiktoken.model").write_text("".join(lines), "ascii")
    config = json.loads((TINY / "tokenizer_config.json").read_text("utf-8"))
    named = config["added_tokens_decoder"]
    first = min(map(int, named))
    config["added_tokens_decoder"] = {
        str(int(key) - first + len(tokens)): entry for key, entry in named.items()
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
