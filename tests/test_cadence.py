"""The budget of the probe: whole blocks keep it on made-up clocks, ranks agree, and a run says what observing cost."""

from __future__ import annotations

import math
import random
import secrets

import pandas as pd
import pytest
import torch
import torch.multiprocessing as mp
from toy import Toy, toy_batch, toy_reader

from gradscope.cadence import FIRST, Cadence, Ledger, _on_grid
from gradscope.frameworks.clip import Clip, total_loss
from gradscope.judgement import two_digits
from gradscope.probe_cost import cost_by_set, cost_sentence
from gradscope.quantities import SETS, quantities, quantity_set
from gradscope.recipe import resolve
from gradscope.runlog import Run, RunLog
from gradscope.train import train


def blocks(costs: list[float], budget: float, densest: int = 1) -> list[int]:
    """The lengths of the blocks that begin with probed steps of these costs."""
    cadence, lengths = Cadence(budget=budget, densest=densest), []
    for cost in costs:
        cadence = cadence.after_probe(cost)
        lengths.append(cadence.every)
    return lengths


@pytest.mark.parametrize("budget", [0.002, 0.01, 0.02, 0.3])
def test_every_whole_block_keeps_the_budget(budget: float) -> None:
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    costs = [math.exp(rng.uniform(-6, 2)) for _ in range(300)]
    lengths = blocks(costs, budget)
    for cost, every in zip(costs, lengths, strict=True):
        assert cost / every <= budget * (1 + 1e-6), seed
    assert sum(costs) / sum(lengths) <= budget


def test_it_starts_conservatively_and_then_comes_as_close_as_it_may() -> None:
    assert blocks([0.001], 0.02) == [FIRST]
    assert blocks([0.001] * 3, 0.02) == [FIRST, 1, 1]
    assert blocks([0.001] * 3, 0.02, densest=5) == [FIRST, 5, 5]
    assert blocks([1.0] * 3, 0.02) == [50, 50, 50]
    assert blocks([1.0, 0.4, 0.4, 2.0], 0.02) == [50, 20, 20, 100]


def test_noise_does_not_move_the_cadence() -> None:
    rng = random.Random(secrets.randbits(32))
    lengths = blocks([1.0, *(1.0 - 0.2 * rng.random() for _ in range(100))], 0.02)
    assert lengths == [50] * 101
    assert blocks([1.0, 0.8, 0.74], 0.02) == [50, 50, 50]  # .74 asks for 37: 40, which is not shorter by a quarter


def test_it_is_deterministic() -> None:
    costs = [random.Random(secrets.randbits(32)).uniform(0, 3) for _ in range(50)]
    assert blocks(costs, 0.05) == blocks(costs, 0.05)


def test_the_grid_rises_and_is_coarse() -> None:
    found = [_on_grid(n) for n in range(1, 5000)]
    assert found == sorted(found)
    assert all(n <= value <= 4 / 3 * n for n, value in enumerate(found, 1))
    assert [_on_grid(n) for n in (1, 10, 11, 61, 81, 100, 101, 999)] == [1, 10, 12, 80, 100, 100, 120, 1000]


def test_ledger_is_a_sum() -> None:
    ledger = Ledger()
    assert math.isnan(ledger.share)
    ledger.add(1.4, 0.4)
    ledger.add(1.0, 0.0)
    assert (ledger.steps, ledger.plain, ledger.probed) == (2, 2.0, 0.4)
    assert ledger.share == pytest.approx(0.2)


# ---- the step reader on a made-up clock


def steps_probed(budget: float | None, every: int, seconds: list[float], inside: float) -> tuple[list[int], list[dict]]:
    """Which of the steps are probed if each takes so long without the probe and ``inside`` more where it is probed; and the rows."""
    encoder = Toy()
    reader = toy_reader(encoder, budget=budget)
    reader.every, reader.quantities = every, quantity_set("loss")
    if reader._cadence:
        reader._cadence = Cadence(budget=reader._cadence.budget, densest=every)
    probed, rows = [], []
    batch = toy_batch(4, 0)
    for index, plain in enumerate(seconds, 1):
        reader.begin(index, 0)
        terms = Clip()(embeddings := encoder.embed(batch))
        due = reader.due
        with reader.watching(batch, embeddings, terms):
            total_loss(terms).backward()
        reader.flush()
        reader.seconds = {"made up": inside} if due else {}
        rows += reader.ended(plain + (inside if due else 0.0))
        probed += [index] * due
    assert not reader.failures
    return probed, rows


