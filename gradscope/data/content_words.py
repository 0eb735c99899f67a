"""The words of an English caption that say what it shows: lower-cased, each once, without the words every caption has.

How it can mislead: the list of words left out is ours and English; numbers stay, word forms are not joined (tree, trees).
"""

from __future__ import annotations

import re

# Prepositions of place and nouns of the genre ("image", "photo") are in nearly every dense caption, so they are here too.
_COMMON = """
a about above across after against all along also among an and another any are around as at away back be because been before
behind being below beneath beside between both but by can close could day do does down during each either every far few for
from front further had has have he her here him his how if image in inside into is it its itself just left less like little
made many more most much near next no nor not of off on one only onto or other others out outside over part photo picture
quite right seen several she should side slightly so some such than that the their them then there these they this those three
through to together top toward towards two under up upon very view visible was were what when where which while who will with
within without would you
"""
STOP_WORDS = frozenset(_COMMON.split())
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


def content_words(text: str) -> list[str]:
    """Lower-cased words of ``text`` in order, each once, without STOP_WORDS."""
    words = (word.lower() for word in _WORD.findall(text))
    return list(dict.fromkeys(word for word in words if word not in STOP_WORDS))
