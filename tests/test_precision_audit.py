"""The precision audit: settings, the frame against single measurements, the sweep against published-form numbers, words and the CLI."""

from __future__ import annotations

import json
import math
import secrets
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.nn import functional as F

from gradscope.cli import main
from gradscope.embeddings_file import save_embeddings
from gradscope.evaluate import Embedded
from gradscope.figures import figures
from gradscope.metrics.loss_path import measure, pair_loss
from gradscope.objectives.hn import HN
from gradscope.objectives.infonce import InfoNCE
from gradscope.paired_rows import draw_batches, paired_rows
from gradscope.precision_audit import (
    COSINES,
    DEFAULT_SETTINGS,
    Setting,
    audit,
    made_pairs,
    medians,
    percent,
    positive_sweep,
    read_settings,
    sentences,
    table,
    ten_to,
)
from gradscope.protocol import Protocol

pytestmark = pytest.mark.usefixtures("one_thread")
OBJECTIVES = {"infonce": pair_loss(InfoNCE())}


def stored(path: Path, pairs: int = 40, spoiled: int = 0) -> Path:
    """A file of embeddings in which every image has two captions, the first one its own."""
    image, text = made_pairs(0.5, pairs=pairs, dim=16, seed=3)
    image[:spoiled] = math.nan
    second = F.normalize(torch.randn(pairs, 16, generator=torch.Generator().manual_seed(1)), dim=1)
    embedded = Embedded(
        ids=tuple(map(str, range(pairs))), image=image, text=torch.stack([text, second], dim=1).reshape(-1, 16),
        image_of_text=torch.arange(pairs).repeat_interleave(2), truncated=0, digests=("0" * 64,) * (2 * pairs), context=77,
    )  # fmt: skip
    protocol = Protocol(
        encoder="e", data="d", split="test", sha256="", images=pairs, captions=2 * pairs, expected=pairs, missing=0, bad=0, context=77,
        truncated=0, preprocessing="", precision=embedded.precision,
    )  # fmt: skip
    save_embeddings(path, embedded, protocol)
    return path


def test_settings_are_read_and_written_alike() -> None:
    found = read_settings("fp32, fp16@65536,bf16@0.5")
    assert found == (
        Setting(precision="fp32"),
        Setting(precision="fp16", loss_scale=65536.0),
        Setting(precision="bf16", loss_scale=0.5),
    )
    assert read_settings(",".join(map(str, DEFAULT_SETTINGS))) == DEFAULT_SETTINGS
    for wrong, words in (
        ("fp8", "unknown precision"),
        ("fp16@", "loss scale"),
        ("fp16@-1", "above 0"),
        ("fp16@nan", "above 0"),
        ("", "unknown"),
    ):
        with pytest.raises(ValueError, match=words):
            read_settings(wrong)
    with pytest.raises(ValueError, match="twice"):
        read_settings("fp16,fp16@1")


def test_made_pairs_have_exactly_the_cosine_asked_for_and_negatives_at_chance() -> None:
    for cosine in (-0.4, 0.0, 0.28, 1.0):
        image, text = made_pairs(cosine, pairs=200, dim=64, seed=secrets.randbits(32))
        assert torch.allclose((image * text).sum(dim=1), torch.full((200,), cosine), atol=1e-6)
        assert torch.allclose(image.norm(dim=1), torch.ones(200), atol=1e-6)
        off = (image @ text.T)[~torch.eye(200, dtype=torch.bool)]
        assert abs(float(off.mean())) < 0.01
        assert float(off.std()) == pytest.approx(1 / 8, rel=0.05)
    for wrong in ({"cosine": 1.1, "dim": 8}, {"cosine": 0.2, "dim": 1}):
        with pytest.raises(ValueError, match="made-up pairs need"):
            made_pairs(pairs=4, seed=0, **wrong)  # type: ignore[arg-type]


def test_each_row_is_a_measurement() -> None:
    image, text = made_pairs(0.6, pairs=30, dim=16, seed=secrets.randbits(32))
    objectives = {"infonce": pair_loss(InfoNCE()), "hn": pair_loss(HN(gamma=0.3), form="residual")}
    batches, seen = draw_batches(30, 8, 3, seed=5), []
    frame = audit(image, text, 25.0, objectives=objectives, batches=batches, advance=lambda done, of: seen.append((done, of)))
    assert len(frame) == 2 * 3 * len(DEFAULT_SETTINGS)
    assert seen == [(i, 6) for i in range(1, 7)]
    for _, row in frame.iterrows():
        batch = batches[row["batch"]]
        found = measure(
            image[batch], text[batch], 25.0, objectives[row["objective"]], precision=row["precision"], loss_scale=row["loss_scale"]
        )
        for key, value in asdict(found).items():
            assert row[key] == value or (math.isnan(row[key]) and math.isnan(value)), key
        assert (row["width"], row["scale"], row["denormals_flushed"]) == (8, 25.0, False)
    exact = frame[frame["setting"] == "fp64"]
    assert exact["true_norm"].tolist() == pytest.approx(exact["gradient_norm"].tolist(), rel=1e-6)
    assert exact["true_loss_log10"].tolist() == pytest.approx(exact["log10_loss_true"].tolist(), abs=1e-9)


