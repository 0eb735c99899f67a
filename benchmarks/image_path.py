"""How fast a picture becomes pixels, and how far the fast ways are from open_clip's own preprocessing.

    python benchmarks/image_path.py --output runs/image_path

Photo-like JPEGs are made on the fly. Four ways read all of them in turn, in one process and on one thread: open_clip (PIL decodes
and its evaluation transform resizes), and this package's exact, fast and scaled. The order of the ways is drawn anew for each
picture. Answers:
    ratio     open_clip's seconds for a picture / the way's; median over pictures, smallest and largest of the rounds' medians
    levels    |way - open_clip| in 1/255 before normalisation: mean and largest over all pictures
    cosine    1 - cosine of the embeddings of the two, for ViT-B/32 of random weights and for ``tiny``; the largest

How to read it: ratios are of one machine and one run, and hold while others use the machine, images per second do not. How it can
mislead: the pictures are synthetic (smooth shapes, edges and grain), in the page cache, and of one size; the larger the file, the
more the decode counts, and the smaller the gain of the fast resize. Random weights say how a ViT passes small differences on, not
what recall makes of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image, ImageDraw, ImageFilter
from rich import box
from rich.table import Table
from talk import random_weights_are_meant, told
from torch import Tensor, nn

from gradscope.console import console, out
from gradscope.data.pixels import pixel_path

REFERENCE = "open_clip"
WAYS = (REFERENCE, "exact", "fast", "scaled")

#: CLIP's preprocessing for a ViT-B/32; mean, std and interpolation are open_clip's defaults.
PREPROCESS = {"size": 224}

Way = Callable[[Path], Tensor]


def photo(width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Light that varies slowly, shapes with sharp edges, texture at several scales, and grain."""
    picture = np.zeros((height, width, 3))
    for cell, share in ((400, 0.5), (120, 0.2), (40, 0.15), (12, 0.1), (4, 0.05)):
        coarse = rng.integers(0, 256, (max(2, height // cell), max(2, width // cell), 3), dtype=np.uint8)
        picture += share * np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    image = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(30):
        x, y = int(rng.integers(0, width)), int(rng.integers(0, height))
        size = int(rng.integers(10, max(11, height // 5)))
        colour = tuple(int(c) for c in rng.integers(0, 256, 3))
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x, y, x + size, y + size // 2 + 1), fill=colour)
    image = image.filter(ImageFilter.GaussianBlur(0.7))  # no lens draws an edge sharper than a pixel
    grain = rng.normal(0, 3, (height, width, 1))
    return Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))


def make_pictures(folder: Path, count: int, width: int, height: int, seed: int) -> list[Path]:
    paths = []
    for i in range(count):
        path = folder / f"{i:03}.jpg"
        photo(width, height, np.random.default_rng((seed, i))).save(path, quality=90)
        paths.append(path)
    return paths


def ways(preprocess: Mapping[str, Any]) -> dict[str, Way]:
    """Each from a path to float32 [3, H, W]."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    transform = image_transform_v2(PreprocessCfg(**preprocess), is_train=False)

    def reference(path: Path) -> Tensor:
        with Image.open(path) as image:
            pixels: Tensor = transform(image)
        return pixels

    found: dict[str, Way] = {name: pixel_path(preprocess, name) for name in WAYS[1:]}
    return {REFERENCE: reference, **found}


def measure(
    readers: Mapping[str, Way], paths: Sequence[Path], rounds: int, seed: int, advance: Callable[[int, int], None] | None = None
) -> pd.DataFrame:
    """Rows (round, picture, way, seconds), after one picture each that is not timed."""
    order = random.Random(seed)
    rows = []
    for reader in readers.values():
        reader(paths[0])
    for turn in range(rounds):
        for i, path in enumerate(paths):
            for name in order.sample(list(readers), len(readers)):
                start = time.perf_counter()
                readers[name](path)
                rows.append({"round": turn, "picture": i, "way": name, "seconds": time.perf_counter() - start})
            if advance:
                advance(turn * len(paths) + i + 1, rounds * len(paths))
    return pd.DataFrame(rows)


def speed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows (way, images_per_s, ratio, low, high): how many times as fast as open_clip, of the same picture in the same round."""
    wide = frame.pivot_table(index=["round", "picture"], columns="way", values="seconds")
    ratio = wide.rdiv(wide[REFERENCE], axis=0)
    by_round = ratio.groupby("round").median()
    columns = {"images_per_s": 1 / wide.median(), "ratio": ratio.median(), "low": by_round.min(), "high": by_round.max()}
    return pd.DataFrame(columns).loc[[way for way in WAYS if way in wide]].rename_axis("way").reset_index()


def differences(pixels: Mapping[str, Tensor], std: Sequence[float]) -> pd.DataFrame:
    """Rows (way, mean, largest): levels of 255 between each way's pictures [N, 3, H, W] and open_clip's."""
    unit = 255 * torch.tensor(std).view(3, 1, 1)
    rows = []
    for way, found in pixels.items():
        levels = ((found - pixels[REFERENCE]) * unit).abs()
        rows.append({"way": way, "mean": float(levels.mean()), "largest": round(float(levels.max()), 3)})
    return pd.DataFrame(rows)


def distances(embed: Callable[[Tensor], Tensor], pixels: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest 1 - cosine between the embeddings of each way's pictures and of open_clip's, in float64."""
    rows = {way: nn.functional.normalize(embed(found).double(), dim=-1) for way, found in pixels.items()}
    return {way: float((1 - (found * rows[REFERENCE]).sum(-1)).max()) for way, found in rows.items()}


def random_vit() -> nn.Module:
    from open_clip import create_model

    torch.manual_seed(0)
    random_weights_are_meant()
    model: nn.Module = create_model("ViT-B-32", pretrained=None).visual.eval()
    return model


def embedding_distances(paths: Sequence[Path]) -> pd.DataFrame:
    """Rows (encoder, way, distance)."""
    from gradscope.encoders.load import load_encoder

    tiny = load_encoder("tiny")
    rows = []
    for name, model, preprocess in (("ViT-B/32", random_vit(), PREPROCESS), ("tiny", tiny.model.visual, tiny.config["preprocess_cfg"])):
        pixels = {way: torch.stack([read(path) for path in paths]) for way, read in ways(preprocess).items()}
        with torch.no_grad():
            found = distances(model, pixels)
        rows += [{"encoder": name, "way": way, "distance": distance} for way, distance in found.items()]
    return pd.DataFrame(rows)


def table(speeds: pd.DataFrame, levels: pd.DataFrame, cosines: pd.DataFrame, title: str) -> Table:
    encoders = list(dict.fromkeys(cosines["encoder"]))
    caption = "ratio: times open_clip, [smallest, largest] round; mean and largest difference: levels of 255"
    shown = Table(title=title, caption=caption, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("way", "images/s", "ratio", "mean", "largest", *(f"1 - cos {e}" for e in encoders)):
        shown.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=" " not in heading)
    far = cosines.pivot_table(index="way", columns="encoder", values="distance")
    merged = speeds.merge(levels, on="way")
    for row in merged.to_dict("records"):
        ratio = f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        cells = [row["way"], f"{row['images_per_s']:.0f}", ratio, f"{row['mean']:.4f}", f"{row['largest']:.0f}"]
        shown.add_row(*cells, *(f"{far.loc[row['way'], e]:.1e}" for e in encoders))
    return shown


def _machine() -> dict[str, Any]:
    """The facts that the other benchmark states; the two files are no package."""
    spec = importlib.util.spec_from_file_location("probe_overhead", Path(__file__).with_name("probe_overhead.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["probe_overhead"] = module
    spec.loader.exec_module(module)
    facts: dict[str, Any] = module.machine()
    return facts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pictures per second.", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/image_path"), help="folder for CSV and JSON")
    parser.add_argument("--pictures", type=int, default=64, help="JPEGs to make")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--height", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=3, help="times each picture is read by each way")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures and of the order of the ways")
    return parser.parse_args()


def main() -> None:
    import PIL
    import torchvision

    given = _arguments()
    if min(given.pictures, given.rounds) < 1 or min(given.width, given.height) < 8:
        raise ValueError("give at least 1 picture of 8 x 8 and 1 round")
    torch.set_num_threads(1)
    facts = {**_machine(), "pillow": PIL.__version__, "torchvision": torchvision.__version__}
    console.print(
        f"{facts['processor']}, {facts['cores']} cores, load {facts['load_average_before']:.1f} before the start; 1 thread, "
        f"torch {facts['torch']}, torchvision {facts['torchvision']}, Pillow {facts['pillow']}, Python {facts['python']}"
    )
    with tempfile.TemporaryDirectory() as folder, told("pictures") as advance:
        paths = make_pictures(Path(folder), given.pictures, given.width, given.height, given.seed)
        size = sum(path.stat().st_size for path in paths) / len(paths)
        readers = ways(PREPROCESS)
        seconds = measure(readers, paths, given.rounds, given.seed, advance)
        pixels = {way: torch.stack([read(path) for path in paths]) for way, read in readers.items()}
        levels = differences(pixels, pixel_path(PREPROCESS).std)
        cosines = embedding_distances(paths)
    speeds = speed(seconds)
    title = f"{given.pictures} JPEGs of {given.width} x {given.height}, {size / 1e3:.0f} kB on average, to 224 x 224"
    out.print(table(speeds, levels, cosines, title))
    given.output.mkdir(parents=True, exist_ok=True)
    for name, frame in (("seconds", seconds), ("speed", speeds), ("levels", levels), ("cosines", cosines)):
        frame.to_csv(given.output / f"{name}.csv", index=False)
    results = {"machine": facts, "speed": speeds.to_dict("records"), "levels": levels.to_dict("records")}
    text = json.dumps({**results, "cosines": cosines.to_dict("records")}, indent=2, default=str)
    (given.output / "image_path.json").write_text(text + "\n", encoding="utf-8")
    out.print(f"all of it as CSV, and with the machine as JSON: {given.output}", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"image_path: {error}", file=sys.stderr)
        sys.exit(2)
