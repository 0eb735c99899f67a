"""What the benchmarks say while they run."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest

from gradscope.console import console


@pytest.fixture
def talk(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("talk")


def test_a_log_file_gets_a_line_now_and_then(talk, monkeypatch, capsys):
    for apart, lines in ((3600.0, ""), (0.0, "turns: 1 of 2\nturns: 2 of 2\n")):
        monkeypatch.setattr(talk, "APART", apart)
        with talk.told("turns") as advance:
            advance(1, 2)
            advance(2, 2)
        assert capsys.readouterr().err == lines


def test_a_path_that_is_gone_is_not_shown_even_where_it_is_broken_over_lines(talk, capsys):
    with talk.without_paths():
        console.print("the probe read 2 steps; look with: gradscope\ndiagnose gone")
        console.print("a reading failed")
    console.print("look with: gradscope diagnose here")
    assert capsys.readouterr().err == "a reading failed\nlook with: gradscope diagnose here\n"


def test_only_the_warning_of_random_weights_is_left_out(talk, caplog):
    talk.random_weights_are_meant()
    try:
        logging.warning("No pretrained weights loaded for model 'tiny'. Model initialized randomly.")
        logging.warning("something else")
    finally:
        logging.getLogger().removeFilter(talk._other_than_random_weights)
    assert caplog.messages == ["something else"]
