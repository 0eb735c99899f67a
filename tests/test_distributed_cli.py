"""The command line on several processes: one voice, one writer, and an end for all when one of them ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

from gradscope import launch
from gradscope.cli import app, main
from gradscope.data.batching import epoch_order
from gradscope.recipe import resolve
from gradscope.runlog import Run
from gradscope.training_data import training_data

#: Imports once what each of the processes needs.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gradscope.train", "gradscope.gallery", "open_clip"])
PATIENCE = 120  # seconds, on a machine that is busy with the other tests too


def speak(rank: int, size: int, port: int, words: list[str], heard: Path, meeting: float) -> None:
    """A process as torchrun or srun would start it; what it writes goes to a file."""
    with (heard / f"out-{rank}").open("wb") as out, (heard / f"err-{rank}").open("wb") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(heard / f"error-{rank}")
    launch.MEETING = timedelta(seconds=meeting)
    sys.argv = ["gradscope", *words]
    main()


class Together:
    """Two processes of one command, or of one command each."""

    def __init__(self, words: list[str], heard: Path, *, second: list[str] | None = None, meeting: float = PATIENCE) -> None:
        heard.mkdir()
        self.heard = heard
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        told = [words, second or words]
        self.ranks = [FORKS.Process(target=speak, args=(rank, 2, port, told[rank], heard, meeting)) for rank in range(2)]
        for process in self.ranks:
            process.start()

    def ended(self) -> list[int | None]:
        """Exit codes."""
        for process in self.ranks:
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
        return [process.exitcode for process in self.ranks]

    def said(self, stream: str) -> list[str]:
        return [(self.heard / f"{stream}-{rank}").read_text() for rank in range(2)]


def torchruns_report(heard: Path) -> str:
    """Its last line, the cause that it found: of two processes that ended with code 2, the one that left a word."""
    assert len(list(heard.glob("error-*"))) == 1
    ends = {rank: ProcessFailure(local_rank=rank, pid=1, exitcode=2, error_file=str(heard / f"error-{rank}")) for rank in (0, 1)}
    return str(ChildFailedError("gradscope", ends)).strip().splitlines()[-2]


def test_the_others_wait_until_the_one_that_speaks_has_spoken(monkeypatch):
    """torchrun ends all processes as soon as one has ended, and would cut it short."""
    place, order = torch.distributed.HashStore(), []
    place.add("gradscope/failed", 1)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "_store", place)
    monkeypatch.setattr(launch, "_said", False)
    other = threading.Thread(target=lambda: order.append(launch.speak_up()))
    other.start()
    time.sleep(0.1)  # a process that does not wait ends here
    order.append("spoken")
    launch.has_spoken()
    other.join()
    assert order == ["spoken", False]


def test_torchrun_names_the_one_that_left_a_word(tmp_path, monkeypatch):
    """Also where both end within one second."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error-1"))
    for _ in range(20):
        launch.leave_for_torchrun("gradscope: this is why")
        assert torchruns_report(tmp_path).endswith("gradscope: this is why")


def base(scenes: Path, encoder: Path) -> list[str]:
    return ["train", "--data", str(scenes), "--encoder", str(encoder), "--device", "cpu", "--batch-size", "8"]


def until(seen: Callable[[], bool]) -> None:
    for _ in range(20 * PATIENCE):
        if seen():
            return
        time.sleep(0.05)


@pytest.fixture(scope="module", autouse=True)
def torchrun(scenes_folder, small_encoder, tmp_path_factory) -> Iterator[tuple[subprocess.Popen, Path]]:
    """The real command, which imports everything anew in each process: it does so beside the other tests of this file."""
    folder = tmp_path_factory.mktemp("torchrun")
    words = [*base(scenes_folder, small_encoder), "--freeze", "image", "--grad-checkpointing", "--max-steps", "3", "--log-grads"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "gradscope", *words, "--output", str(folder / "run")]
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        started = subprocess.Popen(command, stdout=out, stderr=err)
    yield started, folder
    started.terminate()  # only where it was not waited for