def test_the_step_reader_follows_the_cadence() -> None:
    probed, rows = steps_probed(0.02, 1, [1.0] * 120, inside=0.4)
    assert probed == [1, 21, 41, 61, 81, 101]
    assert [(row["step"], row["value"]) for row in rows if row["key"] == "every"] == [(1, 20)]
    shares = [row for row in rows if row["key"] == "share"]
    assert [row["step"] for row in shares] == probed[1:]
    assert [row["value"] for row in shares] == pytest.approx([0.02] * 5)


def test_a_faster_loop_thins_the_probe() -> None:
    probed, rows = steps_probed(0.1, 1, [1.0] * 30 + [0.25] * 170, inside=0.5)
    changes = [(row["step"], row["value"]) for row in rows if row["key"] == "every"]
    assert changes[:4] == [(1, 10), (11, 5), (31, 6), (37, 40)]
    assert 0.5 / (6 * 0.25) in [row["value"] for row in rows if row["key"] == "share"], "the block in which it became faster is over"
    assert changes[4:] == [(77, 20)], "what that block cost too much is paid off by one long block"
    plain = sum([1.0] * 30 + [0.25] * (probed[-1] - 1 - 30))
    assert 0.5 * (len(probed) - 1) / plain <= 0.1, "whole blocks together keep the budget"


def test_without_a_budget_the_schedule_stays_and_the_cost_is_still_told() -> None:
    probed, rows = steps_probed(None, 5, [2.0] * 12, inside=0.5)
    assert probed == [1, 6, 11]
    assert [(row["step"], row["key"], row["value"]) for row in rows] == [(6, "share", 0.05), (11, "share", 0.05)]


