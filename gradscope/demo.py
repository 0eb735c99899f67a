"""The main job in one go: start widths, the InfoNCE arm, the HN arm, evaluation, Figures 1 and 4, a verdict.

Both arms: encoder tiny on scenes, the paper's 16 x 8 with narrow softmaxes, one seed, the probe at every step. It shows how the tool
reads; one seed on a toy is not evidence about real data.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradscope.console import console, out, progress
from gradscope.recipe import Recipe, resolve

WIDTHS = (16, 32, 64, 128)
#: Random training records whose batches show the start at each width: 128 batches of 16, 16 batches of 128.
START_RECORDS = 2048


@dataclass(frozen=True, kw_only=True)
class Arms:
    """R@1 of the start and both arms on test, and HN minus InfoNCE on the same queries; by direction."""

    recall: dict[str, dict[str, tuple[float, float, float]]]  # arm -> direction -> value, low, high
    gain: dict[str, tuple[float, float, float]]


def recipe(objective: str, epochs: int, lr: float, seed: int) -> Recipe:
    """One arm of the demo."""
    tables = {
        "objective": {"name": objective},
        "train": {"epochs": epochs, "batch_size": 16, "accumulate": 8, "accumulate_mode": "narrow", "lr": lr, "seed": seed},
        "probe": {"log_grads": True, "every": 1},
    }
    return resolve(tables, {})


def run(output: Path, *, epochs: int, lr: float, seed: int) -> None:
    """Everything into ``output``; each part says what it is doing. Raises ValueError if the folder holds a demo already."""
    from gradscope.train import train

    if (output / "infonce").exists():
        raise ValueError(f"'{output}' holds a demo already; give another --output or remove it")
    began = time.perf_counter()
    start = _start(output)
    for name in ("infonce", "hn"):
        console.rule(f"{name} arm")
        train(recipe(name, epochs, lr, seed), output / name)
    console.rule("evaluation")
    arms = _evaluate(output)
    files = _figures(output)
    _report(output, start, arms, files, time.perf_counter() - began)


def _start(output: Path) -> Any:
    """The width table and figure, and the caption geometry of the test split, all with the untrained weights."""
    from gradscope.caption_geometry import measure_captions
    from gradscope.cpu_speed import cpu_speed
    from gradscope.data.captions import read_captions
    from gradscope.data.source import open_data
    from gradscope.encoders.load import load_encoder, resolve_device
    from gradscope.encoders.text import load_text_encoder
    from gradscope.figures.style import save
    from gradscope.figures.width_start import start_widths as draw
    from gradscope.start_widths import start_widths

    console.rule("the same start at several widths")
    records = open_data("scenes").records("train")
    device = resolve_device("auto")
    encoder = load_encoder("tiny", device)
    with cpu_speed(device, encoder.longest_sequence), progress("embedding") as advance:
        frame = start_widths(encoder, records, WIDTHS, sample=START_RECORDS, advance=advance)
    output.mkdir(parents=True, exist_ok=True)
    drawing, drawn = draw(frame)
    save(drawing, drawn, output / "figures" / "start_widths")
    frame.to_csv(output / "start_widths.csv", index=False)
    measure_captions(read_captions("scenes"), load_text_encoder("tiny", device="auto", batch_size=128), output=output / "geometry")
    return frame


def _evaluate(output: Path) -> Arms:
    import numpy as np

    from gradscope.cpu_speed import cpu_speed
    from gradscope.data.source import open_data
    from gradscope.encoders.load import load_encoder, resolve_device
    from gradscope.evaluate import evaluate
    from gradscope.evaluation_file import retrieval_table, write_evaluation, write_hits
    from gradscope.metrics.bootstrap import paired_difference

    source, device = open_data("scenes"), resolve_device("auto")
    records = source.records("test")
    recall, hits = {}, {}
    for name in ("tiny", "infonce", "hn"):
        where = "tiny" if name == "tiny" else str(output / name)
        encoder = load_encoder(where, device)
        with cpu_speed(device, encoder.longest_sequence), progress(f"test split, {name}") as advance:
            result, embedded = evaluate(encoder, records, advance=advance)
        write_evaluation(output / f"eval-test-{name}.json", where, source, "test", result, embedded)
        write_hits(output / f"eval-test-{name}.npz", result)
        if name != "tiny":
            out.print(retrieval_table(result, f"{name} arm, last checkpoint, scenes test"))
        rows = {row.direction: row for row in result.rows if row.metric == "R@1"}
        recall[name] = {d: (row.value, row.low, row.high) for d, row in rows.items()}
        with np.load(output / f"eval-test-{name}.npz") as stored:
            hits[name] = dict(stored)
    gain = {}
    for direction in ("i2t", "t2i"):
        a, b = (hits[name][f"hit1_{direction}"] for name in ("hn", "infonce"))
        difference = paired_difference(a, b, hits["hn"][f"image_{direction}"])
        gain[direction] = (difference.value, difference.low, difference.high)
    return Arms(recall=recall, gain=gain)


def _figures(output: Path) -> list[Path]:
    from gradscope.figures import figures
    from gradscope.figures.style import save
    from gradscope.geometry_file import load_geometry
    from gradscope.runlog import Run

    figure1, frame1 = figures["1"]([load_geometry(output / "geometry" / "scenes")])
    figure4, frame4 = figures["4"](Run(output / "hn"), Run(output / "infonce"))
    return save(figure1, frame1, output / "figures" / "figure1") + save(figure4, frame4, output / "figures" / "figure4")


def _report(output: Path, start: Any, arms: Arms, files: list[Path], seconds: float) -> None:
    from gradscope.verdict import summarise, summary_table

    infonce, hn = summarise(output / "infonce"), summarise(output / "hn")
    console.rule("verdict")
    out.print(summary_table([infonce, hn]))
    lines = verdict_lines(start, infonce, hn, arms)
    lines.append(f"Figures 1 and 4: {', '.join(str(f) for f in files if f.suffix == '.png')}; runs: {output}; {seconds:.0f} s in all.")
    for line in lines:
        out.print(line, soft_wrap=True, markup=False)
    (output / "verdict.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (output / "verdict.json").write_text(json.dumps({**asdict(arms), "verdict": lines}, indent=2) + "\n", encoding="utf-8")


def verdict_lines(start: Any, infonce: Any, hn: Any, arms: Arms) -> list[str]:
    """State, cause, remedy: sentences that a person can act on."""
    from gradscope.judgement import SATURATED
    from gradscope.verdict import sentences

    lines = sentences(infonce)
    shares = (start.assign(below=start["log10_true"] < -3).groupby("width")["below"].mean()).to_dict()
    by_width = ", ".join(f"{width}: {share:.0%}" for width, share in shares.items())
    narrow, wide = shares[min(shares)], shares[max(shares)]
    if narrow < SATURATED:
        cause = "so the start is not saturated even at the narrowest width"
    elif wide < 0.5 * narrow:
        cause = "so most of the saturation is the narrow softmax: the same weights and data teach again at a wider one"
    else:
        cause = "so a wider softmax alone does not undo it: the start is too easy for these data"
    lines.append(f"Cause. Share of batches under 1e-3 by width, same start: {by_width}; {cause}.")
    lines += sentences(hn)
    if hn.ratio and hn.cosine:
        ratios = ", ".join(f"{ratio:.3g}" for ratio in hn.ratio)
        undefined = f"; undefined in {hn.cosine_undefined} batches" if hn.cosine_undefined else ""
        lines.append(
            f"What HN changes: along its run its gradient is {ratios} times InfoNCE's (median by epoch), "
            f"cosine between the two {hn.cosine[0]:.2f} (sd {hn.cosine[1]:.2f}{undefined}). Recall decides:"
        )
    for name, title in (("tiny", "start"), ("infonce", "InfoNCE"), ("hn", "HN")):
        cells = [f"{d} {100 * v:.1f} % [{100 * lo:.1f}, {100 * hi:.1f}]" for d, (v, lo, hi) in arms.recall[name].items()]
        lines.append(f"  R@1 on test, {title}: {', '.join(cells)}")
    lines.append(_winner(arms))
    remedy = "cached accumulation (--accumulate-mode cached: all 128 as candidates)"
    lines.append(f"Next: compare with {remedy} and gammas .25 and .5 over seeds (gradscope sweep); this was one seed on a toy.")
    return lines


def _winner(arms: Arms) -> str:
    words = [f"{d} {100 * v:+.1f} points [{100 * lo:+.1f}, {100 * hi:+.1f}]" for d, (v, lo, hi) in arms.gain.items()]
    better = all(low > 0 for _, low, _ in arms.gain.values())
    worse = all(high < 0 for _, _, high in arms.gain.values())
    state = "HN wins" if better else "HN loses" if worse else "HN does not win clearly in both directions"
    return f"{state} here: HN minus InfoNCE, R@1, paired over the same test images: {', '.join(words)}."
