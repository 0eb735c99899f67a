"""The resolved settings of a run: six tables, TOML in and out, refused early.

    recipe.toml < --set table.key=value < flags
An unknown key is answered with the nearest known one; a setting that would be ignored is an error. What is written to the run has
every default spelled out and is itself runnable.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gradscope.cadence import percent, share
from gradscope.quantities import SETS
from gradscope.registry import unknown_name
from gradscope.sinks import parse as parse_sinks

FRAMEWORKS = ("clip", "hn_clip")
OBJECTIVES = ("infonce", "hn")
READ_ONLY_OBJECTIVES = ("dcl", "hardness_weighted", "siglip")
MARGINS = ("live", "frozen", "external", "fixed", "centred")
LOSS_FORMS = ("plain", "residual")
KERNELS = ("auto", "dense", "streaming")
DUPLICATES = ("keep", "exclude", "positives")
PRECISIONS = ("fp32", "bf16", "fp16")
SHARDS = ("none", "full")
ON_BAD_IMAGE = ("error", "skip")
ON_TOO_LONG = ("truncate", "error")
DECODES = ("fast", "exact", "scaled")
CACHES = ("none", "images")


@dataclass(frozen=True, kw_only=True)
class Data:
    """What to read, and what to do with what does not fit.

    ``name`` is a registered data set or a path; ``val_share`` of ``train_split`` is held out by image id where there is no split
    "val" beside it. ``cache`` "images": pictures are decoded once and kept (see ``gradscope.data.image_cache``). The settings in
    SETTINGS belong to some data sets only; "" leaves each at the data set's own default.
    """

    name: str = "scenes"
    train_split: str = "train"
    val_share: float = 0.05
    folder: str = ""
    caption: str = ""
    image_key: str = ""
    caption_key: str = ""
    image_root: str = ""
    encoding: str = ""
    allow_missing: bool = False
    on_bad_image: str = "error"
    on_too_long: str = "truncate"
    decode: str = "fast"
    cache: str = "none"

    SETTINGS: ClassVar[tuple[str, ...]] = ("folder", "caption", "image_key", "caption_key", "image_root", "encoding")

    def settings(self) -> dict[str, str]:
        """What ``open_data`` takes beside the name: the settings that were given."""
        return {key: getattr(self, key) for key in self.SETTINGS if getattr(self, key)}


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """``freeze``: "", or image, text, all-but-last-N, joined with commas. ``checkpoint_activations`` trades time for memory."""

    name: str = "tiny"
    freeze: str = ""
    checkpoint_activations: bool = False
    trust_archive: bool = False


@dataclass(frozen=True, kw_only=True)
class Objective:
    """gamma and margin belong to hn; infonce resolves them to 0 and "none". margin_encoder belongs to the external margin.

    duplicates: what captions of identical token ids are to each other: negatives (keep), neither (exclude) or positives, which takes
    the streamed loss. kernel: whether the loss holds its [width, width]
    cells; auto streams above a width. Streamed, the loss is in the residual form.
    """

    framework: str = "clip"
    name: str = "infonce"
    gamma: float = 0.5
    margin: str = "live"
    margin_encoder: str = ""
    token_weight: float = 0.0
    loss_form: str = "plain"
    duplicates: str = "keep"
    kernel: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Train:
    """max_steps 0: all steps of all epochs. warmup is a number of steps. checkpoint_every 0: at the end of each epoch. compile and
    channels_last: see ``gradscope.encoders.speed``."""

    epochs: int = 3
    max_steps: int = 0
    batch_size: int = 16
    accumulate: int = 1
    accumulate_mode: str = "none"
    lr: float = 1e-5
    warmup: int = 0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    grad_clip: float = 0.0
    scale: str = "learn"
    scale_max: float = 100.0
    precision: str = "fp32"
    shard: str = "none"
    device: str = "auto"
    seed: int = 42
    workers: int = 0
    checkpoint_every: int = 0
    compile: bool = False
    channels_last: bool = False


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """log_grads turns the probe on; second_backward is the price tier of the other objective's full gradient, which set "full" has.

    budget: what observing may cost, as a share of a plain step's time ("2%"); "" leaves ``every`` as it is, else it is the densest.
    """

    log_grads: bool = False
    set: str = "full"
    every: int = 5
    budget: str = ""
    second_backward: bool = True

    @property
    def share(self) -> float | None:
        """The budget as a number, or None."""
        return share(self.budget) if self.budget else None


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """sinks: dashboards that the run is sent to beside its files, joined with commas; sink_all: every scalar, not the short list."""

    sinks: str = ""
    sink_all: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    data: Data = field(default_factory=Data)
    encoder: Encoder = field(default_factory=Encoder)
    objective: Objective = field(default_factory=Objective)
    train: Train = field(default_factory=Train)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    log: LogSettings = field(default_factory=LogSettings)

    @property
    def width(self) -> int:
        """Candidates per softmax: the micro-batch, or with cached accumulation all of the step."""
        wide = self.train.accumulate if self.train.accumulate_mode == "cached" else 1
        return self.train.batch_size * wide

    @property
    def negatives_per_anchor(self) -> int:
        return self.width - 1

    @property
    def chance(self) -> float:
        """ln(width): the loss of guessing, in nat."""
        return math.log(self.width)

    def toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(dataclasses.asdict(self))


def read(path: str | Path) -> dict[str, Any]:
    """A recipe file -> nested dict. Raises ValueError if it is missing or not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ValueError(f"recipe '{path}' does not exist") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"recipe '{path}' cannot be read as TOML: {error}") from error


