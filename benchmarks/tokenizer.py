"""How fast captions become token ids, against open_clip's own tokenizer, with ids compared one by one.

    python benchmarks/tokenizer.py --output runs/bench_tokenizer                       # captions of scenes, drawn on the fly
    python benchmarks/tokenizer.py captions.json --output runs/bench_tokenizer         # a JSON list of strings, or of {"caption": ...}

Arms, each over all captions, on one thread:
    open_clip warm    its tokenizer, every word met before: the reference
    open_clip cold    a new tokenizer
    ours warm, cold   the same of `gradscope.encoders.tokenizer`
    ours cached       digest of tokenizer and captions, and the ids from the file (`gradscope.encoders.token_cache`), in a new tokenizer

How to read it: a training run meets ``cold`` once, and ``cached`` from the second time. Building the tokenizer (reading merges) is in
none of them. It stops if one id of one caption differs from open_clip's. How it can mislead: ``cold`` depends on how many different
words there are, so it flatters long lists; generated captions have few words, real ones more.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from side_by_side import Arm, machine, report, say_machine, side_by_side

from gradscope.encoders import token_cache
from gradscope.encoders.tokenizer import ClipTokenizer

REFERENCE = "open_clip warm"


def captions_of(files: Sequence[Path], count: int) -> list[str]:
    """Raises ValueError for a file that holds no captions."""
    found = [caption for file in files for caption in _read(file)] if files else _scenes(count)
    return found[:count]


def _read(file: Path) -> list[str]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return [row if isinstance(row, str) else str(row["caption"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{file}' is no JSON list of captions ({error}); give strings, or objects with a caption") from error


def _scenes(count: int) -> list[str]:
    from gradscope.data.scenes_grammar import scenes_of_split
    from gradscope.data.scenes_words import describe

    return [describe(scene, random.Random(number)) for number, (_, scene) in enumerate(scenes_of_split(0, "test", count))]


def arms(captions: Sequence[str], context: int) -> dict[str, Arm]:
    """A cold arm forgets first, which takes next to nothing."""
    from open_clip.tokenizer import SimpleTokenizer

    theirs, ours = SimpleTokenizer(context_length=context), ClipTokenizer.of(SimpleTokenizer(context_length=context))
    warm_theirs, warm_ours = SimpleTokenizer(context_length=context), ClipTokenizer.of(SimpleTokenizer(context_length=context))
    met = dict(theirs.cache)

    def cold_theirs() -> None:
        theirs.cache = dict(met)
        theirs(captions)

    def cold_ours() -> None:
        _forget(ours)
        ours.tokenize(captions)

    def cached_ours() -> None:
        _forget(ours)
        token_cache.tokenize_once(ours, captions)

    return {
        REFERENCE: lambda: warm_theirs(captions),
        "open_clip cold": cold_theirs,
        "ours warm": lambda: warm_ours.tokenize(captions),
        "ours cold": cold_ours,
        "ours cached": cached_ours,
    }


def _forget(tokenizer: ClipTokenizer) -> None:
    tokenizer.pairs.words.clear()
    tokenizer.pairs.pieces.clear()
    tokenizer.__dict__.pop("identity", None)


def compare(captions: Sequence[str], context: int) -> dict[str, Any]:
    """Facts about the captions. Raises ValueError where an id differs from open_clip's, in the tokenizer or in the file."""
    from open_clip.tokenizer import SimpleTokenizer

    source = SimpleTokenizer(context_length=context)
    tokenizer, expected = ClipTokenizer.of(source), source(captions)
    for found in (
        tokenizer.tokenize(captions),
        token_cache.tokenize_once(tokenizer, captions),
        token_cache.tokenize_once(tokenizer, captions),
    ):
        wrong = (found.ids != expected).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(f"{len(wrong)} captions have other ids than open_clip's, the first: {captions[wrong[0]]!r}")
    lengths = found.lengths.double()
    return {
        "captions": f"{len(captions):,}, {float(lengths.mean()):.0f} tokens on average, {found.truncated():,} longer than {context}",
        "ids": "equal to open_clip's, every one, tokenized and from the file",
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Captions per second.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="JSON lists of captions; none: captions of scenes")
    parser.add_argument("--output", type=Path, default=Path("runs/bench_tokenizer"), help="folder for CSV and JSON")
    parser.add_argument("--count", type=int, default=20_000, help="captions at most")
    parser.add_argument("--context", type=int, default=248)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    if min(given.count, given.rounds) < 1 or given.context < 3:
        raise ValueError("give at least 1 caption, 1 round and a context of 3")
    torch.set_num_threads(1)
    facts = machine()
    say_machine(facts)
    captions = captions_of(given.files, given.count)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRADSCOPE_CACHE"] = folder  # an entry of its own, gone afterwards
        token_cache.WORTHWHILE = 1
        notes = compare(captions, given.context)
        frame = side_by_side(arms(captions, given.context), reference=REFERENCE, rounds=given.rounds)
    seconds = dict(zip(frame["arm"], frame["seconds"], strict=True))
    notes["captions/s"] = ", ".join(f"{arm} {len(captions) / took:,.0f}" for arm, took in seconds.items())
    notes["cold against open_clip cold"] = f"{seconds['ours cold'] / seconds['open_clip cold']:.3f}"
    report(frame, title="captions to ids", output=given.output, name="tokenizer", facts=facts, notes=notes)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"tokenizer: {error}", file=sys.stderr)
        sys.exit(2)
