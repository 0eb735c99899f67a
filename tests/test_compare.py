"""Two models on one gallery, against loops and exact binomials; what was seen in training, against the cut gallery; both commands."""

from __future__ import annotations

import csv
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gradscope.compare import compare, compared
from gradscope.contamination import asking, contamination, without
from gradscope.evaluate import Embedded, score
from gradscope.evaluation_file import comparison_path, comparison_table, flip_lines
from gradscope.metrics.ranks import ranks
from gradscope.metrics.recall import hit_probability, metric_rows


def unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def gallery(n: int, m: int, noise: float = 0.8, dim: int = 8) -> Embedded:
    owner = torch.cat([torch.arange(n), torch.randint(n, (m - n,))])[torch.randperm(m)]
    image = unit(n, dim)
    return Embedded(
        ids=tuple(f"im{i}" for i in range(n)),
        image=image,
        text=torch.nn.functional.normalize(image[owner] + noise * unit(m, dim), dim=-1),
        image_of_text=owner,
        truncated=0,
        digests=tuple(f"{j:064x}" for j in range(m)),
        captions=tuple(f"caption {j}" for j in range(m)),
    )


def other_model(of: Embedded, noise: float = 0.7) -> Embedded:
    return replace(of, text=torch.nn.functional.normalize(of.text + noise * unit(*of.text.shape), dim=-1))


def sign_test(better: int, worse: int) -> float:
    """Two-sided, from exact binomials."""
    n, k = better + worse, max(better, worse)
    upper = sum(math.comb(n, i) for i in range(k, n + 1)) / 2**n
    return min(1.0, 2 * upper)


@pytest.mark.parametrize(("n", "m"), [(60, 60), (40, 100)])
def test_differences_and_flips_equal_a_loop(n: int, m: int) -> None:
    a = gallery(n, m)
    b = other_model(a)
    result = compare(a, b, resamples=50)
    assert (result.images, result.captions) == (n, m)
    owner = a.image_of_text.tolist()
    sides = [(e.image.double() @ e.text.double().T).tolist() for e in (a, b)]
    places: dict[str, list[list[int]]] = {"i2t": [], "t2i": []}
    for scores in sides:
        best = [max(s for s, o in zip(row, owner, strict=True) if o == i) for i, row in enumerate(scores)]
        places["i2t"].append([1 + sum(s > best[i] for s in row) for i, row in enumerate(scores)])
        places["t2i"].append([1 + sum(row[j] > scores[o][j] for row in scores) for j, o in enumerate(owner)])
    for row in result.rows:
        hits = [np.array(side) <= row.k for side in places[row.direction]]
        assert (row.a, row.b) == pytest.approx((hits[0].mean(), hits[1].mean()), abs=1e-12)
        assert row.difference == pytest.approx(hits[0].mean() - hits[1].mean(), abs=1e-12)
        assert row.low <= row.difference <= row.high
        image = range(n) if row.direction == "i2t" else owner
        gain = [sum(int(x) - int(y) for x, y, o in zip(*hits, image, strict=True) if o == i) for i in range(n)]
        assert (row.better, row.worse) == (sum(g > 0 for g in gain), sum(g < 0 for g in gain))
        assert row.p_value == pytest.approx(sign_test(row.better, row.worse), rel=1e-9)
    for direction, (one, two) in places.items():
        flips = [f for f in result.flips if f.direction == direction]
        expected = [(q, "a" if x == 1 else "b") for q, (x, y) in enumerate(zip(one, two, strict=True)) if (x == 1) != (y == 1)]
        names = {(f.id if direction == "i2t" else f.caption, f.won): f for f in flips}
        assert len(flips) == len(expected) == len(names)
        for q, won in expected:
            flip = names[f"im{q}" if direction == "i2t" else f"caption {q}", won]
            assert (flip.rank_a, flip.rank_b) == (one[q], two[q])
            scores = np.array(sides[1 if won == "a" else 0])
            line = scores[q] if direction == "i2t" else scores[:, q]
            winner = int(line.argmax())
            assert flip.instead == f"im{owner[winner] if direction == 'i2t' else winner}"
            assert flip.instead_score == pytest.approx(line[winner], abs=1e-12)
            assert flip.caption_number == (-1 if direction == "i2t" else sum(o == owner[q] for o in owner[:q]))
    ranked = [max(f.rank_a, f.rank_b) for f in result.flips if f.direction == "i2t"]
    assert ranked == sorted(ranked, reverse=True)