def test_eval_speaks_once_and_says_what_one_process_says(scenes_folder, small_encoder, tmp_path):
    words = ["eval", str(small_encoder), "--data", str(scenes_folder), "--device", "cpu", "--batch-size", "16", "--resamples", "20"]
    saved = str(tmp_path / "rows.safetensors")
    together = Together([*words, "--output", str(tmp_path / "two.json"), "--save-embeddings", saved], tmp_path / "heard")
    alone = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "one.json")])
    assert alone.exit_code == 0
    assert together.ended() == [0, 0], together.said("err")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one.pop("provenance")["open_clip"] == two.pop("provenance")["open_clip"]
    assert one == two
    first, second = together.said("out")
    assert first.count("JSON:") == 1
    assert second == ""
    again = ["eval", saved, "--resamples", "20", "--output"]
    together = Together([*again, str(tmp_path / "0.json")], tmp_path / "again", second=[*again, str(tmp_path / "1.json")])
    assert together.ended() == [0, 0], together.said("err")
    assert json.loads((tmp_path / "0.json").read_text())["metrics"] == one["metrics"]
    assert not (tmp_path / "1.json").exists()  # a file is not divided: the first rank alone


def test_what_all_ranks_refuse_is_said_once(scenes_folder, small_encoder, tmp_path):
    """By the one that speaks first, be it a setting, an option that does not exist, a folder, a device or a command."""
    train = [*base(scenes_folder, small_encoder), "--output", str(tmp_path / "run")]
    cases = {
        "cannot be dealt evenly to 2 of them; use 6 or 8": [*train, "--batch-size", "7"],
        "cannot make the run directory": [*train, "--output", str(small_encoder / "open_clip_config.json")],
        "torch sees no CUDA device": [*train, "--device", "cuda:0"],
        "No such option: --bach-size": [*train, "--bach-size", "8"],
        "sweep runs as one process; only train, eval": ["sweep", "--output", str(tmp_path / "sweep")],
    }
    started = [Together(words, tmp_path / f"heard-{number}") for number, words in enumerate(cases.values())]
    for message, together in zip(cases, started, strict=True):
        assert together.ended() == [2, 2]
        said = "".join(together.said("err"))
        assert said.count("gradscope:") + said.count("Usage: gradscope") == 1, said
        assert message in said
        assert "Traceback" not in said
        assert message in torchruns_report(together.heard)


def test_a_rank_that_does_not_come_is_missed_and_says_why(scenes_folder, small_encoder, tmp_path):
    """Its command line was wrong; nobody ends the first one, which waits for it."""
    words = [*base(scenes_folder, small_encoder), "--output", str(tmp_path / "run")]
    together = Together(words, tmp_path / "heard", second=[*words, "--bach-size", "8"], meeting=5)
    assert together.ended() == [2, 2]
    first, second = together.said("err")
    assert "No such option: --bach-size" in second
    assert "gradscope:" not in first


def test_an_error_of_one_rank_ends_both_with_its_message(scenes_folder, small_encoder, tmp_path):
    """The picture is one of the second rank's; the first one waits for its rows."""
    folder = tmp_path / "data"
    folder.mkdir()
    text = (scenes_folder / "train.jsonl").read_text().replace('"images/', f'"{scenes_folder}/images/')
    (folder / "bad.png").write_text("no picture")
    (folder / "train.jsonl").write_text(text)
    records = training_data(resolve({}, {"data.name": str(folder)})).train
    picture = records[epoch_order(len(records), 42, 1)[5]].image  # the sixth of the first batch of 8
    assert picture is not None
    (folder / "train.jsonl").write_text(text.replace(picture, str(folder / "bad.png")))
    together = Together([*base(folder, small_encoder), "--output", str(tmp_path / "run")], tmp_path / "heard")
    assert together.ended() == [2, 2]
    first, second = together.said("err")
    assert "bad.png' cannot be decoded" in second
    assert "gradscope:" not in first
    assert "Traceback" not in first + second


