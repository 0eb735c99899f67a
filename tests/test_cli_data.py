"""``gradscope data`` as the user meets it: tables, JSON, plans and one-line refusals, against a real local server."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from file_server import FileServer, serving

from gradscope.cli import main
from gradscope.console import out
from gradscope.data import data_sets
from gradscope.data.info import DataInfo, Download

HELP = """
import sys
from typer.testing import CliRunner
from gradscope.cli import app
for command in ("list", "info", "fetch", "check", "pack"):
    result = CliRunner().invoke(app, ["data", command, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert f"Example: gradscope data {command}" in result.output, result.output
assert "Example: gradscope data" in CliRunner().invoke(app, ["data", "--help"]).output
heavy = {"torch", "pandas", "matplotlib", "open_clip", "scipy", "PIL", "httpx2", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_has_examples_and_is_light():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def cli(monkeypatch, capfd, tmp_path):
    """``cli("info", "scenes")`` -> (exit code, stdout, stderr), in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(out, "width", 500)  # a console reads COLUMNS when it is made, which another test may have caused
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gradscope", "data", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return int(stop.value.code or 0), out, err

    return call


def pictures() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for k in range(3):
            archive.writestr(f"images/{k}.jpg", bytes(10 + k))
    return made.getvalue()


CAPTIONS = b'{"captions": []}' + b" " * 1985  # 2,000 bytes


@pytest.fixture
def toy(cli, monkeypatch):
    """A registered data set ``toy-set`` on a local server: captions with a hash, pictures in an archive, photos by hand."""
    with serving() as server:
        server.add("captions.json", CAPTIONS)
        server.add("images.zip", pictures())
        info = DataInfo(
            title="Toy set: for the tests",
            homepage="https://example.org/toy",
            licence="CC BY 4.0",
            citation="Nobody 2020",
            layout=("captions.json  the captions", "images/  the pictures", "photos/  more", "also notes.txt  a note", "remark"),
            how="ask for the photos",
            counts={"train": 1200, "test": 34},
            downloads=(
                Download(to="captions.json", url=server.url("captions.json"), sha256=hashlib.sha256(CAPTIONS).hexdigest()),
                Download(to="images.zip", url=server.url("images.zip"), unpack=True, makes="images"),
            ),
        )
        component = register(monkeypatch, "toy-set", info)
        assert component.info is info
        yield server


def register(monkeypatch, name: str, info: DataInfo) -> type:
    @dataclass(frozen=True, kw_only=True)
    class Toy:
        info: ClassVar[DataInfo]
        folder: str = "x"

    Toy.info = info
    data_sets.names()
    monkeypatch.setitem(data_sets._items, name, Toy)
    return Toy


def test_list(cli, toy, tmp_path: Path):
    code, out, _ = cli("list")
    assert code == 0
    line = next(line for line in out.splitlines() if "toy-set" in line)
    assert [cell.strip() for cell in line.split("│")[1:-1]] == ["toy-set", "Toy set", "train 1,200, test 34", "no", "CC BY 4.0"]
    assert "made on first use" in next(line for line in out.splitlines() if " scenes " in line)
    code, out, _ = cli("list", "--json")
    facts = {fact["name"]: fact for fact in json.loads(out)}
    assert set(facts) == set(data_sets.names())
    assert facts["toy-set"]["counts"] == {"train": 1200, "test": 34}
    assert (facts["toy-set"]["on_disk"], facts["scenes"]["on_disk"]) == ("no", "not needed")
    (tmp_path / "here/toy-set/images").mkdir(parents=True)
    code, out, _ = cli("list", "--data-dir", "here", "--json")
    fact = next(fact for fact in json.loads(out) if fact["name"] == "toy-set")
    assert (fact["on_disk"], fact["folder"], fact["missing"]) == ("partly", "here/toy-set", ["captions.json", "photos/"])
    assert "partly, in here/toy-set; missing: captions.json, photos/" in cli("list", "--data-dir", "here")[1]


def test_every_registered_data_set_has_its_facts(cli):
    for name in data_sets.names():
        code, out, _ = cli("info", name)
        info: DataInfo = data_sets[name].info
        assert code == 0
        for fact in (info.title, info.licence, info.homepage, info.citation, info.how, *info.layout, *(d.to for d in info.downloads)):
            assert fact in out, (name, fact)
        assert json.loads(cli("info", name, "--json")[1])["licence"] == info.licence
        for download in info.downloads:
            assert bool(download.url) != bool(download.hub and download.hub_file), name


def test_info(cli, toy, tmp_path: Path):
    (tmp_path / "cache/data/toy-set").mkdir(parents=True)
    (tmp_path / "cache/data/toy-set/captions.json").write_bytes(CAPTIONS)
    _, out, _ = cli("info", "toy-set")
    for line in (
        "  there    captions.json  the captions",
        "  missing  images/  the pictures",
        "  missing  also notes.txt  a note",
        "  remark",
    ):
        assert line in out.splitlines()
    assert "  unchecked captions.json, size unknown, from http://" in out
    facts = json.loads(cli("info", "toy-set", "--json")[1])
    assert facts["settings"] == {"folder": "x"}
    assert [(d["to"], d["state"]) for d in facts["downloads"]] == [("captions.json", "unchecked"), ("images.zip", "missing")]
    code, _, err = cli("info", ".")
    assert (code, "data check ." in err) == (2, True)
    code, _, err = cli("info", "toy-sett")
    assert code == 2
    assert "unknown data set 'toy-sett'. Did you mean 'toy-set'?" in err


def test_fetch(cli, toy: FileServer, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GRADSCOPE_DATA", str(tmp_path / "mine"))
    code, out, err = cli("fetch", "toy-set", "--dry-run")
    assert code == 0
    assert "Licence: CC BY 4.0 (https://example.org/toy)" in err
    size = len(CAPTIONS) + len(pictures())
    assert f"2 of 2 files, {size / 1000:.1f} kB, would go to {tmp_path / 'mine/toy-set'}; nothing was written" in out
    assert not (tmp_path / "mine").exists()
    code, out, err = cli("fetch", "toy-set")
    assert code == 0, err
    assert "Licence: CC BY 4.0" in err
    assert "captions.json: fetched, 2.0 kB, checked by sha256" in out
    assert "images.zip: fetched, " in out
    assert "3 files, checked by size" in out
    assert "ask for the photos." in out
    assert f"still missing in {tmp_path / 'mine/toy-set'}: photos/" in out
    assert (tmp_path / "mine/toy-set/images/2.jpg").read_bytes() == bytes(12)
    requests = len(toy.log)
    (tmp_path / "mine/toy-set/photos").mkdir()
    code, out, _ = cli("fetch", "toy-set")
    assert f"toy-set is complete in {tmp_path / 'mine/toy-set'}; nothing to do" in out
    assert "missing" not in out
    assert len(toy.log) == requests
    assert "0 of 2 files, 0 bytes, would go" in cli("fetch", "toy-set", "--dry-run")[1]
    assert str(tmp_path / "mine/toy-set") in next(line for line in cli("list")[1].splitlines() if "toy-set" in line)
    assert json.loads(cli("info", "toy-set", "--json")[1])["on_disk"] == "yes"


def test_a_stopped_fetch_is_one_line_and_goes_on(cli, toy: FileServer, tmp_path: Path):
    toy.files["/captions.json"].troubles = [("cut", 0.5), ("cut", 0.0)]
    code, _, err = cli("fetch", "toy-set", "--only", "*.json", "--tries", 1, "--data-dir", "here")
    assert code == 2
    assert err.splitlines()[-1].startswith("gradscope: http://")
    assert "1,000 bytes are kept; run the same command again to go on" in err
    code, out, _ = cli("fetch", "toy-set", "--only", "*.json", "--data-dir", "here")
    assert code == 0
    assert toy.log[-1].headers["range"] == "bytes=1000-"
    assert (tmp_path / "here/toy-set/captions.json").read_bytes() == CAPTIONS
    assert "still missing in here/toy-set: images/, photos/" in out


def test_what_lies_there_under_another_name_is_left_alone(cli, toy: FileServer, tmp_path: Path):
    for folder in ("images", "photos"):
        (tmp_path / "all" / folder).mkdir(parents=True)
    (tmp_path / "all/captions.json").write_bytes(CAPTIONS)
    assert "toy-set is on disk already in all; nothing to do" in cli("fetch", "toy-set", "--data-dir", "all")[1]
    assert not toy.log
    assert "images.zip: fetched" in cli("fetch", "toy-set", "--data-dir", "other")[1]


def test_nothing_to_fetch(cli, monkeypatch):
    assert cli("fetch", "scenes")[:2] == (0, "scenes needs no download: it is drawn on first use.\n")
    register(
        monkeypatch, "by-hand", DataInfo(title="t", homepage="h", licence="l", citation="c", layout=("a/  b",), how="ask the authors")
    )
    code, _, err = cli("fetch", "by-hand", "--data-dir", "here")
    assert code == 2
    assert "no part of 'by-hand' can be fetched by a command; ask the authors. It belongs in here/by-hand." in err
    assert cli("fetch", "no-such-set")[0] == 2