def test_a_model_equals_itself() -> None:
    a = gallery(30, 30)
    result = compare(a, a, resamples=20)
    assert not result.flips
    assert {(r.difference, r.low, r.high, r.better, r.worse, r.p_value) for r in result.rows} == {(0, 0, 0, 0, 0, 1)}


def test_captions_of_one_image_are_one_sign() -> None:
    """Five captions that all flip are one piece of evidence, not five."""
    a = replace(gallery(2, 10), image=torch.eye(2), text=torch.eye(2)[[0] * 5 + [1] * 5], image_of_text=torch.tensor([0] * 5 + [1] * 5))
    b = replace(a, text=torch.eye(2)[[1] * 10])
    row = compare(a, b, resamples=20).rows[3]
    assert (row.direction, row.k, row.better, row.worse, row.p_value) == ("t2i", 1, 1, 0, 1.0)
    assert (row.a, row.b) == (1.0, 0.5)


def test_ties_count_as_the_chance_they_are() -> None:
    a = replace(gallery(4, 4), image=torch.eye(4), text=torch.eye(4), image_of_text=torch.arange(4))
    b = replace(a, image=torch.ones(4, 4), text=torch.ones(4, 4))
    result = compare(a, b, resamples=20)
    assert result.rows[0].b == pytest.approx(0.25)
    assert result.rows[0].difference == pytest.approx(0.75)
    assert len(result.flips) == 8


def test_other_galleries_are_refused() -> None:
    a = gallery(6, 9)
    changed = {
        "6 images with 9 captions, and 5 with": without(a, np.arange(6) == 2),
        "image 1 is 'im1' in the first and 'x' in the second": replace(a, ids=("im0", "x", *a.ids[2:])),
        "belong to different images": replace(a, image_of_text=(a.image_of_text + 1) % 6),
        "in 1 captions, the first is of image": replace(a, digests=("f" * 64, *a.digests[1:])),
    }
    for message, b in changed.items():
        with pytest.raises(ValueError, match=message):
            compare(a, b)


def test_the_table_and_the_examples_name_both_sides() -> None:
    a = gallery(40, 40)
    result = compare(a, other_model(a), resamples=20)
    assert comparison_table(result, "one", "two", "t").row_count == 6
    lines = flip_lines(result, 2)
    heads = [line for line in lines if not line.startswith(" ")]
    assert len(heads) == 4
    assert sum(int(line.split(": ")[1].split()[0]) for line in heads) == len(result.flips)
    assert len(lines) <= 12
    (row,) = [r for r in result.rows if (r.direction, r.k) == ("i2t", 1)]
    first, second = (ranks(e.image, e.text, e.image_of_text)[0] for e in (a, a))
    assert compared(first, second, 1, resamples=5).p_value == 1.0
    assert row.better + row.worse == sum(f.direction == "i2t" for f in result.flips)


# ---- what was seen in training