def test_when_a_rank_is_killed_the_other_says_so_and_the_run_goes_on_later(scenes_folder, small_encoder, tmp_path):
    """The second, and the first, which is the meeting place."""
    words = [*base(scenes_folder, small_encoder), "--checkpoint-every", "2", "--epochs", "500", "--output"]
    runs = [tmp_path / f"run-{victim}" for victim in range(2)]
    started = [Together([*words, str(run)], tmp_path / f"heard-{victim}") for victim, run in enumerate(runs)]
    for victim, (run, together) in enumerate(zip(runs, started, strict=True)):
        until(lambda run=run: any((run / "checkpoints").glob("step-*")))
        os.kill(together.ranks[victim].pid or 0, signal.SIGKILL)
        start = time.monotonic()
        assert together.ended() == ([-9, 2] if victim == 0 else [2, -9])
        assert time.monotonic() - start < PATIENCE / 2
        said = together.said("err")
        assert said[1 - victim].count("gradscope:") == 1
        assert "another process of this run has ended" in said[1 - victim]
        assert "--resume" in said[1 - victim]
        assert "gradscope:" not in said[victim]
        assert Run(run).checkpoints()
        assert not Run(run).done


def test_a_rank_that_is_told_to_stop_closes_the_run(scenes_folder, small_encoder, tmp_path):
    """SIGTERM, as torchrun sends it to all when one has failed, and Slurm when the time is up."""
    words = [*base(scenes_folder, small_encoder), "--epochs", "500", "--output", str(tmp_path / "run")]
    together = Together(words, tmp_path / "heard")
    steps = tmp_path / "run" / "steps.jsonl"
    until(lambda: steps.is_file() and len(steps.read_text().splitlines()) > 2)
    for process in together.ranks:
        process.terminate()
    assert together.ended() == [2, 2]
    said = "".join(together.said("err"))
    assert said.count("gradscope:") == 1
    assert "told to stop (SIGTERM)" in said or "another process of this run has ended" in said
    assert "ended early: " in (tmp_path / "run" / "console.log").read_text()
    assert "Traceback" not in said


def test_what_is_raised_while_a_stop_unwinds_is_no_other_reason(monkeypatch):
    """The processes that decode pictures get Slurm's SIGTERM too, and torch complains of their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **place}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "together", lambda: True)
    monkeypatch.setattr(launch, "_store", None)

    def stopped() -> None:
        with launch.processes(torch.device("cpu")):
            try:
                signal.raise_signal(signal.SIGTERM)
            except BaseException:
                raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.") from None

    try:
        with pytest.raises(ValueError, match="told to stop"):
            stopped()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x' and must be a whole number"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is '' and must be a whole number"),
        ({"RANK": "2"}, "RANK is 2, and the 2 processes of WORLD_SIZE count from 0 to 1"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR must say where the 2 processes meet"),
        ({}, ""),
        ({"RANK": None, "MASTER_ADDR": None, "MASTER_PORT": None}, ""),  # one process, whatever else is set
    ],
)
def test_a_wrong_environment_is_said_before_anyone_waits(monkeypatch, capsys, wrong, message):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **wrong}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert launch.wrong_environment().startswith(message)
    if not message:
        assert launch.wrong_environment() == ""
        return
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith(f"gradscope: {message}")


def test_processes_of_different_minds_do_not_wait_for_each_other(monkeypatch):
    store = torch.distributed.HashStore()
    monkeypatch.setattr(launch, "_meeting_place", lambda: store)
    first = torch.distributed.PrefixStore("gradscope", store)
    first.set("here/0", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 3 in process 1 and 2 in process 0; give all the same"):
        launch._met(1, 3)
    with pytest.raises(ValueError, match="two processes of this run have the RANK 1"):
        launch._met(1, 2)


def test_torchrun_trains_a_locked_tower_with_checkpointing(torchrun):
    """D05: an unfinished reduction would show at the second step."""
    started, folder = torchrun
    code = started.wait(2 * PATIENCE)
    said = (folder / "err").read_text()
    assert code == 0, said
    assert (folder / "out").read_text().count("validation R@1") == 1
    assert said.count("8 rows a micro-batch, 4 on each of 2 ranks") == 1
    assert Run(folder / "run").steps["step"].tolist() == [1, 2, 3]
    assert Run(folder / "run").done
