"""Each rule catches a run that is broken on purpose; no rule speaks of a healthy one, nor of too few measured batches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import random
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from hand_run import WIDTH, hand_run
from torch import Tensor, nn
from torch.nn import functional as F

from gradscope.diagnose import Diagnosis, diagnose, heading, look
from gradscope.following import Following
from gradscope.gates import evaluate
from gradscope.probe import Probe
from gradscope.recipe import resolve
from gradscope.rules import SEVERITIES, Finding, rules
from gradscope.run_view import View
from gradscope.runlog import RunLog
from gradscope.train import train
from gradscope.verdict import sentences, summarise
from gradscope.watch import facts

pytestmark = pytest.mark.usefixtures("one_thread")


def ids(diagnosis: Diagnosis) -> set[str]:
    return {finding.id for finding in diagnosis.findings}


@dataclass(frozen=True, kw_only=True)
class Broken:
    """``also`` may be found as well: the same cause seen from another side."""

    rule: str
    how: str
    readings: dict[tuple[str, str, str], Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)


SATURATED = {("saturation", "below_1e-3", "*"): 1.0, ("residual", "log10_mean.*", "*"): -5.0}
HN = {"objective.name": "hn", "objective.gamma": 0.5}
BY_HAND = [
    Broken(rule="GS001", how="every batch under 1e-3 at width 64", readings=SATURATED),
    Broken(rule="GS002", how="every batch under 1e-3 at width 256", readings=SATURATED, more={"facts": {"width": 256}}),
    Broken(rule="GS004", how="loss printed 0 in every batch", readings={("loss", "trained", "*"): 0.0}),
    Broken(rule="GS005", how="own cell 0 in 80 % of rows", readings={("zeros", "positive_zero.*", "*"): 0.8}),
    Broken(
        rule="GS006",
        how="90 % of rows done, 2 of 64 carry the gradient",
        readings={("saturation", "rows_below_1e-3.*", "*"): 0.9, ("saturation", "effective_rows.*", "*"): 2.0},
    ),
    Broken(rule="GS007", how="fp32 norm 0 in every batch", readings={("zeros", "naive_norm_zero", "*"): 1.0}),
    Broken(rule="GS008", how="whole gradient 0 in every batch", readings={("zeros", "all_zero.parameters", "*"): 1.0}),
    Broken(rule="GS009", how="70 % of entries under eps", readings={("optimizer", "eps_dominated", "total"): 0.7}),
    Broken(rule="GS010", how="40 % of entries stale", readings={("optimizer", "stale", "total"): 0.4}),
    Broken(
        rule="GS011",
        how="fp16 towers, 60 % zeros among reached entries",
        readings={("zeros", "entries_reached.parameters", "*"): 0.6},
        more={"recipe": {"train.precision": "fp16"}},
    ),
    Broken(
        rule="GS012",
        how="every third step skipped",
        more={"columns": {"skipped": lambda step: int(step % 3 == 0), "grad_norm": lambda step: None if step % 3 == 0 else 0.4}},
    ),
    Broken(rule="GS012", how="loss scale ends at 2^-4", more={"columns": {"loss_scale": lambda step: 2.0 ** (16 - step / 2)}}),
    Broken(
        rule="GS013",
        how="gradient of rounded logits: agreement .9999, length +- 3 %",
        readings={("hooks", "agreement", "*"): 0.9999, ("hooks", "factor", "*"): lambda step: 0.97 if step % 4 == 1 else 1.03},
    ),
    Broken(rule="GS014", how="saturated, scale at its clamp", readings={**SATURATED, ("scale", "at_limit", ""): 1.0}, also=("GS001",)),
    Broken(rule="GS015", how="scale from 100 to 50", more={"columns": {"scale": lambda step: 100 - 1.25 * step}}),
    Broken(rule="GS016", how="InfoNCE at ln 64 throughout", readings={("loss", "true", "infonce"): math.log(WIDTH)}),
    Broken(
        rule="GS017",
        how="all anchors beaten by a margin of 40 logits, none without it",
        readings={("gap", "violated_with_margin.*", "hn"): 1.0, ("captions", "margin_logits", ""): 40.0, ("loss", "true", "hn"): 25.0},
        more={"recipe": HN},
    ),
    Broken(rule="GS018", how="a quarter of the captions repeat", readings={("captions", "exact_duplicates", ""): 16.0}),
    Broken(
        rule="GS019",
        how="80 % have a near-duplicate that stands out",
        readings={("captions", "near_duplicates", ""): 0.8, ("captions", "hardest_mean", ""): 0.97},
    ),
    Broken(rule="GS020", how="120 of 160 captions cut", more={"facts": {"truncated_captions": 120}}),
    Broken(rule="GS021", how="rate 0", more={"columns": {"lr": 0.0}}),
    Broken(
        rule="GS021",
        how="updates of 1e-9 of the weights",
        readings={("optimizer", f"update_ratio.{t}", "total"): 1e-9 for t in ("image", "text")},
    ),
    Broken(
        rule="GS021",
        how="text tower never updated, though a gradient reaches it",
        readings={("optimizer", "update_ratio.text", "total"): 0.0},
    ),
    Broken(
        rule="GS016",
        how="comes down to chance and sits there",
        readings={("loss", "true", "infonce"): lambda step: max(math.log(WIDTH), 9.0 - step)},
        more={"steps": 60},
    ),
    Broken(rule="GS022", how="updates of half the weights", readings={("optimizer", "update_ratio.text", "total"): 0.5}),
    Broken(rule="GS023", how="limit 0.01 at norms of 0.4", more={"recipe": {"train.grad_clip": 0.01}}),
    Broken(rule="GS023", how="norm 0.4 clipped to 0.1 in another loop", readings={("accumulation", "norm_clipped", "total"): 0.1}),
    Broken(rule="GS024", how="3 tensors without a gradient", readings={("zeros", "unused.parameters", "*"): 3.0}),
    Broken(rule="GS024", how="text tower's gradient 0 in every batch", readings={("gradient", "norm.text", "*"): 0.0}),
    Broken(rule="GS025", how="loss nan from step 30 on", more={"columns": {"loss": lambda step: math.nan if step >= 30 else 0.4}}),
    Broken(
        rule="GS025", how="infinite gradient norm once", more={"columns": {"grad_norm": lambda step: math.inf if step == 7 else 0.4}}
    ),
    Broken(rule="GS026", how="a quantity failed at every step", readings={("gap", "failed", ""): 1.0}),
    Broken(rule="GS026", how="probe on, nothing read", more={"probed": False}),
    Broken(rule="GS026", how="agreement 0.7 with the objective's gradient", readings={("hooks", "agreement", "*"): 0.7}),
    Broken(
        rule="GS027",
        how="8 narrow micro-batches, residual 1e-4",
        readings={("residual", "log10_mean.*", "*"): -4.0},
        more={"recipe": {"train.accumulate": 8, "train.accumulate_mode": "narrow"}},
    ),
    Broken(
        rule="GS028",
        how="training loss 0.01, validation from .52 to .40",
        more={"columns": {"loss": 0.01}, "evals": [(0, 0.50, 0.45), (20, 0.52, 0.47), (40, 0.40, 0.35)]},
    ),
    Broken(
        rule="GS028",
        how="training loss 0.01, validation R@1 3 %",
        more={"columns": {"loss": 0.01}, "evals": [(0, 0.02, 0.01), (40, 0.03, 0.02)]},
    ),
    Broken(rule="GS030", how="one candidate", readings={**SATURATED, ("loss", "true", "*"): 0.0}, more={"facts": {"width": 1}}),
    Broken(
        rule="GS031",
        how="scale 400, half of the anchors done",
        readings={("saturation", "rows_below_1e-3.*", "*"): 0.6},
        more={"columns": {"scale": 400.0}},
    ),
    Broken(
        rule="GS031",
        how="scale from 10 to 50, saturated",
        readings=SATURATED,
        more={"columns": {"scale": lambda step: 10.0 + step}},
        also=("GS001",),
    ),
    Broken(
        rule="GS032",
        how="no gradient at the embeddings, residual .2",
        readings={("hooks", "agreement", "*"): math.nan, ("hooks", "factor", "*"): math.nan},
        more={"columns": {"grad_norm": 0.0}},
    ),
    Broken(rule="GS029", how="loss from 0.4 to 2.5 and stays", more={"columns": {"loss": lambda step: 0.4 if step < 25 else 2.5}}),
]


@pytest.mark.parametrize("probe_set", ["loss", "default"])
@pytest.mark.parametrize(("lost", "found"), [(9, False), (10, True), (12, True)])
def test_steps_without_a_gradient_are_weighed_against_steps_that_were_read(
    lost: int, found: bool, probe_set: str, tmp_path: Path
) -> None:
    """Ten are read. How many rows each of them has depends on the set, and says nothing."""
    other = {("hooks", key, "hn"): 0.5 if probe_set == "default" else None for key in ("agreement", "factor")}
    path = hand_run(tmp_path / "run", other, recipe={"probe.set": probe_set}, steps=20)
    failed = {"quantity": "heads", "key": "failed", "term": "", "value": 1.0, "unit": "ranks", "stamps": ""}
    with RunLog.reopen(path, step=20, provenance={}) as log:
        log.write_readings([{"step": 20 + k, **failed} for k in range(lost)])
        log.console("step 20: 'heads' of the probe failed: RuntimeError: no gradient passed by at text: the hook is dead")
    assert ("GS032" in [finding.id for finding in diagnose(look(path)).findings]) == found


@pytest.mark.parametrize("broken", BY_HAND, ids=lambda b: f"{b.rule}-{b.how.replace(' ', '-')}")
def test_a_rule_finds_what_was_broken_and_nothing_else(broken: Broken, tmp_path: Path) -> None:
    view = look(hand_run(tmp_path / "run", broken.readings, **broken.more))
    diagnosis = diagnose(view)
    assert ids(diagnosis) == {broken.rule, *broken.also}
    finding = next(f for f in diagnosis.findings if f.id == broken.rule)
    assert finding.evidence
    assert all(part.where for part in finding.evidence)
    assert all((finding.cause, finding.action, finding.effect, finding.verify))
    for each in diagnosis.findings:
        check_words(each)
    check_elsewhere(view)


@functools.cache  # building the commands takes longer than anything else here
def options() -> frozenset[str]:
    """Every flag of the commands that remedies name."""
    from typer.main import get_command

    from gradscope.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    named = ("train", "what-if", "check", "diagnose")
    return frozenset(flag for name in named for parameter in commands[name].params for flag in parameter.opts)


def check_words(finding: Finding) -> None:
    """Every flag, --set key and command in the words of a finding is one of ours."""
    words = f"{finding.cause} {finding.action} {finding.verify}"
    assert not set(re.findall(r"--[a-z][a-z-]+", words)) - options()
    recipe = dataclasses.asdict(resolve({}, {}))
    for table, key in re.findall(r"--set (\w+)\.(\w+)", words):
        assert key in recipe[table]
    assert set(re.findall(r"gradscope ([a-z-]+)", words)) <= COMMANDS


def check_elsewhere(view: View) -> None:
    """The same run as gradscope.Probe would have logged it in a loop that is not ours: no remedy is one of our flags."""
    for finding in diagnose(dataclasses.replace(view, facts={**view.facts, "loop": "not gradscope's"})).findings:
        flags = set(re.findall(r"--[a-z][a-z-]+", finding.action))
        named = {"GS005": {"--loss-form"}, "GS001": {"--accum-freq"}, "GS030": {"--accum-freq"}}.get(
            finding.id, set()
        )  # said to be of gradscope train
        assert flags <= named, finding


COMMANDS = {"what-if", "figure", "zeros", "audit", "data", "caption-geometry", "check", "diagnose", "compare"}


#: One value is enough for these, which the rule's docstring says.
ONE_IS_ENOUGH = {"GS020", "GS025", "GS026", "GS030"}


@pytest.mark.parametrize("broken", BY_HAND, ids=lambda b: f"{b.rule}-{b.how.replace(' ', '-')}")
def test_no_rule_speaks_of_too_few_measured_batches(broken: Broken, tmp_path: Path) -> None:
    """The same run after five steps, each of them measured: one fewer than any rule's least number."""
    found = ids(diagnose(look(hand_run(tmp_path / "run", broken.readings, **{**broken.more, "steps": 5, "every": 1}))))
    assert found <= ONE_IS_ENOUGH


