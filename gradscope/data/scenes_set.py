"""The registered data set ``scenes``: procedural pictures with long captions, made on first use into the cache folder."""

from __future__ import annotations

from dataclasses import dataclass

from gradscope.data import data_sets
from gradscope.data.source import DataSource
from gradscope.paths import cache_folder


@data_sets.register("scenes")
@dataclass(frozen=True, kw_only=True)
class Scenes:
    """Sizes of the splits and the seed that makes them."""

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
        return DataSource(name="scenes", folder=folder)