def parse_set(assignment: str) -> tuple[str, Any]:
    """ "train.lr=1e-5" -> ("train.lr", 1e-5). Values are TOML; a bare word is a string."""
    key, equals, text = assignment.partition("=")
    if not equals or "." not in key:
        raise ValueError(f"--set takes table.key=value, e.g. train.lr=1e-5; got '{assignment}'")
    return key.strip(), parse_value(text.strip())


def parse_value(text: str) -> Any:
    """A TOML value; anything that is not one is taken as a string (so live need not be quoted); ".5" counts as 0.5."""
    try:
        return tomllib.loads(f"value = {'0' if text.startswith('.') else ''}{text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def resolve(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> Recipe:
    """Nested tables and dotted overrides -> a checked Recipe.

    Raises:
        ValueError: unknown table or key, wrong type, impossible value or pair; names what is allowed.
    """
    merged: dict[str, dict[str, Any]] = {}
    for table, values in tables.items():
        if not isinstance(values, Mapping):
            raise ValueError(unknown_name("recipe table", table, _tables()))
        merged[table] = dict(values)
    for dotted, value in overrides.items():
        table, _, key = dotted.partition(".")
        merged.setdefault(table, {})[key] = value
    if "probe.set" in overrides and tables.get("probe", {}).get("set", "full") != "full" and "probe.second_backward" not in overrides:
        merged["probe"].pop("second_backward", None)  # in a resolved recipe of a smaller set, false stands for "does not apply"
    built = {}
    for table, values in merged.items():
        if table not in _tables():
            raise ValueError(unknown_name("recipe table", table, _tables()))
        built[table] = _table(table, values)
    given = {f"{table}.{key}" for table, values in merged.items() for key in values}
    recipe = _with_presets(Recipe(**built), given, set(overrides))
    check(recipe)
    return recipe


def _tables() -> list[str]:
    return [f.name for f in dataclasses.fields(Recipe)]


def _table(table: str, values: Mapping[str, Any]) -> Any:
    kind = {f.name: f.default_factory for f in dataclasses.fields(Recipe)}[table]
    default: Any = kind()  # type: ignore[operator]
    fields = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}
    typed = {}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(unknown_name(f"key of [{table}]", key, list(fields)))
        value = percent(value) if (table, key) == ("probe", "budget") and value != "" else value
        typed[key] = _typed(f"{table}.{key}", value, fields[key])
    return dataclasses.replace(default, **typed)