def test_without_equals_the_cut_gallery() -> None:
    whole = gallery(30, 70)
    seen = np.random.default_rng().random(30) < 0.3
    seen[:2] = True, False
    result = score(whole, resamples=20)
    found = contamination(whole, result, seen, trained_on="x", counts={"any": int(seen.sum())}, sentence="s")
    kept = [i for i in range(30) if not seen[i]]
    texts = [j for j, o in enumerate(whole.image_of_text.tolist()) if not seen[o]]
    places = torch.tensor([kept.index(int(whole.image_of_text[j])) for j in texts])
    cut = replace(
        whole, ids=tuple(whole.ids[i] for i in kept), image=whole.image[kept], text=whole.text[texts], image_of_text=places,
        digests=tuple(whole.digests[j] for j in texts), captions=tuple(whole.captions[j] for j in texts),
    )  # fmt: skip
    smaller = without(whole, seen)
    assert (smaller.ids, smaller.digests, smaller.captions) == (cut.ids, cut.digests, cut.captions)
    assert torch.equal(smaller.image_of_text, places)
    assert found.removed == score(cut, resamples=20).rows
    for row in found.queries_only:
        counts = result.i2t if row.direction == "i2t" else result.t2i
        asked = [q for q, i in enumerate(counts.image.tolist()) if not seen[i]]
        assert (row.n_queries, row.n_candidates) == (len(asked), counts.n_candidates)
        if row.metric == "R@5":
            assert row.value == pytest.approx(hit_probability(counts, 5)[asked].mean(), abs=1e-12)
    assert {r.metric for r in found.queries_only} >= {"R@1", "MRR", "median_rank"}
    everyone = asking(result.i2t, np.ones(30, bool))
    assert metric_rows(everyone, resamples=20) == metric_rows(result.i2t, resamples=20)


@pytest.mark.parametrize("share", [0, 1])
def test_none_or_all_seen_leaves_nothing_to_set_apart(share: int) -> None:
    whole = gallery(10, 10)
    found = contamination(whole, score(whole, resamples=5), np.full(10, bool(share)), trained_on="x", counts={}, sentence="")
    assert (found.items, found.removed, found.queries_only) == (10, [], [])
    with pytest.raises(ValueError, match="mask of training items"):
        contamination(whole, score(whole, resamples=5), np.zeros(9, bool), trained_on="x", counts={}, sentence="")


# ---- the commands


@pytest.fixture
def cli(monkeypatch, tmp_path):
    """``cli("eval", ...)`` -> (exit code, stdout, the error), in a folder of its own."""
    from gradscope.cli import app
    from gradscope.console import out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(out, "width", 160)  # a console reads COLUMNS when it is made, which another test may have caused

    def run(*args: object) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, [str(a) for a in args])
        return result.exit_code, result.stdout, str(result.exception or "")

    return run


@pytest.fixture
def small(scenes_folder: Path, tmp_path: Path) -> Path:
    """Twelve test scenes with one to three captions; the first four are training items too."""
    folder = tmp_path / "small"
    folder.mkdir()
    rows = [json.loads(line) for line in (scenes_folder / "test.jsonl").read_text().splitlines()[:12]]
    for i, row in enumerate(rows):
        row["image"] = str(scenes_folder / row["image"])
        row["captions"] += [f"small picture {i}", f"scene number {i}"][: i % 3]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    return folder


COMMON = ("--device", "cpu", "--resamples", 20)


def test_eval_with_everything(cli, small, small_encoder, tmp_path) -> None:
    code, out, error = cli(
        "eval", small_encoder, "--data", small, "--trained-on", f"{small}:train", "--decode", "exact",
        "--save-embeddings", "e.safetensors", "--per-query", "q.csv", "--output", "r.json", *COMMON,
    )  # fmt: skip
    assert code == 0, error
    for words in ("test (12 images, 24 captions)", "true R@5", "R@1 by hardness", "R@1 by gallery size", "seen items removed: R@1",
                  "4 of 12 evaluated items were in training", "decode exact", "context 128 tokens"):  # fmt: skip
        assert words in " ".join(out.split()), words
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["protocol"]["images"] == content["protocol"]["expected"] == 12
    assert content["contamination"]["counts"]["any"] == 4
    assert {row["n_candidates"] for row in content["contamination"]["queries_only"]} == {12, 24}
    code, out, error = cli("eval", "e.safetensors", "--json", "--resamples", 20, "--per-query", "again.csv")
    assert code == 0, error
    again = json.loads(out)
    for key in ("metrics", "hardness", "gallery_curve", "tied_share", "protocol", "resamples", "encoder"):
        assert again[key] == content[key], key
    assert (tmp_path / "e.eval.json").is_file()
    with (tmp_path / "q.csv").open(newline="") as one, (tmp_path / "again.csv").open(newline="") as two:
        lines, others = list(csv.DictReader(one)), list(csv.DictReader(two))
    assert len(lines) == 36
    blank = {"caption": "", "winner_caption": ""}
    assert [{**line, **blank} for line in lines] == others, "a file of embeddings knows no strings"
    for direction, number in (("i2t", 12), ("t2i", 24)):
        hits = [float(line["hit_at_1"]) for line in lines if line["direction"] == direction]
        recall = next(r["value"] for r in content["metrics"] if (r["direction"], r["metric"]) == (direction, "R@1"))
        assert len(hits) == number
        assert np.mean(hits) == pytest.approx(recall, abs=1e-12)
    for line in lines:
        assert (line["winner_id"] == line["id"]) == (float(line["best_rank"]) == 1)
        assert float(line["winner_score"]) >= float(line["truth_score"])