def test_medians_keep_nan_and_the_worst_overflow() -> None:
    image, text = made_pairs(0.6, pairs=30, dim=16, seed=0)
    frame = audit(image, text, 25.0, objectives=OBJECTIVES, batches=draw_batches(30, 6, 5, seed=0), settings=read_settings("fp64,fp32"))
    found = medians(frame)
    assert found["setting"].tolist() == ["fp64", "fp32"]
    for name in ("loss", "gradient_norm", "gradient_error", "logit_rounding"):
        for setting in ("fp64", "fp32"):
            values = sorted(frame[frame["setting"] == setting][name])
            assert found[found["setting"] == setting][name].item() == values[2]
    frame.loc[1, ["loss", "non_finite"]] = [math.nan, 0.25]
    spoiled = medians(frame)
    assert math.isnan(spoiled["loss"][1])
    assert spoiled["non_finite"].tolist() == [0, 0.25]
    assert any("inf or nan entries: a loss scale too large (25 %)" in line for line in sentences(spoiled))


@pytest.fixture(scope="module")
def sweep() -> pd.DataFrame:
    """N 64, D 512, scale 100, the five positive cosines, in the order of OpenAI's CLIP."""
    torch.set_num_threads(1)
    return positive_sweep(100.0, objectives={"infonce": pair_loss(InfoNCE(), order="scale first")}, batches=3)


def test_the_sweep_over_precisions(sweep: pd.DataFrame) -> None:
    """What is known of this sweep from an independent run of the same construction: within the spread of its random draw."""
    found = medians(sweep).set_index(["setting", "positive_cosine"])
    fp64 = [5.8e-4, 1.0e-6, 1.5e-8, 2.1e-10, 5.6e-17]
    for cosine, loss in zip(COSINES, fp64, strict=True):
        assert abs(found.loc[("fp64", cosine), "true_loss_log10"] - math.log10(loss)) < 1.5  # one row can hold it all
        for setting in ("fp32", "bf16"):
            row = found.loc[(setting, cosine)]
            assert row["zero_share"] < 0.01
            assert row["gradient_norm"] == pytest.approx(row["true_norm"], rel=0.35)  # a lost pull takes half of its square
        if cosine != 0.32:  # one row of 128 prints 1e-7, or none does
            assert (found.loc[("fp32", cosine), "loss"] == 0) == (cosine > 0.32)
    fp16 = found.loc["fp16"]
    assert fp16.loc[0.22, "zero_share"] > 0.2
    assert fp16.loc[0.22, "gradient_norm"] == pytest.approx(fp16.loc[0.22, "true_norm"], rel=0.05)
    assert fp16.loc[0.28, "zero_share"] > 0.9
    assert (fp16.loc[0.32:, "gradient_norm"] == 0).all()
    scaled = found.loc["fp16@65536"]
    assert scaled["zero_share"].tolist() == pytest.approx([0.02, 0.29, 0.68, 0.95, 1.0], abs=0.3)
    assert (scaled["gradient_norm"] > 0).tolist() == [True, True, True, True, False]


def test_the_order_of_factors_decides_over_zeros_in_fp16(sweep: pd.DataFrame) -> None:
    last = positive_sweep(100.0, objectives=OBJECTIVES, settings=read_settings("fp16"), cosines=(0.22,), batches=3)
    first = sweep[(sweep["setting"] == "fp16") & (sweep["positive_cosine"] == 0.22)]
    assert last["zero_share"].median() < first["zero_share"].median() / 2


def test_the_words_say_from_where_on(sweep: pd.DataFrame) -> None:
    said = {line.split(": ")[0]: line for line in sentences(medians(sweep))}
    assert "no gradient at all" in said["infonce, fp16"]
    assert "no gradient at all" not in said["infonce, bf16"]
    assert "a printed loss of 0" in said["infonce, fp32"]
    last = sentences(medians(sweep))[-2:]
    assert "residual form" in last[0]
    assert "outside autocast" in last[1]
    drawn = table(medians(sweep), "title")
    assert drawn.row_count == len(COSINES) * len(DEFAULT_SETTINGS)
    assert [percent(x) for x in (0.0, 1e-9, 0.5, 0.9999, 1.0, 3.0, math.nan)] == [
        "0 %",
        "<1 %",
        "50 %",
        ">99 %",
        "100 %",
        "300 %",
        "nan",
    ]
    assert (ten_to(-6.0), ten_to(-400.2)) == ("1.0e-06", "1e-400")


