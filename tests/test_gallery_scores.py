"""fp32 tiles: the bound of the error against float64, and counts that are those of float64 where fp32 alone would be wrong."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import Tensor

from gradscope.metrics.gallery_scores import TIE_TOLERANCE, Gallery, Tiles, open_tiles
from gradscope.metrics.ranks import ranks
from gradscope.metrics.winners import winners
from gradscope.products import Products, fast_fp32


@pytest.fixture(autouse=True)
def fresh_seed():
    torch.manual_seed(secrets.randbits(32))


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


def owners(n_images: int, n_texts: int) -> Tensor:
    return torch.cat([torch.arange(n_images), torch.randint(n_images, (n_texts - n_images,))])[torch.randperm(n_texts)]


def whole_matrix(images: Tensor, texts: Tensor, owner: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(greater, ties, tied positives, which queries are clear) of each direction from the full float64 matrix; finite rows only.

    Not clear is a query with a score at the very edge of the tie band, which two sums in float64 may put on either side.
    """
    scores = images.double() @ texts.double().T
    lengths = torch.outer(images.double().norm(dim=1), texts.double().norm(dim=1))
    positive = owner == torch.arange(len(images))[:, None]
    found = []
    for s, mine, length in ((scores, positive, lengths), (scores.T, positive.T, lengths.T)):
        edge = 1e-14 * length.amax(1, keepdim=True)
        best = s.masked_fill(~mine, -torch.inf).amax(1, keepdim=True)
        near = (s - best).abs() <= TIE_TOLERANCE
        clear = ((((s - best).abs() - TIE_TOLERANCE).abs() > edge) | (s == best)).all(1)
        found.append((((s > best + TIE_TOLERANCE) & ~mine).sum(1), (near & ~mine).sum(1), (near & mine).sum(1), clear))
    return found


def check(images: Tensor, texts: Tensor, owner: Tensor, block: int = 64) -> None:
    for counts, expected in zip(ranks(images, texts, owner, block=block), whole_matrix(images, texts, owner), strict=True):
        clear = expected[-1]
        assert clear.double().mean() > 0.9
        for name, value in zip(("greater", "ties", "positives"), expected, strict=False):
            assert torch.equal(getattr(counts, name)[clear], value[clear]), (counts.direction, name)


@pytest.mark.parametrize("width", [1, 3, 64, 257, 768])
@pytest.mark.parametrize("spread", [1.0, 0.02])
def test_the_error_is_within_the_bound(width: int, spread: float):
    """Rows all of one sign add up without cancelling; norms differ by orders of magnitude."""
    centre = torch.rand(width)
    images, texts = (centre + spread * torch.randn(n, width) for n in (100, 130))
    images, texts = images * 10.0 ** torch.randn(100, 1), texts.double() * 10.0 ** torch.randn(130, 1)
    gallery = Gallery.of(images, texts, owners(100, 130))
    with fast_fp32(images.device, *gallery.shapes(64)) as products:
        tiles = Tiles(gallery, 64, products)
        assert tiles.fp32
        for i in (0, 64):
            for j in (0, 64, 128):
                single, double = tiles.single(i, j).double(), tiles.double(i, j)
                away = torch.where(torch.isinf(double), 0.0, single - double).abs()
                assert torch.equal(torch.isinf(single), torch.isinf(double))
                assert (away <= tiles.errors[0][i : i + 64, None]).all()
                assert (away <= tiles.errors[1][j : j + 64]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 257, 768])
def test_scores_formed_again_are_near_and_then_exact(dtype: torch.dtype, width: int):
    """Paired rows of one sign and of very different length, more of them than are taken at a time."""
    images, texts = ((torch.rand(100, width) + 0.5) * 10.0 ** torch.randn(100, 1) for _ in range(2))
    gallery = Gallery.of(images.to(dtype), texts.to(dtype).double(), torch.arange(100))
    image, text = torch.randint(100, (150,)), torch.randint(100, (150,))
    pairs = zip(gallery.images[image].double(), gallery.texts[text].double(), strict=True)
    true = torch.stack([(a * b).sum() for a, b in pairs])
    lengths = torch.stack([x.double().norm(dim=1)[k] for x, k in ((gallery.images, image), (gallery.texts, text))]).prod(0)
    assert ((gallery.exact(image, text) - true).abs() <= 1e-13 * lengths).all()
    away = (gallery.nearly(image, text) - true).abs()
    assert (away <= 4.01 * 2.0**-24 * lengths).all()
    tiles = Tiles(gallery, 64, None)
    assert (away <= tiles.close * tiles.errors[0][image]).all()
    assert (away <= tiles.close * tiles.errors[1][text]).all()


