"""The table and figure of analyses/softmax_width from the finished sweep: R@1 by width and gamma, and differences with intervals.

    python analyses/softmax_width/table.py runs/softmax_width

Means are over seeds; "seed sd" is their standard deviation. Differences are paired: per test query the hit at 1 is averaged over the
seeds of each arm, and the 95 % interval is a bootstrap over the test images. It covers the choice of test images, NOT the choice of
seeds: read it beside the seed sd.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from gradscope.figures.style import OBJECTIVE_COLOURS, new_figure, paper_style, save
from gradscope.metrics.bootstrap import paired_difference

DIRECTIONS = {"i2t": "image to text", "t2i": "text to image"}
ARMS = {"gamma 0": (0.0, "live"), "gamma .25": (0.25, "live"), "gamma .5": (0.5, "live"), "fixed .5": (0.5, "fixed")}


def load(folder: Path) -> pd.DataFrame:
    """A row per run and direction with its R@1 and the per-query hits."""
    rows = []
    for table in sorted(folder.glob("*/sweep.csv")):
        frame = pd.read_csv(table)
        for _, row in frame[frame["metric"] == "R@1"].iterrows():
            with np.load(Path(row["path"]) / "eval-test.npz") as stored:
                hits, image = stored[f"hit1_{row['direction']}"], stored[f"image_{row['direction']}"]
            arm = next(k for k, v in ARMS.items() if v == (row["objective.gamma"], row["objective.margin"]))
            rows.append({**row[["width", "seed", "direction", "value"]], "arm": arm, "hits": hits, "image": image})
    frame = pd.DataFrame(rows)
    seeds = frame.groupby(["width", "arm"])["seed"].agg(lambda s: tuple(sorted(set(s))))
    if seeds.nunique() != 1 or len(seeds) != len(ARMS) * frame["width"].nunique():
        raise SystemExit(f"the sweep is not complete; seeds by width and arm:\n{seeds.to_string()}")
    return frame


def differences(frame: pd.DataFrame, direction: str, a: tuple[int, str], b: tuple[int, str]) -> tuple[float, float, float]:
    """R@1 of a minus b in points, with its interval over test images; a and b are (width, arm)."""
    pick = lambda key: frame[(frame["width"] == key[0]) & (frame["arm"] == key[1]) & (frame["direction"] == direction)]  # noqa: E731
    first, second = pick(a), pick(b)
    found = paired_difference(np.mean(first["hits"].tolist(), axis=0), np.mean(second["hits"].tolist(), axis=0), first["image"].iloc[0])
    return 100 * found.value, 100 * found.low, 100 * found.high


def markdown(frame: pd.DataFrame) -> str:
    """Two tables: R@1 by arm, and the differences the hypothesis is about."""
    lines = ["| width | arm | image to text R@1 (seed sd) | text to image R@1 (seed sd) |", "|---|---|---|---|"]
    widths = sorted(frame["width"].unique())
    for width in widths:
        for arm in ARMS:
            cells = []
            for direction in DIRECTIONS:
                values = 100 * frame[(frame["width"] == width) & (frame["arm"] == arm) & (frame["direction"] == direction)]["value"]
                cells.append(f"{values.mean():.2f} ({values.std():.2f})")
            lines.append(f"| {width} | {arm} | {' | '.join(cells)} |")
    lines += ["", "| difference, points | image to text | text to image |", "|---|---|---|"]
    pairs = [((w, arm), (w, "gamma 0")) for w in widths for arm in ARMS if arm != "gamma 0"]
    pairs += [((w, "gamma 0"), (widths[0], "gamma 0")) for w in widths[1:]]
    pairs += [((widths[-1], "gamma 0"), (widths[0], arm)) for arm in ("gamma .25", "gamma .5")]
    for a, b in pairs:
        cells = ["{:+.2f} [{:+.2f}, {:+.2f}]".format(*differences(frame, d, a, b)) for d in DIRECTIONS]
        lines.append(f"| width {a[0]}, {a[1]} minus width {b[0]}, {b[1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(frame: pd.DataFrame, stem: Path) -> list[Path]:
    """R@1 against width, a line per arm, a dot per seed; one panel per direction."""
    shades = {
        "gamma 0": OBJECTIVE_COLOURS["infonce"],
        "gamma .25": "#56B4E9",
        "gamma .5": OBJECTIVE_COLOURS["hn"],
        "fixed .5": "#666666",
    }
    with paper_style():
        drawing = new_figure(width=6.75, height=2.4)
        panels = drawing.subplots(1, 2, sharey=True)
        for panel, (direction, title) in zip(panels, DIRECTIONS.items(), strict=True):
            for shift, (arm, colour) in enumerate(shades.items()):
                part = frame[(frame["direction"] == direction) & (frame["arm"] == arm)]
                mean = 100 * part.groupby("width")["value"].mean()
                places = np.log2(mean.index.to_numpy(float))
                panel.plot(places, mean, color=colour, label=arm.replace("gamma", "HN gamma") if arm != "gamma 0" else "InfoNCE")
                panel.plot(np.log2(part["width"].to_numpy(float)) + 0.05 * (shift - 1.5), 100 * part["value"], ".", color=colour, ms=4)
            panel.set_xticks(np.log2(sorted(frame["width"].unique())), [str(w) for w in sorted(frame["width"].unique())])
            panel.set_xlabel("candidates per softmax (width)")
            panel.set_title(title)
        panels[0].set_ylabel("R@1 on test, percent")
        panels[1].legend(frameon=False)
        return save(drawing, frame.drop(columns=["hits", "image"]), stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--figure", type=Path, default=Path("analyses/softmax_width/softmax_width"))
    given = parser.parse_args()
    frame = load(given.folder)
    print(markdown(frame))
    for path in figure(frame, given.figure):
        print(path)


if __name__ == "__main__":
    main()