def test_the_residual_form_loses_nothing_in_fp32() -> None:
    frame = positive_sweep(
        100.0,
        objectives={"r": pair_loss(InfoNCE(), form="residual")},
        settings=read_settings("fp64,fp32"),
        dim=128,
        width=16,
        batches=2,
    )
    assert sentences(medians(frame)) == ["r: nothing that matters is lost in fp64, fp32."]


def test_what_is_drawn_is_what_was_measured(sweep: pd.DataFrame) -> None:
    drawing, drawn = figures["precision-audit"](sweep)
    found = medians(sweep)
    assert len(drawn) == len(found)
    lines = {line.get_label(): line for line in drawing.axes[1].get_lines()}
    for setting in map(str, DEFAULT_SETTINGS):
        part = found[found["setting"] == setting].sort_values("positive_cosine")
        assert lines[setting].get_xdata().tolist() == part["positive_cosine"].tolist()
        assert lines[setting].get_ydata().tolist() == pytest.approx((100 * part["zero_share"]).tolist())
    norm = drawing.axes[2]
    assert "0" in [tick.get_text() for tick in norm.get_yticklabels()]
    each, rows = figures["precision-audit"](sweep.drop(columns="positive_cosine"))
    assert len(rows) == len(sweep)
    assert rows["x"].tolist() == pytest.approx((10 ** sweep["true_loss_log10"]).tolist())
    assert each.axes[0].get_xscale() == "log"
    assert each.axes[3].get_ylim()[1] == pytest.approx(104)
    spoiled = sweep.copy()
    spoiled.loc[spoiled.index[:3], "gradient_norm"] = math.inf
    spoiled.loc[spoiled.index[5], "gradient_error"] = 7.5
    worse, _ = figures["precision-audit"](spoiled.drop(columns="positive_cosine"))
    said = [text.get_text() for text in worse.legends[0].get_texts()]
    assert sum(" (overflow in " in text for text in said) == spoiled["setting"].iloc[:3].nunique()
    assert worse.axes[3].get_ylim()[1] > 750
    for wrong in (sweep.drop(columns="loss"), sweep.iloc[:0]):
        with pytest.raises(ValueError, match="no precision audit"):
            figures["precision-audit"](wrong)


def test_pairs_are_images_with_their_first_captions_and_batches_do_not_overlap() -> None:
    owner = torch.tensor([2, 0, 1, 0, 2, 1])
    text = F.normalize(torch.randn(6, 4), dim=1)
    image = F.normalize(torch.randn(3, 4), dim=1)
    image[1] = math.inf
    embedded = Embedded(ids=("a", "b", "c"), image=image, text=text, image_of_text=owner, truncated=0, digests=("",) * 6)
    pairs = paired_rows(embedded)
    assert pairs.left_out == 1
    assert torch.equal(pairs.image, image[[0, 2]])
    assert torch.equal(pairs.text, text[[1, 0]])
    batches = draw_batches(50, 8, 100, seed=7)
    assert [len(b) for b in batches] == [8] * 6
    assert len(set(torch.cat(batches).tolist())) == 48
    assert all(torch.equal(a, b) for a, b in zip(batches, draw_batches(50, 8, 6, seed=7), strict=True))
    assert torch.equal(torch.cat(draw_batches(50, 4, 4, seed=7)), torch.cat(batches[:2]))
    with pytest.raises(ValueError, match="does not fit"):
        draw_batches(5, 8, 1, seed=0)
    with pytest.raises(ValueError, match="needs two pairs or more"):
        draw_batches(1, 8, 1, seed=0)
    with pytest.raises(ValueError, match="some are off by 1;"):
        paired_rows(replace(embedded, image=2 * image))
    with pytest.raises(ValueError, match="no pair"):
        paired_rows(
            Embedded(
                ids=("a",), image=image[1:2], text=text[:1], image_of_text=torch.zeros(1, dtype=torch.int64), truncated=0, digests=("",)
            )
        )


