"""What-if against a slow twin that draws the same batches and does everything by hand, and against the precision audit."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from gradscope.cli import app
from gradscope.cli.what_if import _OBJECTIVES
from gradscope.embeddings_file import save_embeddings
from gradscope.evaluate import Embedded
from gradscope.figures import figures
from gradscope.metrics.loss_path import pair_loss
from gradscope.objectives.infonce import InfoNCE
from gradscope.objectives.siglip import SigLIP, best_bias
from gradscope.paired_rows import draw_batches
from gradscope.precision_audit import Setting, audit, made_pairs
from gradscope.protocol import Protocol
from gradscope.whatif import OBJECTIVES, Arm, Grid, each_batch, make_arms, what_if
from gradscope.whatif_words import pivots, sentences


def rows(n: int = 50, dim: int = 8, near: float = 0.4) -> tuple[Tensor, Tensor]:
    """Fresh random unit rows of n pairs that resemble each other, fp32."""
    image = F.normalize(torch.randn(n, dim), dim=1)
    return image, F.normalize(image + near * torch.randn(n, dim), dim=1)


def arms(*names: str, **settings: Any) -> tuple[Arm, ...]:
    return make_arms(names, **{"gammas": (0.5,), "margins": ("live",), **settings})


def slow_cell(image: Tensor, text: Tensor, scale: float, width: int, seed: int, gamma: float) -> dict[str, float]:
    """HN (InfoNCE at gamma 0), a batch at a time, from the formulas: float64 for all but the printed loss."""
    losses, logs, norms, medians, under, number, above = [], [], [], [], [], [], []
    order = torch.randperm(len(image), generator=torch.Generator().manual_seed(seed))
    for at in range(0, len(image) - width + 1, width):
        v, t = (x[order[at : at + width]].double().requires_grad_() for x in (image, text))
        margin = gamma * (t @ t.T).detach().fill_diagonal_(0.0)
        logits = scale * (v @ t.T + margin)
        target = torch.arange(width)
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        grads = torch.autograd.grad(loss, [v, t])
        norms.append(math.log10(math.sqrt(sum(float((g**2).sum()) for g in grads))))
        losses.append(float(loss.detach()))
        logs.append(math.log10(losses[-1]))
        r = torch.cat([1 - m.softmax(1).diagonal() for m in (logits, logits.T)]).detach()
        medians.append(float(np.quantile(r, 0.5)))
        under.append(float((r < 1e-3).double().mean()))
        number.append(np.mean([float(part.sum() ** 2 / (part**2).sum()) for part in (r[:width], r[width:])]))
        off = logits.detach() - torch.diag(torch.full((width,), math.inf, dtype=torch.float64))
        above.append(np.mean([float((m.amax(1) > logits.diagonal()).double().mean()) for m in (off, off.T)]))
    return {
        "batches": len(losses), "left_out": len(image) - width * len(losses), "loss": np.mean(losses), "log10_loss": np.median(logs),
        "below_1e-3": np.mean(np.array(losses) < 1e-3), "residual_median": np.mean(medians), "rows_below_1e-3": np.mean(under),
        "effective_rows": np.mean(number), "violated": np.mean(above), "log10_gradient": np.median(norms),
    }  # fmt: skip


@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize(("scale", "width"), [(5.0, 4), (20.0, 16), (30.0, 50)])
def test_a_cell_is_what_the_formulas_say(gamma: float, scale: float, width: int) -> None:
    image, text = rows()
    chosen = arms("hn", gammas=(gamma,)) if gamma else arms("infonce")
    table = what_if(image, text, scale, Grid(arms=chosen, widths=(width,), seed=3))
    slow = slow_cell(image, text, scale, width, 3, gamma)
    for name, value in slow.items():
        assert table[name].iloc[0] == pytest.approx(value, rel=2e-4, abs=2e-6), name


def test_numbers_equal_the_precision_audits() -> None:
    """Made-up pairs of the audit, fp32 to fp16 with and without a loss scale: the same batch, the same numbers."""
    for cosine in (0.22, 0.36):
        image, text = made_pairs(cosine, pairs=24, dim=32, seed=int(torch.randint(1000, ())))
        grid = Grid(arms=arms("infonce"), widths=(12,), precisions=("fp32", "bf16", "fp16"), loss_scales=(1.0, 65536.0), seed=5)
        mine = each_batch(image, text, 100.0, grid)
        settings = [Setting(precision=p, loss_scale=k) for p in grid.precisions for k in grid.loss_scales]
        theirs = audit(
            image, text, 100.0, objectives={"infonce": pair_loss(InfoNCE())}, batches=draw_batches(24, 12, 32, 5), settings=settings
        )
        assert len(mine) == len(theirs) == 12
        key = ["batch", "precision", "loss_scale"]
        mine, theirs = (f.sort_values(key).reset_index(drop=True) for f in (mine, theirs))
        np.testing.assert_array_equal(mine["loss"], theirs["loss"])
        np.testing.assert_array_equal(mine["zero_share"], theirs["zero_share"])
        np.testing.assert_array_equal(mine["pull_lost"], theirs["pull_lost"])
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(mine["log10_gradient"], np.log10(theirs["gradient_norm"]))


def test_fp16_loses_entries_where_bf16_and_fp32_do_not() -> None:
    """64 pairs, 512 dimensions, scale 100 inside the product, as CLIP has it: at a loss of 3e-7 fp16 keeps next to no entry of the
    gradient, a loss scale brings most of them back; at 1e-4 a good part is lost and the norm does not show it."""
    found = {}
    for cosine in (0.22, 0.28):
        image, text = made_pairs(cosine, pairs=64, dim=512, seed=0)
        grid = Grid(
            arms=arms("infonce"), widths=(64,), precisions=("fp32", "bf16", "fp16"), loss_scales=(1.0, 65536.0), order="scale first"
        )
        table = what_if(image, text, 100.0, grid)
        found[cosine] = {(p, k): part.iloc[0] for (p, k), part in table.groupby(["precision", "loss_scale"])}
    for cosine, cells in found.items():
        assert cells["fp32", 1.0]["zero_share"] == cells["bf16", 1.0]["zero_share"] == 0, cosine
        assert cells["fp16", 65536.0]["log10_gradient"] == pytest.approx(cells["fp32", 1.0]["log10_gradient"], abs=0.01), cosine
    zeros = {key: cell["zero_share"] for key, cell in found[0.22].items()} | {"far": found[0.28]["fp16", 1.0]["zero_share"]}
    assert 0.25 < zeros["fp16", 1.0] < 0.95
    assert zeros["fp16", 65536.0] < 0.05
    assert zeros["far"] > 0.95
    assert found[0.22]["fp16", 1.0]["log10_gradient"] == pytest.approx(found[0.22]["fp32", 1.0]["log10_gradient"], abs=0.05)


def test_all_arms_see_the_same_batches_and_wide_ones_hold_narrow_ones() -> None:
    narrow, wide = (draw_batches(50, width, 32, 7) for width in (8, 16))
    assert [sorted(b.tolist()) for b in wide] == [
        sorted([*a.tolist(), *b.tolist()]) for a, b in zip(narrow[::2], narrow[1::2], strict=True)
    ]
    image, text = rows()
    grid = Grid(arms=(*arms("infonce"), *arms("hn", gammas=(0.0,))), widths=(8, 16), batches=3, seed=7)
    batches = each_batch(image, text, (10.0, 20.0), grid)
    infonce, hn = (batches[batches["objective"] == label].reset_index(drop=True) for label in ("infonce", "hn 0"))
    pd.testing.assert_frame_equal(infonce.drop(columns="objective"), hn.drop(columns="objective"))
    again = each_batch(image, text, (10.0, 20.0), grid)
    pd.testing.assert_frame_equal(batches, again)


def test_a_wider_softmax_teaches_more_from_the_same_rows() -> None:
    image, text = rows(128, 12, near=0.15)
    table = what_if(image, text, 30.0, Grid(arms=arms("infonce"), widths=(4, 32, 128)))
    # Each row keeps its negatives and gets more of them, and every width covers all rows: this is certain, not only likely.
    assert list(table["left_out"]) == [0, 0, 0]
    assert list(table["loss"]) == sorted(table["loss"])
    assert list(table["residual"]) == sorted(table["residual"])
    assert list(table["rows_below_1e-3"]) == sorted(table["rows_below_1e-3"], reverse=True)


def test_siglip_is_read_at_the_bias_of_its_cell() -> None:
    image, text = rows()
    table = what_if(image, text, (10.0, 30.0), Grid(arms=arms("siglip"), widths=(8, 25)))
    for _, cell in table.iterrows():
        logits = [cell["scale"] * (image[b].double() @ text[b].double().T) for b in draw_batches(50, int(cell["width"]), 32, 0)]
        assert cell["bias"] == pytest.approx(best_bias(logits), rel=1e-9)
        objective = SigLIP(bias=cell["bias"])
        slow = [10 ** float(objective.log10_loss(m)) for m in logits]
        assert cell["loss"] == pytest.approx(np.mean(slow), rel=1e-4)
    assert what_if(image, text, 10.0, Grid(arms=arms("siglip", bias=-10.0), widths=(8,)))["bias"].iloc[0] == -10


def test_make_arms_gives_each_objective_the_settings_that_it_has() -> None:
    labels = [arm.label for arm in make_arms(gammas=(0.25, 0.5), betas=(0.5, 1.0), bias=-10.0)]
    assert labels == [
        "infonce", "hn 0.25", "hn 0.5", "hn fixed 0.25", "hn fixed 0.5", "hn centred 0.25", "hn centred 0.5",
        "siglip -10", "dcl", "hardness_weighted 0.5", "hardness_weighted 1",
    ]  # fmt: skip
    assert all(not arm.best_bias for arm in make_arms(bias=0.0))
    assert [arm.label for arm in make_arms() if arm.best_bias] == ["siglip"]


def test_a_loss_scale_that_is_too_large_is_an_overflow_and_not_a_zero() -> None:
    image, text = rows(16, 8, near=3.0)
    table = what_if(image, text, 100.0, Grid(arms=arms("infonce"), widths=(8,), precisions=("fp16",), loss_scales=(1.0, 2.0**24)))
    assert list(table["overflow"]) == [0, 1]
    assert math.isnan(table["log10_gradient"].iloc[1])
    assert "overflows in some batches" in " ".join(sentences(table))


def test_rows_that_cannot_be_read_are_refused() -> None:
    image, text = rows()
    with pytest.raises(ValueError, match="of length 1; some are off by"):
        what_if(2 * image, text, 10.0)
    image[3, 2] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        what_if(image, text, 10.0)
    with pytest.raises(ValueError, match=r"one shape; got \[50, 8\] and \[49, 8\]"):
        what_if(text, text[:49], 10.0)


@pytest.mark.parametrize(
    ("scale", "grid", "said"),
    [
        (10.0, {"widths": (64,)}, "a width of 64 does not fit 50 pairs"),
        (10.0, {"widths": (1,)}, "a width must be a finite number, 2 or more"),
        (10.0, {"widths": (8, 8)}, "a width is given twice"),
        (0.0, {}, "a scale must be a finite number, above 0; got 0"),
        ((), {}, "no scale is given"),
        (10.0, {"precisions": ("fp8",)}, "unknown precision 'fp8'"),
        (10.0, {"loss_scales": (-1.0,)}, "a loss scale must be a finite number"),
        (10.0, {"arms": ()}, "the grid is empty"),
        (10.0, {"order": "scale first"}, "SigLIP has one only"),
        (10.0, {"seed": 2**64}, "a seed must fit 64 bits"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(scale: Any, grid: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        what_if(*rows(), scale, Grid(**grid))


def test_few_pairs_are_one_width_and_wide_ones_are_few() -> None:
    assert what_if(*rows(5), 10.0, Grid(arms=arms("infonce")))["width"].tolist() == [5]
    assert [Grid().batches_for(width) for width in (8, 256, 1024, 20_000)] == [32, 32, 8, 1]
    assert Grid(batches=64).batches_for(1024) == 64
    with pytest.raises(ValueError, match="two or more pairs"):
        what_if(*rows(1), 10.0)


def table_of(cells: list[tuple[float, int, float]], **more: Any) -> pd.DataFrame:
    """A hand-made table: (scale, width, share of batches under 1e-3)."""
    frame = pd.DataFrame(cells, columns=["scale", "width", "below_1e-3"])
    plain = {
        "objective": "infonce", "precision": "fp32", "loss_scale": 1.0, "batches": 4, "non_finite": 0, "violated": 0.1,
        "log10_gradient": -1.0, "overflow": 0.0, "zero_share": 0.0,
    }  # fmt: skip
    return frame.assign(**{**plain, **more})


def test_words_name_the_cells_that_stop() -> None:
    grid = [(s, w) for s in (20.0, 50.0, 100.0) for w in (8, 16, 32, 64, 128)]
    stopped = {(s, w) for s, w in grid if (w == 8) or (w in (16, 32, 64) and s >= 50)}
    table = table_of([(s, w, 0.5 if (s, w) in stopped else 0.49) for s, w in grid])
    assert sentences(table) == ["infonce: stops teaching at every scale (width 8), from scale 50 on (width 16 to 64)."]
    assert sentences(table.assign(**{"below_1e-3": 0.2})) == ["infonce: stops nowhere in the grid."]
    assert sentences(table.assign(**{"below_1e-3": 1.0})) == ["infonce: stops teaching everywhere in the grid."]
    odd = table_of([(s, w, float((s, w) in {(20.0, 8), (100.0, 8), (50.0, 128)})) for s, w in grid])
    assert sentences(odd) == ["infonce: stops teaching at scale 20 and 100 (width 8), at scale 50 (width 128)."]


def test_words_about_zeros_violations_floors_and_losses_that_are_not_finite() -> None:
    cells = [(20.0, 8, 0.0), (100.0, 8, 1.0)]
    assert "would teach, but half of its gradient or more is exactly 0 at scale 20 (width 8)" in sentences(
        table_of(cells, zero_share=[0.7, 1.0])
    )[0]  # fmt: skip
    assert "a negative is above the positive (active, which is not yet learning) at scale 20" in sentences(
        table_of(cells, violated=[0.95, 0.0])
    )[0]  # fmt: skip
    assert "no floor at 0" in sentences(table_of([(s, w, math.nan) for s, w, _ in cells]))[0]
    lost = sentences(table_of([(20.0, 8, math.nan), (100.0, 8, math.nan)], non_finite=4))
    assert lost == ["infonce: the loss is not finite in 8 of 8 batches."]
    lost = sentences(table_of([(20.0, 8, math.nan), (100.0, 8, math.nan)], non_finite=4, overflow=1.0))
    assert lost == ["infonce: the loss is not finite in 8 of 8 batches."]  # no loss scale is to blame


def test_words_join_precisions_that_say_the_same() -> None:
    parts = [table_of([(20.0, 8, 1.0)], precision=p, overflow=float(p == "fp16")) for p in ("fp32", "bf16", "fp16")]
    said = sentences(pd.concat(parts, ignore_index=True))
    assert said[0] == "infonce (fp32; bf16): stops teaching everywhere in the grid."
    assert said[1].startswith("infonce (fp16): stops teaching everywhere in the grid; its gradient overflows")


def test_objectives_of_which_the_same_is_said_share_a_sentence() -> None:
    same = [table_of([(20.0, 8, 1.0)], objective=name) for name in ("infonce", "hn 0.25", "hn 0.5")]
    said = sentences(pd.concat([*same, table_of([(20.0, 8, 0.0)], objective="dcl")], ignore_index=True))
    assert said == ["infonce, hn 0.25, hn 0.5: stops teaching everywhere in the grid.", "dcl: stops nowhere in the grid."]


def test_settings_are_not_counted_as_objectives(stored: Path) -> None:
    code, told = go(
        "what-if", stored, "--objective", "infonce,hn", "--margin", "live", "--width", "8", "--scale", "20", "--batches", "1"
    )
    assert code == 0, told
    assert "2 objectives in 3 settings of gamma, margin and beta: infonce, hn 0.25, hn 0.5" in told


def test_tables_fit_a_narrow_terminal() -> None:
    from rich.console import Console

    table = what_if(
        *rows(64, 8), (20.0, 50.0), Grid(arms=arms("infonce", "hardness_weighted", "dcl"), batches=1, widths=(2, 4, 8, 16, 32, 64))
    )
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        for drawn in pivots(table):
            console.print(drawn)
    assert "…" not in captured.get()
    assert all(f"{value + 0.0:.1f}" in captured.get() for value in table["log10_gradient"].round(1))


def test_figures_draw_the_cells() -> None:
    table = what_if(*rows(64, 8), (20.0, 50.0), Grid(batches=2, widths=(4, 64)))
    drawing, drawn = figures["saturation-map"](table)
    assert len([axis for axis in drawing.axes if axis.images]) == table["objective"].nunique()
    pd.testing.assert_series_equal(drawn["below_1e-3"], table["below_1e-3"])
    infonce = next(axis for axis in drawing.axes if axis.get_title(loc="left") == "infonce")
    shares = table[table["objective"] == "infonce"].pivot(index="scale", columns="width", values="below_1e-3")
    np.testing.assert_array_equal(np.asarray(infonce.images[0].get_array()), shares.to_numpy())
    table.loc[0, "log10_gradient"] = -np.inf
    drawing, drawn = figures["gradient-width"](table)
    assert [axis.get_title(loc="left") for axis in drawing.axes] == ["scale 20", "scale 50"]
    assert len(drawing.axes[0].lines) == table["objective"].nunique() + 1, "an exact zero has a mark of its own"
    with pytest.raises(ValueError, match="lacks columns below_1e-3"):
        figures["saturation-map"](table.drop(columns="below_1e-3"))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A file of embeddings: 40 images, two captions each; one image is not finite."""
    image, text = rows(40, 8)
    image[4, 0] = torch.nan
    embedded = Embedded(
        ids=tuple(map(str, range(40))),
        image=image,
        text=torch.stack([text, F.normalize(torch.randn(40, 8), dim=1)], dim=1).flatten(0, 1),
        image_of_text=torch.arange(40).repeat_interleave(2),
        truncated=0,
        digests=tuple(f"{j:064x}" for j in range(80)),
    )
    facts = Protocol(
        encoder="enc", data="d", split="test", sha256="0" * 64, images=40, captions=80, expected=40, missing=0, bad=0, context=77,
        truncated=0, preprocessing="none", precision="fp32", notes=("one note",),
    )  # fmt: skip
    save_embeddings(tmp_path / "e.safetensors", embedded, facts)
    return tmp_path / "e.safetensors"