# ---- runs that really happened


@pytest.fixture(scope="session")
def own_captions(scenes_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[int], str]], Path]:
    """``own_captions(of_row)``: the scenes' pictures with captions of one's own, 64 of them."""

    def make(of_row: Callable[[int], str]) -> Path:
        folder = tmp_path_factory.mktemp("own")
        pictures = sorted(scenes_folder.rglob("images/train/*.jpg"))[:64]
        rows = [{"image": str(path), "caption": of_row(i)} for i, path in enumerate(pictures)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder / "train.jsonl"

    return make


@pytest.fixture
def trained(scenes_folder: Path, small_encoder: Path, tmp_path: Path) -> Callable[..., Diagnosis]:
    """``trained({"train.lr": 1.0})``: six real steps of the small encoder with some settings changed, and what the rules say."""

    def run(changes: dict[str, Any] | None = None) -> Diagnosis:
        base = {
            "data.name": str(scenes_folder),
            "encoder.name": str(small_encoder),
            "train.device": "cpu",
            "train.batch_size": 8,
            "train.max_steps": 6,
            "train.lr": 1e-3,
            "probe.log_grads": True,
            "probe.every": 1,
            "probe.second_backward": False,
        }
        with contextlib.suppress(FloatingPointError):  # what a broken run ends with
            train(resolve({}, {**base, **(changes or {})}), tmp_path / "run", quiet=True)
        return diagnose(look(tmp_path / "run"))

    return run


def test_saturated_by_a_narrow_softmax(trained: Callable[..., Diagnosis]) -> None:
    """The pretrained encoder with one negative per anchor, accumulated: what users of tiny batches run."""
    settings = {"train.batch_size": 2, "train.accumulate": 4, "train.accumulate_mode": "narrow", "train.lr": 1e-5}
    diagnosis = trained({"encoder.name": "tiny", **settings})
    assert {"GS001", "GS027", "GS004", "GS005"} <= ids(diagnosis) <= {"GS001", "GS027", "GS004", "GS005", "GS009", "GS010", "GS014"}
    narrow = next(f for f in diagnosis.findings if f.id == "GS001")
    assert "--accumulate 4 --accumulate-mode cached" in narrow.action


@pytest.mark.parametrize(
    ("rule", "changes", "also"),
    [
        ("GS009", {"train.eps": 1.0}, set()),
        ("GS022", {"train.lr": 1.0}, {"GS010"}),
        ("GS023", {"train.grad_clip": 1e-3, "train.max_steps": 20, "probe.every": 20}, set()),
        ("GS025", {"train.lr": 1e9}, set()),
    ],
)
def test_settings_that_break_a_run(trained: Callable[..., Diagnosis], rule: str, changes: dict, also: set[str]) -> None:
    assert {rule} <= ids(trained(changes)) <= {rule} | also


def test_repeated_captions(trained: Callable[..., Diagnosis], own_captions: Callable) -> None:
    diagnosis = trained({"data.name": str(own_captions(lambda row: f"a picture of kind {row % 3}")), "train.epochs": 9})
    assert "GS018" in ids(diagnosis) <= {"GS018", "GS019"}


def test_captions_beyond_the_context(trained: Callable[..., Diagnosis], make_encoder: Callable[..., Path]) -> None:
    short = json.loads(json.dumps(SMALL))
    short["model_cfg"]["text_cfg"]["context_length"] = 16
    assert ids(trained({"encoder.name": str(make_encoder(config=short))})) == {"GS020"}


# ---- loops of others, watched by gradscope.Probe


class Towers(nn.Module):
    """Two linear towers that start as the identity, so that the noise between the pairs decides how hard they are."""

    def __init__(self, *, width: int = 64, scale: float = 20.0) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(width, width), nn.Linear(width, width)
        self.logit_scale = nn.Parameter(torch.tensor(scale).log())
        for tower in (self.image, self.text):
            nn.init.eye_(tower.weight)
            nn.init.zeros_(tower.bias)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(x), dim=1), F.normalize(self.text(y), dim=1), self.logit_scale.exp()


