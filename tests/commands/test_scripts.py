"""Output for scripts: stdout has one JSON object and nothing else. The page of the command line lists its keys."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mcore_bridge.commands.run_command import in_options, plain
from tests import zoo
from tests.support import tiny
from tests.support.command import run

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "cli.md"

UNFIT = ("inf", "nan", "-1", "0", "-inf")


def listed(command: str) -> set[str]:
    """The keys of a command's object, from the page."""
    table = PAGE.read_text().split(f"| `{command}` | |\n|---|---|\n")[1].split("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def said(command: str, output: str, code: int = 0) -> Mapping[str, Any]:
    (line,) = output.splitlines()
    found: Mapping[str, Any] = json.loads(line, parse_constant=pytest.fail)  # NaN is no JSON
    assert found.keys() == listed(command)
    assert code == 0
    return found


def test_each_command_says_one_object(tmp_path: Path) -> None:
    folder, target = tmp_path / "qwen3_moe", tmp_path / "dist"
    tiny.random_checkpoint(zoo.cases()["qwen3_moe"].hf, folder)
    result = run("verify", folder, "--tp", 2, "--sp", "--json")
    verified = said("verify", result.stdout, result.exit_code)
    assert verified["good"] is True
    assert verified["mesh"] == {"tp": 2, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "etp": 1, "sp": True, "layout": None}
    assert verified["logits"]["relative"] <= verified["logits"]["tolerance"]
    assert verified["saved_different"] is None

    result = run("plan", folder, "--tp", 2, "--pp", 2, "--layout", "balanced", "--engine-tp", 2, "--world", 8, "--json")
    planned = said("plan", result.stdout, result.exit_code)
    assert planned["parameters"] == verified["parameters"]
    assert [stage["pp"] for stage in planned["stages"]] == [0, 1]
    assert planned["stages"][0]["embedding"]
    assert not planned["stages"][0]["tower"]
    assert planned["stages"][1]["output"]
    assert planned["mesh"]["layout"].startswith("E")
    assert planned["export"]["seconds"] > 0
    assert planned["engine"]["received"] > 0

    result = run("plan", folder, "--gpus", 2, "--tp", 1, "--json")
    search = said("plan --gpus", result.stdout, result.exit_code)
    memory = search["suggestions"][0]["memory"]
    assert memory.pop("total") == sum(memory.values())

    result = run("convert", folder, target, "--json")
    converted = said("convert", result.stdout, result.exit_code)
    assert converted["bytes"] == verified["bytes"]
    assert all((target / name).is_file() for name in converted["files"])

    result = run("draw", folder, tmp_path / "drawn", "--layers", 2, "--dtype", "bfloat16", "--json")
    assert all((tmp_path / "drawn" / name).is_file() for name in said("draw", result.stdout, result.exit_code)["files"])

    result = run("doctor", "--json")
    assert said("doctor", result.stdout, result.exit_code)["ready"] is True


def test_an_error_is_an_object_too(tmp_path: Path) -> None:
    zoo.cases()["qwen3"].hf.save_pretrained(tmp_path)
    result = run("plan", tmp_path, "--tp", 3, "--json")
    assert result.exit_code == 1
    assert f"error: {json.loads(result.stdout)['error']}\n" == result.stderr
    refused = json.loads(run("plan", tmp_path, "--gpus", 2, "--ep", 2, "--json").stdout)["refused"]
    assert [each["reason"] for each in refused] == [
        "--ep 2 needs a model with experts, but this one has none: use --ep 1"
    ]


@pytest.mark.parametrize("command", ["verify", "plan", "convert", "merge", "draw", "doctor", "verfy", "--nothing"])
def test_wrong_usage_is_an_object_too(command: str, tmp_path: Path) -> None:
    """A missing argument, an unknown command or option, and invalid values."""
    wrong = [(), ("--nothing",), ("--tp", "two"), *([tmp_path, *option] for option in WRONG.get(command, ()))]
    for arguments in wrong[command == "doctor" :]:
        result = run(command, "--json", *arguments)
        assert result.exit_code == 2, arguments
        (error,) = json.loads(result.stdout).items()
        assert error == ("error", result.stderr.removeprefix("error: ").strip())
        assert "--help shows" in result.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["plan", ".", "--tp", "two"], r"^error: --tp .*valid integer.*'two'"),
        (["plan", ".", "--tp", 0], r"^error: --tp .*1.*0"),
        (["plan", ".", "--gpu-memory", "nan"], r"^error: --gpu-memory .*nan"),
        (["plan"], "^error: expected FOLDER, found nothing: Folder with a config.json"),
        (["plan", ""], "^error: FOLDER expected a path, found an empty string: is a variable not set"),
        (["plan", ".", "--gpu-memroy", 3], "--gpu-memroy, do you mean --gpu-memory"),
        (["plan", ".", "more"], "argument.*more"),
        (["plan", ".", "--tp"], "--tp.* requires an argument"),
        (["verfy", "."], "'verfy'.*'verify'"),
        (["plan", ".", "--sp"], "--sp needs --tp > 1.* found --tp 1"),
        (["plan", ".", "--vision", "no"], "--vision must be one of text_only, train, frozen, found 'no'"),
        (["plan", ".", "--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16, auto, found 'int8'"),
        (["plan", ".", "--recompute"], "--recompute would have no effect without --gpus"),
        (["verify", ".", "--files-only"], "found one: name the other one by --against"),
        (["convert", ".", "out", "--tp", 2], "torch_dist loads at any mesh, found TP2"),
    ],
)
def test_wrong_usage_says_what_was_found(line: list[Any], said: str) -> None:
    result = run(*line)
    assert result.exit_code == 2
    assert re.search(said, result.stderr), result.stderr


WRONG = {
    "plan": [("--gpus", 8, f"--{name}={value}") for name in ("gpu-memory", "bandwidth") for value in UNFIT]
    + [("--gpus", 0), ("--world", -1)],
    "verify": [("--tokens", 0), ("--mtp", -1)],
    "draw": [(".", "--layers", 0), (".", "--seed", 2**64)],
}
"""For each command, options with wrong values."""


def test_a_logit_that_is_no_number_is_null() -> None:
    assert plain((float("nan"), float("inf"), 0.5)) == [None, None, 0.5]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("3 ranks are not a multiple of tp=2 * cp=1", "3 ranks are not a multiple of --tp 2 * --cp 1"),
        ("'tp=3' in /a/tp=3/x and tp_rank=1 stay", "'tp=3' in /a/tp=3/x and tp_rank=1 stay"),
        ("--tp stays; a layout is split", "--tp stays; a layout is split"),
        ("layout 'Et' must; set sp=True", "--layout 'Et' must; set --sp"),
        ("strict_config=True is: pass strict_config=False, or", "--strict-config is: leave out --strict-config, or"),
        ("vp=2 is no option here", "vp=2 is no option here"),
    ],
)
def test_messages_have_the_words_of_the_command(message: str, expected: str) -> None:
    assert in_options(message, ["tp", "cp", "sp", "layout", "strict_config"]) == expected
    assert in_options("expected ep to divide tp=2", ["tp", "ep"], of_engine=True) == (
        "expected --engine-ep to divide --engine-tp 2"
    )
