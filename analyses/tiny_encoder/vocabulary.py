"""A cut merges file for open_clip's ``SimpleTokenizer``: the merges our words need, and the most frequent stock ones.

Kept in rank order, a subset of the merges that holds every merge a word uses splits that word exactly as the full file does:
at each step the lowest-ranked pair of the full file is in the subset, and the subset adds no other. End-of-text stays the
largest id because the special tokens are appended after the last merge.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from random import Random

from open_clip.tokenizer import SimpleTokenizer, default_bpe, get_pairs
from simple import make_simple

from gradscope.data.scenes import describe, make_scene

ENTRIES = 1500


def words_in_use(samples: int = 20_000) -> set[str]:
    """Every word the grammar and the simple sentences bring up in many draws."""
    rng = Random("vocabulary")
    texts = (text for _ in range(samples) for text in (describe(make_scene(rng), rng), make_simple(rng)[1]))
    return {word for text in texts for word in re.findall(r"[a-z]+", text.lower())}


def merges_of(word: str, ranks: dict[tuple[str, ...], int]) -> set[tuple[str, str]]:
    """The merges that the full file applies to ``word``."""
    used: set[tuple[str, str]] = set()
    parts = (*word[:-1], word[-1] + "</w>")
    while len(parts) > 1:
        pair = min(get_pairs(parts), key=lambda p: ranks.get(p, len(ranks)))
        if pair not in ranks:
            break
        used.add(pair)
        merged: list[str] = []
        for part in parts:
            whole = bool(merged) and (merged[-1], part) == pair
            merged[-1:] = [merged[-1] + part] if whole else [*merged[-1:], part]
        parts = tuple(merged)
    return used


def write_merges(path: Path) -> int:
    """Write the cut file and return its number of merges."""
    stock = SimpleTokenizer()
    ranks = {pair: rank for pair, rank in stock.bpe_ranks.items() if len(pair) == 2}
    needed = set().union(*(merges_of(word, ranks) for word in sorted(words_in_use())))
    order = sorted(ranks, key=lambda pair: ranks[pair])
    frequent = [pair for pair in order if pair not in needed][: max(0, ENTRIES - len(needed))]
    kept = sorted(needed.union(frequent), key=lambda pair: ranks[pair])
    header = gzip.decompress(Path(default_bpe()).read_bytes()).decode().split("\n", 1)[0]
    text = "\n".join([header, *(" ".join(pair) for pair in kept)])
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return len(kept)