def test_compare_two_encoders_and_two_files(cli, small, small_encoder, make_encoder, tmp_path) -> None:
    other = make_encoder(seed=3)
    code, out, error = cli("compare", small_encoder, other, "--data", small, "--output", "c.json", *COMMON)
    assert code == 0, error
    assert "text to image R@10" in out
    for name, encoder in (("a", small_encoder), ("b", other)):
        assert (
            cli("eval", encoder, "--data", small, "--save-embeddings", f"{name}.safetensors", "--output", f"{name}.json", *COMMON)[0]
            == 0
        )
    code, out, error = cli("compare", "a.safetensors", "b.safetensors", "--json", "--resamples", 20)
    assert code == 0, error
    stored, computed = json.loads(out), json.loads((tmp_path / "c.json").read_text())
    assert stored["rows"] == computed["rows"]
    strings = [{**flip, "caption": ""} for flip in computed["flips"]]
    assert stored["flips"] == strings
    assert stored["a"]["encoder"] == str(small_encoder)
    assert "would be ignored" in cli("compare", "a.safetensors", "b.safetensors", "--split", "test")[2]
    assert "galleries differ" in cli("compare", "a.safetensors", small_encoder, "--data", small, "--split", "train", *COMMON)[2]


def test_best_last_and_both(cli, small, small_encoder, make_encoder, tmp_path) -> None:
    run = tmp_path / "run"
    for step, encoder in ((2, make_encoder(seed=4)), (5, small_encoder)):
        shutil.copytree(encoder, run / "checkpoints" / f"step-{step:06d}" / "encoder")
    for name in ("recipe.toml", "provenance.json"):
        (run / name).write_text("{}" if name.endswith("json") else "")
    best = run / "checkpoints" / "best.json"
    assert "marks no best checkpoint" in cli("eval", "run", "--data", small, "--checkpoint", "best", *COMMON)[2]
    best.write_text('{"step": 2, "recall_at_1": 0.5, "checkpoint": "step-000002"}')
    code, out, error = cli("eval", "run", "--data", small, "--checkpoint", "both", *COMMON)
    assert code == 0, error
    assert "run, last on" in " ".join(out.split())
    assert "run, best on" in " ".join(out.split())
    assert "best on validation: step-000002" in out
    assert json.loads((run / "eval-small-test-best.json").read_text())["encoder"] == "run, best"
    files = {name: json.loads((run / f"eval-small-test{name}.json").read_text()) for name in ("", "-best")}
    expected = {}
    for name, encoder in (("", small_encoder), ("-best", run / "checkpoints" / "step-000002")):
        assert cli("eval", encoder, "--data", small, "--output", f"alone{name}.json", *COMMON)[0] == 0
        expected[name] = json.loads((tmp_path / f"alone{name}.json").read_text())["metrics"]
    assert {name: content["metrics"] for name, content in files.items()} == expected
    assert files[""]["metrics"] != files["-best"]["metrics"]
    best.write_text('{"step": 5, "recall_at_1": 0.5, "checkpoint": "step-000005"}')
    code, out, _ = cli("eval", "run", "--data", small, "--checkpoint", "both", *COMMON)
    assert (code, out.count("JSON: ")) == (0, 1)
    from gradscope.data.identity import save_items
    from gradscope.gallery import training_items

    (run / "arrays").mkdir()
    save_items(run / "arrays" / "train_items.npz", training_items(f"{small}:train"))
    for encoder in ("run", "run/checkpoints/step-000002"):
        assert "4 of 12 evaluated items were in training" in " ".join(cli("eval", encoder, "--data", small, *COMMON)[1].split())
    best.write_text('{"step": 0, "recall_at_1": 0.5, "checkpoint": null}')
    code, out, _ = cli("eval", "run", "--data", small, "--checkpoint", "both", *COMMON)
    assert (code, out.count("JSON: ")) == (0, 1)
    assert "best on validation was the start" in " ".join(out.split())
    for content, message in (
        ('{"checkpoint": null}', "before its first step"),
        ('{"checkpoint": "step-000009"}', "step-000009, is not on disk"),
        ("no json", "is damaged"),
    ):
        best.write_text(content)
        assert message in cli("eval", "run", "--data", small, "--checkpoint", "best", *COMMON)[2]