def _typed(name: str, value: Any, default: Any) -> Any:
    wanted = type(default)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        words = {float: "a number", int: "a whole number", str: "a word", bool: "true or false"}
        raise ValueError(f"{name} must be {words[wanted]}; got {value!r}")
    return value


def _with_presets(recipe: Recipe, given: set[str], overridden: set[str]) -> Recipe:
    """Spells out what a preset fixes and what infonce and single batches leave without meaning; refuses contradictions.

    ``given`` are the dotted keys set anywhere, ``overridden`` those set by a flag, --set or a sweep, over the recipe file.
    """
    objective, train = recipe.objective, recipe.train
    if objective.framework == "hn_clip":
        from gradscope.frameworks.hn_clip import PRESET

        for key, value in PRESET.items():
            field_name = "name" if key == "objective" else key
            if f"objective.{field_name}" in given and getattr(objective, field_name) != value:
                raise ValueError(
                    f"--framework hn_clip means {key} {value}; got {getattr(objective, field_name)}. Use --framework clip to choose"
                )
        objective = dataclasses.replace(objective, **{"name" if k == "objective" else k: v for k, v in PRESET.items()})
    if objective.name == "hn" and objective.margin == "none" and "objective.margin" not in overridden:
        # A resolved infonce recipe, now told to train hn: its 0 and "none" stand for "does not apply" and give way to the defaults.
        asked = "objective.gamma" in overridden or objective.gamma != 0
        objective = dataclasses.replace(objective, margin=Objective().margin, gamma=objective.gamma if asked else Objective().gamma)
    if objective.margin_encoder and "objective.margin" not in given:
        objective = dataclasses.replace(objective, margin="external")
    if objective.name == "infonce":
        if objective.margin_encoder:
            raise ValueError("--margin-encoder belongs to --objective hn and would be ignored by infonce; drop it or use hn")
        ignored = objective.gamma != 0 and "objective.gamma" in given
        if ignored or ("objective.margin" in given and objective.margin != "none"):
            raise ValueError("--gamma and --margin belong to --objective hn and would be ignored by infonce; drop them or use hn")
        objective = dataclasses.replace(objective, gamma=0.0, margin="none")
    if objective.duplicates == "positives" and objective.kernel == "auto":
        objective = dataclasses.replace(objective, kernel="streaming")
    if objective.kernel == "streaming":
        default = "objective.kernel" in overridden and "objective.loss_form" not in overridden  # of the recipe file, spelled out
        if "objective.loss_form" in given and objective.loss_form == "plain" and not default:
            raise ValueError(
                "--kernel streaming computes the loss in the residual form, so --loss-form plain would be ignored; drop it, or use "
                "--kernel dense"
            )
        objective = dataclasses.replace(objective, loss_form="residual")
    if train.accumulate == 1 and train.accumulate_mode not in ("none",):
        raise ValueError(f"--accumulate-mode {train.accumulate_mode} has no effect with --accumulate 1; drop it or raise --accumulate")
    return dataclasses.replace(recipe, objective=objective, probe=_probe(recipe.probe, given))


def _probe(probe: ProbeSettings, given: set[str]) -> ProbeSettings:
    """Only the full set has gradients by objective: in the others the second backward does not apply."""
    _one_of("--probe-set", probe.set, SETS)
    if probe.set == "full" or not probe.second_backward:
        return probe
    if "probe.second_backward" in given:
        raise ValueError(
            f"probe.second_backward belongs to --probe-set full and would be ignored by '{probe.set}'; drop it or use the full set"
        )
    return dataclasses.replace(probe, second_backward=False)