@pytest.fixture
def cli(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gradscope", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def test_audit_of_stored_embeddings(cli, tmp_path) -> None:
    file = stored(tmp_path / "e.safetensors", spoiled=2)
    code, out, err = cli("audit", file, "--width", 8, "--batches", 9, "--objective", "hn", "--output", "a.csv")
    assert code == 0, err
    assert "2 pairs with embeddings that are not finite are left out" in err
    assert "38 pairs fill 4 batches of 8, not 9" in err
    assert "hn 0.5, bf16" in out
    frame = pd.read_csv("a.csv")
    assert len(frame) == 4 * len(DEFAULT_SETTINGS)
    assert set(frame["scale"]) == {100}
    assert all(Path(f"a-figure.{suffix}").stat().st_size for suffix in ("pdf", "png", "csv"))
    code, out, err = cli("figure", "precision-audit", "a.csv", "--output", "again")
    assert code == 0, err
    assert Path("again/precision_audit.csv").read_bytes() == Path("a-figure.csv").read_bytes()


def test_audit_of_an_encoder_reads_it_at_its_own_scale(cli, scenes_folder, small_encoder) -> None:
    words = ("audit", small_encoder, "--data", scenes_folder, "--split", "test", "--width", 16, "--device", "cpu", "--output", "b.json")
    code, _, err = cli(*words, "--precision", "fp32,fp16@1e30", "--loss-form", "residual")
    assert code == 0, err
    rows = json.loads(Path("b.json").read_text())
    from gradscope.encoders.load import load_encoder

    assert rows[0]["scale"] == pytest.approx(float(load_encoder(str(small_encoder)).scale().detach()))
    assert {row["setting"] for row in rows} == {"fp32", "fp16@1e+30"}
    assert {row["objective"] for row in rows} == {"infonce, residual form"}
    assert rows[1]["gradient_norm"] == "nan"
    assert rows[1]["non_finite"] > 0


def test_audit_of_made_up_pairs(cli) -> None:
    words = ("audit", "--synthetic", "--width", 8, "--batches", 2, "--cosines", "0.3,0.5", "--order", "first")
    code, out, err = cli(*words)
    assert code == 0, err
    assert "infonce, scale first, fp32" in out
    assert cli(*words)[1] == out
    assert not list(Path().iterdir())


def test_tables_fit_a_narrow_terminal() -> None:
    from rich.console import Console

    paths = {name: pair_loss(objective) for name, objective in (("infonce", InfoNCE()), ("hn 0.5", HN(gamma=0.5)))}
    found = medians(positive_sweep(100.0, objectives=paths, width=4, batches=2, cosines=(0.345, 0.5)))
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(table(found, "made up"))
    assert "…" not in captured.get()
    assert all(f"{loss:.1e}" in captured.get() for loss in found["loss"])
    assert len(max(captured.get().splitlines(), key=len).rstrip()) <= 80
    assert captured.get().splitlines()[3].rstrip().endswith(" off")


def test_a_width_that_takes_much_memory_is_announced(capsys) -> None:
    from gradscope.cli.pair_source import announce_memory

    announce_memory(3000)
    assert capsys.readouterr().err == ""
    announce_memory(20_000)
    assert "a width of 20,000 takes about 35.8 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to audit"),
        (("--synthetic", "x"), "would be ignored"),
        (("--synthetic", "--data", "scenes"), "would be ignored"),
        (("--synthetic", "--cosines", "a"), "numbers by commas"),
        (("--synthetic", "--cosines", "2"), "within -1 and 1"),
        (("--synthetic", "--cosines", "0.3,0.3"), "a positive cosine is given twice"),
        (("--synthetic", "--gamma", "0.3"), "--gamma is a finite number for --objective hn"),
        (("--synthetic", "--objective", "hn", "--gamma", "inf"), "--gamma is a finite number for --objective hn"),
        (("--synthetic", "--seed", "99999999999999999999"), "a seed must fit 64 bits"),
        (("--synthetic", "--precision", "fp8"), "unknown precision"),
        (("--synthetic", "--objective", "siglip"), "unknown objective"),
        (("--synthetic", "--loss-form", "x"), "unknown loss form"),
        (("--synthetic", "--order", "x"), "unknown value of --order"),
        (("--synthetic", "--scale", "-1"), "--scale must be"),
        (("--synthetic", "--output", "x.txt"), "ends in .csv or .json"),
        (("e.safetensors", "--cosines", "0.2"), "belongs to --synthetic"),
        (("e.safetensors", "--data", "scenes"), "would be ignored"),
        (("e.safetensors", "--width", "99"), "; choose --width 2 to"),
    ],
)
def test_wrong_flags_are_one_sentence(cli, tmp_path, words, said) -> None:
    stored(tmp_path / "e.safetensors")
    code, out, err = cli("audit", *words)
    assert code == 2, out
    assert "Traceback" not in err
    assert said in err.replace("\n", " ")
    assert len(err.strip().splitlines()) == 1
