"""Configs of published checkpoints load, as their publishers wrote them."""

import json
from pathlib import Path

import pytest

from tests.support.published import (
    FOLDER,
    expand,
    obstacles,
    outcome_of,
    outcomes_file,
    records,
    waits_for_megatron_core,
)

RECORDS = records()


def test_each_record_says_what_it_is_of_and_where_it_was_seen() -> None:
    names = [record.name for record in RECORDS]
    assert len(set(names)) == len(names) >= 120
    for record in RECORDS:
        assert record.name.count("/") == 1, record.name
        assert record.source, record.name
        assert record.config["model_type"], record.name


def test_short_forms_are_written_out() -> None:
    assert expand({"cycle": ["a", "b"], "length": 5}) == ["a", "b", "a", "b", "a"]
    assert expand([{"runs": [["a", 2], ["b", 1]]}]) == [["a", "a", "b"]]
    assert expand({"x": {"numbered": ["y", "l.{0-1,3}.z"]}}) == {"x": ["y", "l.0.z", "l.1.z", "l.3.z"]}
    assert expand({"numbered": {"l.{7,9}": {"n": 1}}}) == {"l.7": {"n": 1}, "l.9": {"n": 1}}


def test_the_library_says_of_each_what_is_written_down(tmp_path: Path) -> None:
    written = json.loads(outcomes_file().read_text())
    assert list(written) == [record.name for record in RECORDS], "run: python -m tests.support.published"
    differences = []
    for record in RECORDS:
        outcome = outcome_of(record, tmp_path / record.name)
        if outcome != written[record.name] and not waits_for_megatron_core(outcome):
            differences.append(f"{record.name}: written {written[record.name]}, now {outcome}")
    assert not differences, "\n".join([*differences, "if this is meant, run: python -m tests.support.published"])


def test_parameters_are_those_that_publishers_name() -> None:
    written = json.loads(outcomes_file().read_text())
    sizes = json.loads((FOLDER / "sizes.json").read_text())
    counted = {name: written[name]["parameters"] for name in sizes if "parameters" in written[name]}
    assert len(counted) >= 1
    for name, parameters in counted.items():
        total = sizes[name]["total"]
        assert parameters / (float(total[:-1]) * {"B": 1e9, "T": 1e12}[total[-1]]) == pytest.approx(1, abs=0.04), name


def test_obstacles_are_told_apart() -> None:
    message = "deepseek_v32 needs megatron-core 0.19.2 or later. hidden_act must be 'silu', found 'relu': it computes."
    assert obstacles(message) == ["megatron-core 0.19.2", "value hidden_act"]
    assert obstacles("the table of 'llama' does not know a=1, b='x'. If it changes") == ["fields a", "fields b"]
    assert obstacles("nobody foresaw this") == ["nobody foresaw this"]
