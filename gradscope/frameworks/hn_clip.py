"""The paper's full objective as a preset: clip + hn with gamma .5 and the live margin + token weight 1 (HN-CLIP, section 2)."""

from __future__ import annotations

from typing import Any

from gradscope.frameworks import frameworks

#: The settings the preset fixes; the recipe refuses a contradicting flag.
PRESET: dict[str, Any] = {"objective": "hn", "gamma": 0.5, "token_weight": 1.0}

frameworks.register("hn_clip")(PRESET)