def clip_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * image @ text.T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of somebody else: noisy pairs, AdamW, the loss of your choice."""

    width: int = 32
    noise: float = 1.5
    scale: float = 20.0
    lr: float = 1e-4
    steps: int = 8
    loss: Callable[..., Tensor] = clip_loss
    spoil: Callable[[Tensor], Tensor] = lambda y: y
    change: Callable[[Towers], None] = lambda towers: None
    held: Callable[[Towers], nn.Module] = lambda towers: towers
    probe: dict[str, Any] = field(default_factory=dict)

    def __call__(self, path: Path, seed: int = 0) -> Diagnosis:
        generator = torch.Generator().manual_seed(seed)
        towers = Towers(scale=self.scale)
        self.change(towers)
        optimizer = torch.optim.AdamW(self.held(towers).parameters(), lr=self.lr)
        with Probe(towers, output=path, every=1, **{"probe_set": "full", "second_backward": False, **self.probe}):
            for step in range(self.steps):
                x = torch.randn(self.width, 64, generator=generator)
                y = x + self.noise * torch.randn(self.width, 64, generator=generator)
                optimizer.zero_grad()
                (self.fading(step) * self.loss(*towers(x, self.spoil(y)))).backward()
                optimizer.step()
        return diagnose(look(path))

    def fading(self, step: int) -> float:
        return 1.0


class Fading(Loop):
    """The gradient falls by four decades after the first steps, as it does when a softmax saturates."""

    def fading(self, step: int) -> float:
        return 1.0 if step < 4 else 1e-4


def spare(towers: Towers) -> None:
    towers.spare = nn.Linear(3, 3)


def in_bf16(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return clip_loss(image, text, scale)


def swap_two(rows: Tensor) -> Tensor:
    return torch.cat([rows[1:2], rows[:1], rows[2:]])


def one_place(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    return clip_loss(image, text, scale) + 100 * (image[:, 0] - 1).square().mean()


LOOPS = [
    (
        Loop(width=128, noise=0.05, scale=40.0),
        "GS002",
        "128 candidates, pairs almost alike",
        {"GS004", "GS005", "GS007", "GS009", "GS010"},
    ),
    (Loop(width=8, noise=0.0, scale=90.0), "GS007", "logit gap of 80", {"GS001", "GS004", "GS005", "GS009"}),
    (Loop(width=8, noise=0.0, scale=600.0), "GS008", "logit gap of 500", {"GS001", "GS004", "GS007", "GS009", "GS031"}),
    (Loop(width=1), "GS030", "one pair at a time", set()),
    (
        Loop(width=16, noise=0.3, scale=1000.0),
        "GS031",
        "a scale of 1000",
        {"GS001", "GS004", "GS005", "GS006", "GS007", "GS008", "GS009"},
    ),
    (Loop(loss=lambda *towers: 0 * clip_loss(*towers)), "GS032", "a loss times 0", {"GS008", "GS009", "GS016", "GS021"}),
    (Loop(loss=lambda image, text, scale: clip_loss(image.detach(), text.detach(), scale)), "GS032", "both towers detached", set()),
    (Loop(loss=lambda image, text, scale: clip_loss(image, text.detach(), scale)), "GS032", "one tower detached", set()),
    (Loop(width=64, noise=0.05, scale=40.0, spoil=swap_two), "GS006", "two pairs of 64 swapped, all others solved", {"GS005"}),
    (
        Loop(steps=34, lr=0.03, noise=0.5, spoil=lambda rows: rows.roll(1, 0)),
        "GS015",
        "every picture with its neighbour's caption",
        {"GS016", "GS022"},
    ),
    (Fading(steps=10), "GS010", "loss multiplied by 1e-4 from step 5 on", {"GS026"}),
    (
        Loop(width=8, noise=0.05, scale=99.9999, lr=1e-9, probe={"scale_max": 99.9999}),
        "GS014",
        "scale at the clamp, pairs almost alike",
        {"GS001", "GS004", "GS005", "GS007", "GS009", "GS021"},
    ),
    (Loop(change=spare), "GS024", "a layer that the loss does not reach", set()),
    (Loop(held=lambda towers: towers.image), "GS021", "an optimizer that holds one tower only", set()),
    (Loop(loss=in_bf16), "GS013", "the whole loss under autocast", set()),
    (Loop(loss=one_place), "GS026", "a second loss term", set()),
    (Loop(loss=lambda *towers: 65536 * clip_loss(*towers)), "GS026", "a loss scale that the probe is not told", set()),
]


@pytest.mark.parametrize(("loop", "rule", "how", "also"), LOOPS, ids=[f"{rule}-{how.replace(' ', '-')}" for _, rule, how, _ in LOOPS])
def test_loops_of_others_that_are_broken(loop: Loop, rule: str, how: str, also: set[str], tmp_path: Path) -> None:
    assert {rule} <= ids(loop(tmp_path / "run")) <= {rule} | also


def unnormalised(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The model returns unit rows; the loss compares others, of lengths from 0.2 to 3."""
    lengths = torch.linspace(0.2, 3, len(image))[:, None]
    return clip_loss(image * lengths, text * lengths.flip(0), scale)


