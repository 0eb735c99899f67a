"""GS020: captions are cut at the encoder's context.

Evidence   at least 30 % of the captions of the measured batches (or of the training split) are longer than the context.
Cause      long captions under a short context (77 tokens for CLIP): the rest is never read, and cut captions may become equal.
Silent     lengths not known to the probe nor in the provenance; fewer than ``least`` measured batches.
Mislead    a caption whose first sentence says it all loses little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradscope.rules import MEASURED, Finding, found, rules, where_measured
from gradscope.run_view import Evidence, Unmeasured, View


@rules.register("GS020")
@dataclass(frozen=True, kw_only=True)
class TruncatedCaptions:
    id: ClassVar[str] = "GS020"
    title: ClassVar[str] = "Captions are cut at the context"
    severity: ClassVar[str] = "warning"
    any_width: ClassVar[bool] = True
    elsewhere: ClassVar[str] = (
        "A text encoder with a longer context, shorter captions, or the sentence that tells pictures apart put first."
    )
    share: float = 0.3
    least: int = MEASURED

    def __call__(self, view: View) -> Finding | None:
        evidence = self._of_split(view) if "truncated_captions" in view.facts else self._of_batches(view)
        if evidence.value < self.share:
            return None
        return found(
            self,
            evidence,
            *where_measured(lambda: self._identical(view)),
            cause="What lies beyond the context is never read; captions that begin alike become the same caption.",
            action="An encoder with a longer context (--encoder longclip-L, 248 tokens), shorter captions (--caption short where a "
            "data set has them), or --on-too-long error to see which.",
            effect="The text tower sees what tells the captions apart.",
            verify="reading captions/truncated, or truncated_captions in provenance.json of the new run.",
        )

    def _of_split(self, view: View) -> Evidence:
        records = view.facts.get("data", {}).get("records")
        if not records:
            raise Unmeasured("the number of training records is not in the provenance")
        share = view.facts["truncated_captions"] / records
        return Evidence(what="share of training captions cut", value=share, unit="share", where="provenance.json, truncated_captions")

    def _of_batches(self, view: View) -> Evidence:
        window = view.reading("captions", "truncated").recent(self.least)
        return window.evidence("share of captions cut", window.mean() / view.known_width)

    def _identical(self, view: View) -> Evidence:
        window = view.reading("false_negatives", "same_tokens_cut").recent(self.least)
        return window.evidence(
            "captions whose tokens another one has, after the cut, under a different string", window.mean(), "captions"
        )
