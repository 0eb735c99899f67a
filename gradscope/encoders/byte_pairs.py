"""CLIP's byte pairs, remembered: caption -> ids, equal to open_clip's ``SimpleTokenizer.encode``.

No token spans a space once a caption is cleaned, so a caption is the sum of the pieces between its spaces, and pieces come back:
each is split into words and merged when it is first met, then looked up. Cleaning (repair of wrongly decoded text, HTML entities,
width of characters) changes nothing in printable ASCII without "&" but its case, so it is left out there; such are nearly all
English captions.

A word of any length costs O(n log n) where the plain merge costs O(n^2), so a caption of two million characters takes seconds, not
days. Pieces of many ids are not remembered (text without spaces is one piece, which hardly comes back), and all are forgotten when
there are ``REMEMBERED`` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from typing import Any

#: Pieces, and words, whose ids are remembered, and the most ids of one: 90 MB for words of random letters, some 150 MB at worst.
REMEMBERED, MOST_IDS = 200_000, 16


class Remembered(dict[str, list[int]]):
    """Piece -> ids, from ``find`` when it is first asked for."""

    def __init__(self, find: Callable[[str], list[int]]) -> None:
        super().__init__()
        self.find = find

    def __missing__(self, piece: str) -> list[int]:
        found = self.find(piece)
        if len(found) <= MOST_IDS:
            if len(self) >= REMEMBERED:
                self.clear()
            self[piece] = found
        return found


class BytePairs:
    """
    Args:
        source: open_clip's ``SimpleTokenizer``: its cleaning, pattern, merges and ids.
    """

    def __init__(self, source: Any) -> None:
        from open_clip.tokenizer import get_clean_fn

        self.source = source
        self.special = frozenset(source.all_special_ids)
        self.words = Remembered(self._word)
        self.pieces = Remembered(self._piece)
        self.by_piece = len(source.all_special_ids) == 2  # further special tokens are patterns, which may span spaces
        self.lowers = self.by_piece and source.clean_fn is get_clean_fn("lower")

    def encode(self, caption: str) -> list[int]:
        """The words' ids, without start and end."""
        plain = self.lowers and caption.isascii() and caption.isprintable() and "&" not in caption
        clean = caption.lower() if plain else self.source.clean_fn(caption)
        if not self.by_piece:
            return self._piece(clean)
        return list(chain.from_iterable(map(self.pieces.__getitem__, clean.split())))

    def _piece(self, piece: str) -> list[int]:
        return list(chain.from_iterable(map(self.words.__getitem__, self.source.pat.findall(piece))))

    def _word(self, word: str) -> list[int]:
        encoder = self.source.encoder
        if encoder.get(word) in self.special:
            return [encoder[word]]
        symbols = [self.source.byte_encoder[byte] for byte in word.encode("utf-8")]
        symbols[-1] += "</w>"
        return [encoder[symbol] for symbol in merge(symbols, self.source.bpe_ranks)]


def merge(symbols: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Byte-pair merging of one word: always the pair of lowest rank, all its occurrences from left to right.

    A heap of (rank, position) over a linked list of symbols: O(n log n). New pairs wait for the end of their round, as they do in
    the plain loop, because a merge learned twice could otherwise overtake its own round.
    """
    parts: list[str | None] = list(symbols)
    after = list(range(1, len(parts) + 1))
    before = list(range(-1, len(parts) - 1))
    heap = [(rank, i) for i, pair in enumerate(pairwise(symbols)) if (rank := ranks.get(pair)) is not None]
    heapify(heap)
    while heap:
        rank, merged = heap[0][0], []
        while heap and heap[0][0] == rank:
            i = heappop(heap)[1]
            j = after[i]
            left, right = parts[i], parts[j] if j < len(parts) else None
            if left is None or right is None or ranks.get((left, right)) != rank:
                continue
            parts[i], parts[j] = left + right, None
            after[i] = after[j]
            if after[i] < len(parts):
                before[after[i]] = i
            merged.append(i)
        for i in merged:
            for a, b in ((before[i], i), (i, after[i])):
                if a >= 0 and b < len(parts) and (found := ranks.get((parts[a], parts[b]))) is not None:  # type: ignore[arg-type]
                    heappush(heap, (found, a))
    return [part for part in parts if part is not None]