@pytest.mark.parametrize(
    "loss",
    [unnormalised, lambda image, text, scale: clip_loss(image, text, torch.tensor(50.0))],
    ids=["raw rows", "a temperature outside of the model"],
)
def test_what_is_not_trained_is_not_judged(loss: Callable[..., Tensor], tmp_path: Path) -> None:
    """diagnose, check, watch and the verdict say so in place of a state; the number of GS026 stands below."""
    diagnosis = Loop(loss=loss, scale=5.0, steps=10)(tmp_path / "run")
    assert "GS026" in ids(diagnosis)
    word = "not judged: what was read is not what is trained (GS026)"
    first, second = heading(diagnosis).splitlines()
    assert first.endswith(f"(run; InfoNCE; width 32): {word}")
    assert second.startswith("cosine with the objective's own gradient, median: 0.")
    limits = {"max-saturated-rows": 0.5, "min-residual": 1e-9, "max-loss": 9.0, "max-skipped": 0.5}
    outcomes = evaluate(diagnosis.view, limits)
    assert [(o.state, o.detail) for o in outcomes[:3]] == [("unevaluated", word)] * 3
    assert outcomes[3].state == "passed", "which steps were skipped is no reading"
    following = Following(tmp_path / "run")
    following.poll()
    assert f"InfoNCE: {word}" in facts(following)
    assert f"InfoNCE at width 32: {word}" in sentences(summarise(tmp_path / "run"))[0]


