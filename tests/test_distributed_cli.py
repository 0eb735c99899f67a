"""The command line on several processes: one voice, one writer, and an end for all when one of them ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradscope.cli import app, main
from gradscope.data.batching import epoch_order
from gradscope.recipe import resolve
from gradscope.runlog import Run
from gradscope.training_data import training_data

#: Imports once what each of the processes needs.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gradscope.train", "gradscope.gallery", "open_clip"])
PATIENCE = 60  # seconds


def speak(rank: int, size: int, port: int, words: list[str], heard: Path) -> None:
    """A process as torchrun or srun would start it; what it writes goes to a file."""
    with (heard / f"out-{rank}").open("wb") as out, (heard / f"err-{rank}").open("wb") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    sys.argv = ["gradscope", *words]
    main()


class Together:
    """Two processes of one command."""

    def __init__(self, words: list[str], heard: Path) -> None:
        heard.mkdir()
        self.heard = heard
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks = [FORKS.Process(target=speak, args=(rank, 2, port, words, heard)) for rank in range(2)]
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


def base(scenes: Path, encoder: Path) -> list[str]:
    return ["train", "--data", str(scenes), "--encoder", str(encoder), "--device", "cpu", "--batch-size", "8"]


def test_torchrun_trains_a_locked_tower_with_checkpointing(scenes_folder, small_encoder, tmp_path):
    """D05: an unfinished reduction would show at the second step."""
    words = [*base(scenes_folder, small_encoder), "--freeze", "image", "--grad-checkpointing", "--max-steps", "3", "--log-grads"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "gradscope", *words, "--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation R@1") == 1
    assert done.stderr.count("8 rows a micro-batch, 4 on each of 2 ranks") == 1
    assert Run(tmp_path / "run").steps["step"].tolist() == [1, 2, 3]
    assert Run(tmp_path / "run").done


def test_eval_speaks_once_and_says_what_one_process_says(scenes_folder, small_encoder, tmp_path):
    words = ["eval", str(small_encoder), "--data", str(scenes_folder), "--device", "cpu", "--batch-size", "16", "--resamples", "20"]
    together = Together([*words, "--output", str(tmp_path / "two.json")], tmp_path / "heard")
    alone = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "one.json")])
    assert alone.exit_code == 0
    assert together.ended() == [0, 0], together.said("err")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one.pop("provenance")["open_clip"] == two.pop("provenance")["open_clip"]
    assert one == two
    first, second = together.said("out")
    assert first.count("JSON:") == 1
    assert second == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch-size", "7"], "cannot be dealt evenly to 2 of them; use 6 or 8"),
        (["--device", "cuda:0"], "torch sees no CUDA device"),
    ],
)
def test_what_all_ranks_refuse_is_said_once(scenes_folder, small_encoder, tmp_path, more, message):
    together = Together([*base(scenes_folder, small_encoder), *more, "--output", str(tmp_path / "run")], tmp_path / "heard")
    assert together.ended() == [2, 2]
    words = "".join(together.said("err"))
    assert words.count("gradscope:") == 1
    assert message in words
    assert "Traceback" not in words


def test_a_command_for_one_process_is_refused(tmp_path):
    together = Together(["sweep", "--output", str(tmp_path / "sweep")], tmp_path / "heard")
    assert together.ended() == [2, 2]
    said = "".join(together.said("err"))
    assert said.count("gradscope:") == 1
    assert "sweep runs as one process; only train, eval" in said


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
    words = [*base(scenes_folder, small_encoder), "--checkpoint-every", "2", "--epochs", "500", "--output", str(tmp_path / "run")]
    together = Together(words, tmp_path / "heard")
    for _ in range(10 * PATIENCE):
        if (tmp_path / "run" / "checkpoints" / "step-000002").is_dir():
            break
        time.sleep(0.1)
    os.kill(together.ranks[1].pid or 0, signal.SIGKILL)
    start = time.monotonic()
    assert together.ended() == [2, -9]
    assert time.monotonic() - start < PATIENCE / 2
    first, second = together.said("err")
    assert first.count("gradscope:") == 1
    assert "another process of this run has ended" in first
    assert "--resume" in first
    assert second == ""
    assert Run(tmp_path / "run").checkpoints()
    assert not Run(tmp_path / "run").done


def test_a_rank_that_is_told_to_stop_closes_the_run(scenes_folder, small_encoder, tmp_path):
    """SIGTERM, as torchrun sends it to all when one has failed, and Slurm when the time is up."""
    words = [*base(scenes_folder, small_encoder), "--epochs", "500", "--output", str(tmp_path / "run")]
    together = Together(words, tmp_path / "heard")
    for _ in range(10 * PATIENCE):
        steps = tmp_path / "run" / "steps.jsonl"
        if steps.is_file() and len(steps.read_text().splitlines()) > 2:
            break
        time.sleep(0.1)
    for process in together.ranks:
        process.terminate()
    assert together.ended() == [2, 2]
    said = "".join(together.said("err"))
    assert said.count("gradscope:") == 1
    assert "told to stop (SIGTERM)" in said or "another process of this run has ended" in said
    assert "Traceback" not in said