def check(recipe: Recipe) -> None:
    """Everything that can be refused before weights load. Raises ValueError."""
    objective, train, probe = recipe.objective, recipe.train, recipe.probe
    _one_of("--framework", objective.framework, FRAMEWORKS)
    if objective.name in READ_ONLY_OBJECTIVES:
        raise ValueError(
            f"--objective {objective.name} can be read, not trained: see what it would do with `gradscope what-if`, or train one of "
            f"{', '.join(OBJECTIVES)}"
        )
    _one_of("--objective", objective.name, OBJECTIVES)
    if objective.name == "hn":
        _one_of("--margin", objective.margin, MARGINS)
        if (objective.margin == "external") != bool(objective.margin_encoder):
            raise ValueError(
                f"--margin {objective.margin} with --margin-encoder '{objective.margin_encoder}': an external margin needs an encoder, "
                "and no other margin uses one; give both --margin external and --margin-encoder NAME, or neither"
            )
    _one_of("--loss-form", objective.loss_form, LOSS_FORMS)
    _one_of("--duplicates", objective.duplicates, DUPLICATES)
    _one_of("--kernel", objective.kernel, KERNELS)
    if objective.duplicates == "positives" and (objective.kernel == "dense" or objective.token_weight > 0):
        other = "--kernel dense" if objective.kernel == "dense" else f"--token-weight {objective.token_weight:g}"
        raise ValueError(
            f"--duplicates positives is computed by the streamed loss of whole pictures and captions, and {other} does not go with it; "
            "drop one of them, or use --duplicates exclude"
        )
    _one_of("--precision", train.precision, PRECISIONS)
    _one_of("--on-bad-image", recipe.data.on_bad_image, ON_BAD_IMAGE)
    _one_of("--on-too-long", recipe.data.on_too_long, ON_TOO_LONG)
    _one_of("--decode", recipe.data.decode, DECODES)
    _one_of("--cache", recipe.data.cache, CACHES)
    _one_of("--scale", train.scale, ("learn", "fixed"))
    _one_of("--shard", train.shard, SHARDS)
    if train.shard == "full" and train.compile:
        raise ValueError("train.compile and --shard full do not go together; drop one of them")
    if train.shard == "full" and train.precision == "fp16":
        raise ValueError("--shard full runs in fp32 or bf16: each rank would keep a loss scale of its own; use --precision bf16")
    if train.accumulate > 1 and train.accumulate_mode not in ("narrow", "cached"):
        raise ValueError(
            f"--accumulate {train.accumulate} needs --accumulate-mode: narrow (softmax of {train.batch_size} candidates, averaged "
            f"over {train.accumulate} micro-batches, as the paper's code) or cached (one softmax of "
            f"{train.batch_size * train.accumulate} candidates)"
        )
    positive = {"train.epochs": train.epochs, "train.accumulate": train.accumulate, "probe.every": probe.every}
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    parse_sinks(recipe.log.sinks)
    if recipe.log.sink_all and not recipe.log.sinks:
        raise ValueError("--sink-all has no effect without --sink; name one of tensorboard, wandb, mlflow, or drop it")
    if train.batch_size < 2:
        raise ValueError(f"train.batch_size must be at least 2 (one positive and one negative); got {train.batch_size}")
    at_least_zero = {
        "train.lr": train.lr,
        "train.max_steps": train.max_steps,
        "train.warmup": train.warmup,
        "train.weight_decay": train.weight_decay,
        "train.grad_clip": train.grad_clip,
        "train.workers": train.workers,
        "train.checkpoint_every": train.checkpoint_every,
        "objective.gamma": objective.gamma,
        "objective.token_weight": objective.token_weight,
    }
    for name, number in at_least_zero.items():
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{name} must be a finite number, 0 or more; got {number}")
    if not 0 < recipe.data.val_share < 1:
        raise ValueError(f"data.val_share must be between 0 and 1; got {recipe.data.val_share}")
    if not (0 <= train.beta1 < 1 and 0 <= train.beta2 < 1 and train.eps > 0 and train.scale_max > 1):
        raise ValueError("train.beta1 and beta2 must be in [0, 1), eps above 0 and scale_max above 1")


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(unknown_name(f"value of {flag}", value, list(allowed)))