def test_a_rate_of_zero_guesses(tmp_path: Path) -> None:
    diagnosis = Loop(lr=0.0, scale=1.0, steps=31, spoil=lambda rows: rows.roll(1, 0))(tmp_path / "run")
    assert ids(diagnosis) == {"GS016", "GS021"}
    assert next(f for f in diagnosis.findings if f.id == "GS016").cause.startswith("The learning rate is 0")


def test_the_step_whose_gradient_is_not_finite_is_named_and_not_the_next(tmp_path: Path) -> None:
    """The weights are spoilt by step 5's batch, whose loss is finite; the loss of step 6 is the first that is not."""
    steps = iter(range(1, 100))

    def infinite(towers: Towers) -> None:
        def hook(gradient: Tensor) -> Tensor:
            return gradient * math.inf if next(steps) == 5 else gradient

        next(towers.image.parameters()).register_hook(hook)

    diagnosis = Loop(change=infinite)(tmp_path / "run")
    finding = next(f for f in diagnosis.findings if f.id == "GS025")
    assert "accumulation/norm of total, first at step 5" in finding.evidence[0].where
    assert "loss/trained of infonce, first at step 6" in finding.evidence[1].where


def test_a_loss_that_overflows_every_third_step(tmp_path: Path) -> None:
    """The GradScaler skips those steps; the probe sees that, and only probed and skipped steps have a row."""
    towers, scaler = Towers(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-4)
    with Probe(towers, output=tmp_path / "run", every=5, scaler=scaler):
        for step in range(30):
            x = torch.randn(32, 64)
            optimizer.zero_grad()
            loss = clip_loss(*towers(x, x + 1.5 * torch.randn(32, 64)))
            scaler.scale(loss * (math.inf if step % 3 == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    diagnosis = diagnose(look(tmp_path / "run"))
    assert ids(diagnosis) == {"GS012"}
    assert diagnosis.findings[0].evidence[0].value == pytest.approx(10 / 30, abs=0.01)


# ---- healthy runs


@pytest.mark.parametrize(
    "changes",
    [
        {"train.seed": 7, "train.batch_size": 16},
        {"objective.name": "hn", "objective.gamma": 0.25},
        {"objective.name": "hn", "objective.margin": "centred", "train.precision": "bf16"},
        {"train.precision": "fp16", "train.lr": 3e-4},
        {"train.accumulate": 2, "train.accumulate_mode": "cached", "train.grad_clip": 100.0},
        {"train.accumulate": 4, "train.accumulate_mode": "narrow", "train.lr": 3e-4},
    ],
    ids=lambda c: "-".join(str(v) for v in c.values()) or "plain",
)
def test_healthy_training_is_left_in_peace(trained: Callable[..., Diagnosis], changes: dict) -> None:
    diagnosis = trained({"train.epochs": 9, "probe.second_backward": True, **changes})
    assert not ids(diagnosis)
    assert len(diagnosis.silent) >= 18, diagnosis.unmeasured


@pytest.mark.parametrize("width", [16, 64, 128])
def test_healthy_loops_of_others_are_left_in_peace(width: int, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    assert not ids(Loop(width=width, steps=10)(tmp_path / "run", seed)), seed


@pytest.mark.parametrize(
    "shape",
    [
        {"columns": {"loss": lambda step: 2.0 * 0.97**step + 0.2}},
        {"columns": {"loss": lambda step: 3.0 if step % 13 == 0 else 0.5}},  # spikes that come back
        {"columns": {"scale": lambda step: 100.0 if not 10 < step < 30 else 75.0}},  # a dip that comes back
        {
            "columns": {"skipped": lambda step: int(step < 4), "loss_scale": lambda step: 65536.0 / 2 ** min(step, 4)}
        },  # the scaler's search
        {"columns": {"grad_norm": lambda step: 5.0 if step % 10 == 0 else 0.4}, "recipe": {"train.grad_clip": 1.0}},
        {
            "readings": {
                ("captions", "near_duplicates", ""): 1.0,
                ("captions", "mean", ""): 0.99,
                ("captions", "hardest_mean", ""): 0.99,
            }
        },
        {"readings": {("loss", "true", "infonce"): lambda step: math.log(WIDTH) * (1 - step / 200)}},  # starts at chance, comes down
        {"readings": {("scale", "at_limit", ""): 1.0}},
        {"columns": {"scale": 400.0}},  # large, and few anchors done
        {"columns": {name: lambda step: 0.4 if step % 10 == 0 else None for name in ("grad_norm", "scale", "lr")}},  # most have none
        {"columns": {"scale": lambda step: 10.0 + step}},
        {
            "recipe": HN,
            "readings": {("gap", "violated_with_margin.*", "hn"): 1.0, ("loss", "true", "hn"): lambda step: 30 * 0.95**step},
        },
        {"evals": [(0, 0.50, 0.45), (20, 0.55, 0.50), (40, 0.53, 0.48)], "columns": {"loss": 0.01}},
        {"recipe": {"train.accumulate": 8, "train.accumulate_mode": "narrow"}},
        {"recipe": {"encoder.freeze": "text"}, "readings": {("gradient", "norm.text", "*"): None}},
    ],
    ids=lambda shape: "-".join(str(name) for part in shape.values() if isinstance(part, dict) for name in part)[:60],
)
def test_healthy_shapes_are_left_in_peace(shape: dict, tmp_path: Path) -> None:
    changes = shape.pop("readings", {}) if "readings" in shape else {}
    assert not ids(diagnose(look(hand_run(tmp_path / "run", changes, **shape))))


def test_a_step_whose_norm_is_not_known_is_not_called_still(tmp_path: Path) -> None:
    """Mixed precision skipped every other step: its gradient overflowed, which is no gradient of 0."""
    zero = {("hooks", "agreement", "*"): math.nan, ("hooks", "factor", "*"): math.nan}
    path = hand_run(tmp_path / "run", zero, columns={"grad_norm": lambda step: None if step % 4 == 1 else 0.0})
    assert "GS032" not in ids(diagnose(look(path)))


def test_noise_around_healthy_values_is_left_in_peace(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    noisy = {
        ("loss", "true", "*"): lambda step: draw.uniform(0.2, 0.8),
        ("optimizer", "stale", "total"): lambda step: draw.uniform(0, 0.15),
    }
    diagnosis = diagnose(look(hand_run(tmp_path / "run", noisy, columns={"loss": lambda step: draw.uniform(0.2, 0.8)}, steps=200)))
    assert not ids(diagnosis), seed
    assert not set(diagnosis.unmeasured) - {"GS003"}


# ---- the rules themselves


def test_every_rule_is_tested_and_says_what_it_is() -> None:
    logs_only = {"GS003"}  # tests/test_diagnose.py
    assert {broken.rule for broken in BY_HAND} | logs_only == set(rules.names())
    for name, rule in rules:
        assert rule.id == name
        assert rule.severity in SEVERITIES
        assert rule.__module__.split(".")[-1].startswith(name.lower())
        text = importlib.import_module(rule.__module__).__doc__
        assert text.startswith(f"{name}: ")
        assert all(word in text for word in ("Evidence ", "Cause ", "Silent ", "Mislead "))
        assert all(isinstance(f.default, int | float) for f in dataclasses.fields(rule))