@pytest.mark.parametrize("block", [50, 64, 1024])
def test_a_padded_tile_is_the_tile_and_minus_infinity(block: int):
    gallery = Gallery.of(torch.randn(150, 20), torch.randn(190, 20), owners(150, 190))
    with open_tiles(gallery, block) as tiles, open_tiles(gallery, block, positives=True) as whole:
        i, j = (0, 0) if block == 1024 else (100 // block * block, 128 // block * block)
        tile, padded = tiles.double(i, j), tiles.padded(i, j)
        rows, columns = tile.shape
        assert [size % 64 for size in padded.shape] == [0, 0]
        assert torch.isneginf(padded[rows:]).all()
        assert torch.isneginf(padded[:, columns:]).all()
        assert torch.allclose(padded[:rows, :columns].double(), tile, rtol=0, atol=1e-4)
        own = gallery.owner[j : j + columns] == torch.arange(i, i + rows)[:, None]
        assert torch.equal(torch.isneginf(tile), own)
        assert torch.isfinite(whole.double(i, j)).all()


@pytest.mark.parametrize(("n_images", "n_texts", "block"), [(150, 150, 64), (130, 390, 100), (200, 201, 1024)])
@pytest.mark.parametrize("noise", [0.3, 2.0, 1e3])
def test_counts_are_those_of_float64(n_images: int, n_texts: int, block: int, noise: float):
    images, owner = unit(torch.randn(n_images, 48) + 1.0), owners(n_images, n_texts)
    texts = unit(images[owner] + noise * torch.randn(n_texts, 48) / 7.0)
    check(images, texts, owner, block)


def near_twins(apart: Tensor) -> tuple[Tensor, Tensor]:
    """160 pairs; a text of half of them differs from one of the other half by ``apart``, up or down, in its score with both images.

    By exactly that and not by a random product, which would come within a rounding of ``TIE_TOLERANCE`` in some draws: float64 sums
    of another order then count otherwise. The images of a quarter are exact twins.
    """
    images = unit(torch.randn(160, 96).double())
    texts = unit(images + 0.05 * torch.randn(160, 96))
    left, right = torch.randperm(160).view(2, 80)
    images[left[:40]] = images[right[:40]]
    both = torch.stack([images[left], images[right]], dim=1)
    aside = torch.randn(80, 96, 1).double()
    signs = torch.where(torch.rand(80, 1, 1) < 0.5, -1.0, 1.0).double()
    step = aside + torch.linalg.pinv(both, rtol=1e-9) @ (signs - both @ aside)
    texts[left] = texts[right] + apart[:, None] * step[:, :, 0]
    return images, texts


def test_scores_that_fp32_cannot_tell_apart():
    """Around every positive there are negatives that differ from it by 1e-15 to 1e-6, on either side of what counts as tied."""
    tied, told_apart = torch.empty(40).uniform_(-15, -12.2), torch.empty(40).uniform_(-11.8, -6)
    check(*near_twins(10.0 ** torch.cat([tied, told_apart])[torch.randperm(80)].double()), torch.arange(160))


def test_twins_and_several_captions_in_any_order():
    images = unit(torch.randn(90, 32))
    owner = torch.arange(90).repeat(3)
    texts = images[owner // 2 * 2].clone()
    reference = ranks(images, texts, owner, block=64)
    assert reference[0].tied_share > 0.4
    for block in (32, 200):
        rows, columns = torch.randperm(90), torch.randperm(270)
        moved = ranks(images[rows], texts[columns], torch.argsort(rows)[owner[columns]], block=block)
        for one, other, order in zip(reference, moved, (rows, columns), strict=True):
            for name in ("greater", "ties", "positives"):
                assert torch.equal(getattr(one, name)[order], getattr(other, name))


def test_collapsed_embeddings_tie_with_all():
    rows = unit(torch.randn(1, 64)).repeat(200, 1)
    for counts in ranks(rows, rows, torch.arange(200), block=64):
        assert (counts.greater == 0).all()
        assert (counts.ties == 199).all()


def test_rows_of_any_length():
    images = torch.randn(150, 40) * 10.0 ** torch.empty(150, 1).uniform_(-3, 3)
    texts = torch.randn(150, 40) * 10.0 ** torch.empty(150, 1).uniform_(-3, 3)
    expected = whole_matrix(images, texts, torch.arange(150))
    for counts, (greater, _, _, clear) in zip(ranks(images, texts, torch.arange(150), block=64), expected, strict=True):
        assert clear.double().mean() > 0.9
        assert torch.equal(counts.greater[clear], greater[clear])


@pytest.mark.parametrize("length", [1e-25, 1e17])
def test_lengths_at_which_fp32_would_fail(length: float):
    """Products underflow to nothing, so that all tie, or are too large for fp32 sums."""
    images, texts = length * unit(torch.randn(140, 20)), length * unit(torch.randn(140, 20))
    check(images, texts, torch.arange(140))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_rows_that_are_not_finite_change_nobody_elses_count(bad: float):
    images, owner = unit(torch.randn(150, 24)), owners(150, 300)
    texts = unit(images[owner] + 0.3 * torch.randn(300, 24))
    lost = torch.zeros(150, dtype=torch.bool)
    lost[torch.randperm(150)[:9]] = True
    broken = images.clone()
    broken[lost, 3] = bad
    found = ranks(broken, texts, owner, block=64)
    scores = images.double() @ texts.double().T
    scores[lost] = -torch.inf
    mine = owner == torch.arange(150)[:, None]
    best = scores.masked_fill(~mine, -torch.inf).amax(1)
    assert torch.equal(found[0].greater[~lost], ((scores > best[:, None]) & ~mine).sum(1)[~lost])
    own = scores[owner, torch.arange(300)]
    assert torch.equal(found[1].greater[~lost[owner]], ((scores > own) & ~mine).sum(0)[~lost[owner]])
    assert (found[0].non_finite, found[1].non_finite) == (9, int(lost[owner].sum()))


def test_without_true_fp32_every_tile_is_float64():
    gallery = Gallery.of(unit(torch.randn(150, 8)), unit(torch.randn(150, 8)), torch.arange(150))
    coarse = Products(setting="highest", error=1e-4, words="TF32")
    assert not Tiles(gallery, 64, coarse).fp32
    assert not Tiles(gallery, 64, None).fp32


# ---- who won


def check_winners(images: Tensor, texts: Tensor, owner: Tensor, block: int = 64) -> None:
    scores, mine = images.double() @ texts.double().T, owner == torch.arange(len(images))[:, None]
    for won, s, own in zip(winners(images, texts, owner, block=block), (scores, scores.T), (mine, mine.T), strict=True):
        for kind, index, score in ((own, won.truth, won.truth_score), (~own, won.rival, won.rival_score)):
            allowed = s.masked_fill(~kind, -torch.inf)
            best = allowed.amax(1)
            first = (allowed >= best[:, None] - TIE_TOLERANCE).byte().argmax(1)
            assert torch.equal(torch.from_numpy(index), first)
            assert torch.allclose(torch.from_numpy(score), best, rtol=0, atol=1e-13)


@pytest.mark.parametrize("noise", [0.3, 2.0, 1e3])
@pytest.mark.parametrize("block", [50, 1024])
def test_winners_are_those_of_float64(noise: float, block: int):
    images, owner = unit(torch.randn(140, 300) + 1.0), owners(140, 280)
    check_winners(images, unit(images[owner] + noise * torch.randn(280, 300) / 17.0), owner, block)


def test_winners_among_twins_and_scores_that_fp32_cannot_tell_apart():
    check_winners(*near_twins(10.0 ** torch.empty(80).uniform_(-9, -6).double()), torch.arange(160))


def test_where_all_tie_the_first_is_named():
    rows = unit(torch.randn(1, 64)).repeat(200, 1)
    check_winners(rows, rows, torch.arange(200))


def test_rows_that_are_not_finite_win_nothing():
    images, texts = unit(torch.randn(150, 24)), unit(torch.randn(150, 24))
    images[[3, 77]] = torch.nan
    i2t, t2i = winners(images, texts, torch.arange(150), block=64)
    assert (i2t.winner[[3, 77]] == -1).all()
    assert not set(t2i.rival) & {3, 77}
    keep = torch.tensor([i for i in range(150) if i not in (3, 77)])
    scores = (images[keep].double() @ texts.double().T).masked_fill(keep[:, None] == torch.arange(150), -torch.inf)
    assert torch.equal(torch.from_numpy(t2i.rival), keep[scores.argmax(0)])
    assert torch.equal(torch.from_numpy(i2t.rival)[keep], scores.argmax(1))


@pytest.mark.parametrize("fp32", [False, True])
def test_the_rival_s_score_is_the_largest_also_where_one_in_another_tile_ties_and_is_named(fp32: bool):
    rows = 140 if fp32 else 100  # fewer scores are float64 at once
    images, texts = unit(torch.randn(rows, 24).double()), unit(torch.randn(rows, 24).double())
    texts[2], texts[90] = images[0], images[0] * (1 + 5e-13)
    i2t, _ = winners(images, texts, torch.arange(rows), block=64)
    assert i2t.rival[0] == 2
    assert i2t.rival_score[0] == pytest.approx(1 + 5e-13, abs=1e-14)
