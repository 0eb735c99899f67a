"""The registered data set ``scenes``: procedural pictures with long captions, made on first use into the cache folder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from gradscope.data import data_sets
from gradscope.data.info import DataInfo
from gradscope.data.own_files import OwnFiles
from gradscope.data.source import DataSource
from gradscope.paths import cache_folder


@data_sets.register("scenes")
@dataclass(frozen=True, kw_only=True)
class Scenes:
    """Sizes of the splits and the seed that makes them."""

    info: ClassVar[DataInfo] = DataInfo(
        title="Procedural scenes with captions of 60 to 110 words, in families of near-twins",
        homepage="the generator is part of gradscope (gradscope/data/scenes.py)",
        licence="CC0-1.0 (generated)",
        citation="gradscope, data set 'scenes'",
        layout=("nothing: drawn on first use",),
        how="it is drawn on first use",
        counts={"train": 4000, "val": 400, "test": 2000},
    )

    seed: int = 0
    train: int = 4000
    val: int = 400
    test: int = 2000

    def open(self) -> DataSource:
        from gradscope.console import progress
        from gradscope.data.scenes import materialise

        with progress(f"drawing scenes (once, into {cache_folder() / 'data'})") as advance:
            folder = materialise(
                cache_folder() / "data", seed=self.seed, train=self.train, val=self.val, test=self.test, progress=advance
            )
        return dataclasses.replace(OwnFiles(path=str(folder)).open(), name="scenes")