def rank(number: int, found: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{found}/meeting", rank=number, world_size=2)
    probed, _ = steps_probed(0.02, 1, [1.0] * 100, inside=0.4 if number else 0.1)
    torch.save(probed, f"{found}/{number}.pt")
    dist.destroy_process_group()


def test_ranks_look_at_the_same_steps(tmp_path) -> None:  # type: ignore[no-untyped-def]
    mp.spawn(rank, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{number}.pt") for number in (0, 1))
    assert first == second == [1, 21, 41, 61, 81], "the dearer rank decides"


# ---- settings


@pytest.mark.parametrize(("given", "share"), [("2%", 0.02), ("0.02", 0.02), (0.02, 0.02), (" 12.5 %", 0.125), ("", None)])
def test_budgets_in_both_spellings(given: object, share: float | None) -> None:
    recipe = resolve({"probe": {"budget": given}}, {})
    assert recipe.probe.share == (None if share is None else pytest.approx(share))
    assert resolve({"probe": {"budget": recipe.probe.budget}}, {}) == recipe, "what is written is read back"


@pytest.mark.parametrize("given", ["0", "0%", "100%", "1", "2", "-1%", "nan", "two", 0, True, 1.5])
def test_impossible_budgets_are_refused_in_one_sentence(given: object) -> None:
    with pytest.raises(ValueError, match=r"probe-budget. is a share of a step's time above 0 and below 100 %, such as 2% or 0.02; got"):
        resolve({}, {"probe.budget": given})


def test_second_backward_belongs_to_the_full_set() -> None:
    for name in ("loss", "default"):
        small = resolve({}, {"probe.set": name})
        assert not small.probe.second_backward
        assert resolve({"probe": {"set": name, "second_backward": False}}, {}) == small
        assert resolve({"probe": {"set": name, "second_backward": False}}, {"probe.set": "full"}).probe.second_backward
        with pytest.raises(ValueError, match="belongs to --probe-set full and would be ignored by"):
            resolve({}, {"probe.set": name, "probe.second_backward": True})
    assert resolve({}, {}).probe.second_backward
    assert not resolve({"probe": {"second_backward": False}}, {"probe.set": "full"}).probe.second_backward
    with pytest.raises(ValueError, match="Did you mean 'full'"):
        resolve({}, {"probe.set": "ful"})


# ---- the cost of a run


def made(path, steps: list[tuple[float, float]], parts: dict[str, float], probed: list[int]) -> Run:  # type: ignore[no-untyped-def]
    with RunLog.create(path, recipe_toml='[probe]\nset = "full"\nevery = 2\nbudget = "2%"\n', provenance={}) as log:
        for index, (seconds, inside) in enumerate(steps, 1):
            log.write_steps([{"step": index, "samples": 0, "epoch": 1, "loss": 1.0, "seconds": seconds, "probe_seconds": inside}])
        base = {"quantity": "probe", "term": "", "unit": "s", "stamps": ""}
        log.write_readings([{**base, "step": k, "key": key, "value": value} for k in probed for key, value in parts.items()])
    return Run(path)


def test_cost_by_set_adds_up(tmp_path) -> None:  # type: ignore[no-untyped-def]
    parts = {"loss": 0.01, "heads": 0.02, "captions": 0.04, "optimizer": 0.1, "update": 0.05, "second backward": 0.4}
    inside = sum(parts.values()) + 0.03  # writing
    run = made(tmp_path / "run", [(9.0, 5.0), (1.0, 0.0), (1.0 + inside, inside), (1.0, 0.0)], parts, [1, 3])
    found = cost_by_set(run)
    assert found == pytest.approx({"loss": 0.06 / 3, "default": 0.04 / 3, "full": 0.55 / 3})
    assert sum(found.values()) == pytest.approx(inside / 3)
    assert cost_sentence(run) == (
        "Observing took 22% of the time of the steps without it (set full, every 2 steps, budget 2%), by set: loss 2%, "
        "default 1.3%, full 18%."
    )


@pytest.mark.parametrize(("share", "said"), [(1.14688, "110%"), (0.0042711, "0.43%"), (0.999, "100%"), (16.2, "1600%"), (0.0, "0%")])
def test_a_cost_has_two_digits(share: float, said: str) -> None:
    assert two_digits(share) == said


def test_a_run_probed_at_its_first_step_only_is_not_called_free(tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = made(tmp_path / "run", [(2.5, 0.5), (1.0, 0.0), (1.0, 0.0)], {"loss": 0.5}, [1])
    assert cost_by_set(run) == pytest.approx({"loss": 0.5 / 4})


def test_every_quantity_is_in_a_set() -> None:
    assert {component.tier for _, component in quantities} == set(SETS)
    sizes = [len(quantity_set(name)) for name in SETS]
    assert sizes == sorted(sizes)
    assert "gradient" not in quantity_set("default")


@pytest.mark.parametrize("name", SETS)
def test_a_real_run_of_each_set_ends_with_a_summary(name: str, tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    from gradscope.data.scenes import materialise
    from gradscope.verdict import print_summary

    data = materialise(tmp_path / "scenes", seed=1, train=24, val=4, test=4)
    probe = {"log_grads": True, "set": name, "every": 1, "budget": "90%"}
    tables = {"data": {"name": str(data)}, "train": {"batch_size": 4, "max_steps": 3, "epochs": 1, "device": "cpu"}, "probe": probe}
    train(resolve(tables, {"objective.name": "hn"}), tmp_path / "run", quiet=True)
    run = Run(tmp_path / "run")
    assert set(run.readings["quantity"]) - {"probe"} == set(quantity_set(name))
    assert list(cost_by_set(run)) == list(SETS[: SETS.index(name) + 1])
    every = run.readings[(run.readings["quantity"] == "probe") & (run.readings["key"] == "every")]
    assert int(pd.to_numeric(every["value"]).iloc[0]) >= FIRST
    assert "steps are probed, to keep within 90%" in (run.path / "console.log").read_text()
    print_summary([run.path])
    text = capsys.readouterr().out
    assert ("Zeros were not counted: --probe-set default" in text) == (name == "loss")
    assert ("was not counted: --probe-set full does" in text) == (name == "default")
    if name != "full":
        with pytest.raises(ValueError, match="--log-grads --probe-set full to record it"):
            run.reading("gradient", "log10_norm", "hn")