def go(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(f"{done.output} {done.exception or ''}".split())


def test_command_on_stored_embeddings_and_its_figures(stored: Path) -> None:
    table = stored.with_name("t.csv")
    code, said = go("what-if", stored, "--scale", "20,100", "--width", "4,all", "--objective", "infonce,dcl", "--output", table)
    assert code == 0, said
    assert "1 pairs with embeddings that are not finite are left out" in said
    assert "note: one note" in said
    assert "39 pairs, 2 objectives" in said
    assert "at least half of the batches have a true loss under 1e-3" in said
    assert "infonce:" in said
    assert "dcl: its loss has no floor" in said
    frame = pd.read_csv(table)
    assert list(frame["width"].unique()) == [4, 39]
    assert len(frame) == 8
    for name in ("saturation_map", "gradient_width"):
        assert all(stored.with_name(f"t_{name}{suffix}").stat().st_size > 100 for suffix in (".pdf", ".png", ".csv"))
    code, said = go("figure", "saturation-map", table, "--output", stored.parent / "again")
    assert code == 0, said
    assert (stored.parent / "again" / "saturation_map.csv").read_bytes() == stored.with_name("t_saturation_map.csv").read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--objective", "siglp"], "unknown objective 'siglp'. Did you mean 'siglip'?"),
        (["--objective", "dcl,dcl"], "dcl is asked for twice"),
        (["--margin", "frozen"], "margin 'frozen' cannot be read off stored embeddings"),
        (["--gamma", "half"], "--gamma takes numbers by commas, as in 20,50; got 'half'"),
        (["--gamma", "-1"], "a gamma must be a finite number, 0 or more"),
        (["--bias", "-10,-5"], "--bias takes one number, or best"),
        (["--bias", "nan"], "a bias must be a finite number"),
        (["--objective", "infonce,dcl", "--gamma", "0.5"], "--gamma belongs to --objective hn and would be ignored"),
        (["--width", "8,many"], "--width takes whole numbers by commas, or all"),
        (["--width", "100"], "a width of 100 does not fit 39 pairs"),
        (["--scale", "-5"], "a scale must be a finite number"),
        (["--width", ""], "--width takes whole numbers by commas, or all"),
        (["--objective", ""], "the grid is empty"),
        (["--order", "middle"], "unknown value of --order 'middle'"),
        (["--precision", "fp61"], "unknown precision 'fp61'"),
        (["--output", "t.parquet"], "--output needs a name that ends in .csv"),
        (["--data", "scenes"], "--data would be ignored"),
    ],
)
def test_command_refuses_in_one_sentence(stored: Path, flags: list[str], said: str) -> None:
    code, told = go("what-if", stored, *flags)
    assert code != 0
    assert said in told


def test_command_on_an_encoder_reads_its_own_scale(small_encoder: Path, scenes_folder: Path) -> None:
    code, said = go(
        *("what-if", small_encoder, "--data", scenes_folder, "--split", "val", "--width", 8, "--objective", "infonce", "--batches", 2),
        *("--device", "cpu", "--image-key", "image", "--caption-key", "captions"),
    )
    assert code == 0, said
    assert "14.29" in said, "CLIP's starting scale, beside 20, 50 and 100"


def test_every_objective_of_the_registry_can_be_asked() -> None:
    from gradscope.objectives import objectives

    assert sorted(OBJECTIVES) == objectives.names()
    assert _OBJECTIVES == OBJECTIVES