def test_wrong_settings_are_one_sentence(cli, small, small_encoder, tmp_path) -> None:
    common = ("--data", small, *COMMON)
    wrong = {
        ("--checkpoint", "best"): "needs a run directory",
        ("--checkpoint", "first"): "unknown value of --checkpoint 'first'",
        ("--decode", "slow"): "decode 'slow'",
        ("--split", "val"): "no split 'val'",
        ("--trained-on", "nothing"): "nothing",
        ("--trained-on", "no.npz"): "does not exist",
        ("--save-embeddings", "e.npz"): "ends in .safetensors",
    }
    for flags, message in wrong.items():
        code, _, error = cli("eval", small_encoder, *common, *flags)
        assert code == 1
        assert message in error, flags
    long = [json.loads(line) for line in (small / "test.jsonl").read_text().splitlines()]
    long[3]["captions"] = ["ball " * 300]
    (small / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    assert "1 of" in cli("eval", small_encoder, *common, "--on-too-long", "error")[2]
    code, out, error = cli("eval", small_encoder, *common)
    assert code == 0, error
    assert "1 captions cut" in " ".join(out.split())
    (tmp_path / "x.safetensors").write_bytes(b"junk")
    assert "damaged" in cli("eval", "x.safetensors")[2]
    assert "--data, --checkpoint would be ignored" in cli("eval", "x.safetensors", "--data", small, "--checkpoint", "best")[2]


def test_memory_is_announced_where_the_matrix_would_not_fit(capfd) -> None:
    from gradscope.cli.evaluate import announce_memory

    announce_memory(5_000, 5_000, 512)
    assert not capfd.readouterr().err
    announce_memory(60_000, 60_000, 64)
    said = " ".join(capfd.readouterr().err.split())
    assert "60,000 x 60,000 in tiles" in said
    assert "26.8 GiB" in said


def test_twice_the_same_with_dropout_and_batch_norm(small_encoder, scenes_folder) -> None:
    from torch import nn

    from gradscope.data.source import open_data
    from gradscope.encoders.load import load_encoder
    from gradscope.evaluate import evaluate

    encoder = load_encoder(str(small_encoder))
    encoder.model.visual.conv1 = nn.Sequential(encoder.model.visual.conv1, nn.BatchNorm2d(32), nn.Dropout(0.5))
    encoder.train()
    records = open_data(str(scenes_folder)).records("test")
    (one, _), (two, _) = (evaluate(encoder, records, resamples=20) for _ in range(2))
    assert one.dicts() == two.dicts()


def test_outputs_that_cannot_be_written_are_refused_before_the_work(cli, small, small_encoder, tmp_path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    evaluation = ("eval", small_encoder, "--data", small, *COMMON)
    for flag in ("--output", "--per-query", "--save-embeddings"):
        for name, reason in (("file/x.safetensors", "cannot be written"), ("folder", "is a folder")):
            code, out, error = cli(*evaluation, flag, name)
            assert code != 0
            assert reason in error, (flag, error)
            assert not out
    code, _, error = cli(*evaluation, "--save-embeddings", "new/x.bin")
    assert "ends in .safetensors" in error
    assert "cannot be written" in cli("compare", small_encoder, small_encoder, "--data", small, "--output", "file/x.json", *COMMON)[2]
    assert "is a folder" in cli("data", "check", small, "--output", "folder")[2]
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == []


def test_copies_and_equal_captions_are_said_beside_the_numbers(cli, tmp_path, small_encoder, scenes_folder) -> None:
    pictures = sorted((scenes_folder / json.loads(line)["image"]) for line in (scenes_folder / "test.jsonl").read_text().splitlines())
    rows = []
    for number, (which, caption) in enumerate([(0, "one"), (0, "two"), (1, "three"), (2, "Four"), (0, "five"), (3, "four")]):
        shutil.copy(pictures[which], tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "caption": caption})
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, error = cli("eval", small_encoder, "--data", "list.jsonl", "--output", "r.json", *COMMON)
    assert code == 0, error
    assert "2 of 6 records repeat the picture of an earlier one" in " ".join(out.split())
    notes = json.loads((tmp_path / "r.json").read_text())["protocol"]["notes"]
    assert any("1 of 6 records repeat the caption of an earlier one" in note for note in notes)


def test_data_sets_of_one_file_name_do_not_overwrite_each_other(cli, small, small_encoder, tmp_path) -> None:
    rows = (small / "test.jsonl").read_text().splitlines()
    for name, some in (("a", rows[:5]), ("b", rows[5:])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "list.jsonl").write_text("\n".join(some) + "\n")
    said = [cli("eval", small_encoder, "--data", f"{name}/list.jsonl", *COMMON) for name in ("a", "b", "a", "b")]
    assert [code for code, _, _ in said] == [0] * 4
    found = [json.loads(path.read_text()) for path in small_encoder.glob("eval-list-all*.json")]
    assert sorted(content["protocol"]["images"] for content in found) == [5, 7]
    assert {Path(content["protocol"]["data"]).parent.name for content in found} == {"a", "b"}


def test_a_comparison_counts_queries_that_are_not_finite(cli, small, small_encoder, tmp_path) -> None:
    from gradscope.embeddings_file import load_embeddings, save_embeddings

    code, _, error = cli("eval", small_encoder, "--data", small, "--save-embeddings", "a.safetensors", *COMMON)
    assert code == 0, error
    embedded, protocol = load_embeddings("a.safetensors")
    text = embedded.text.clone()
    text[3] = math.nan
    save_embeddings(Path("b.safetensors"), replace(embedded, text=text), protocol)
    code, out, error = cli("compare", "a.safetensors", "b.safetensors", "--resamples", 20)
    assert code == 0, error
    assert "b: 1 queries are not finite and count as misses" in out
    assert json.loads(Path("a-compare-small-test-with-b.json").read_text())["non_finite"] == {"a": 0, "b": 1}
    assert "JSON: a-compare-small-test-with-b.json" in out
    assert not Path("compare.json").exists()


def test_a_comparison_lies_beside_its_first_model_or_nowhere(tmp_path: Path) -> None:
    assert comparison_path(str(tmp_path), "runs/b", "docci", "test") == tmp_path / "compare-docci-test-with-b.json"
    assert comparison_path("ViT-B-16:openai", str(tmp_path), "docci", "test") is None


def test_a_width_over_the_split_names_the_split(cli, small, small_encoder) -> None:
    for command in ("audit", "what-if"):
        _, _, error = cli(command, small_encoder, "--data", small, "--width", 16, "--device", "cpu")
        words = "a width of 16 does not fit 12 pairs of split 'test'; choose --width 2 to 12, another --split, or more data."
        assert words in " ".join(error.split())


def test_where_every_item_was_trained_on_nothing_is_left(cli, small, small_encoder) -> None:
    code, out, error = cli("eval", small_encoder, "--data", small, "--split", "train", "--trained-on", f"{small}:train", *COMMON)
    assert code == 0, error
    assert "none left without them" in " ".join(out.split())


def test_the_name_of_a_split_leads_to_no_other_folder() -> None:
    from gradscope.evaluation_file import default_path

    assert default_path("tiny", "my/list.csv", "../a\\b") == Path("tiny-eval-list-..-a-b.json")
