"""Progress of loads, exports and saves from Python: what the function of ``show_progress`` gets, and who draws bars."""

from pathlib import Path

import pytest

import mcore_bridge as mb
from mcore_bridge.weights.progress import tracked
from tests.support import pool, tiny


def events_of(folder: str, target: str) -> list[tuple[str, int, int]]:
    """Runs in a worker: the events of a load, a save, and a load of pairs."""
    events: list[tuple[str, int, int]] = []
    dims = mb.ParallelDims(pp=2)
    dims.initialize(device="cpu")
    with mb.show_progress(lambda *event: events.append(event)):
        models = mb.build_model(folder, dims=dims, device="cpu", dtype="auto")
        mb.save_hf_checkpoint(models, target)
        with mb.show_progress(lambda *event: None):  # the inner one counts
            state = mb.to_hf_state_dict(models)
        mb.load_hf_weights(models, state.items())
    mb.to_hf_state_dict(models)
    return events


def test_every_rank_reports_its_loads_and_exports(tmp_path: Path) -> None:
    folder = tiny.random_checkpoint(tiny.config("qwen3"), tmp_path / "hf")
    for events in pool.run(2, events_of, str(folder), str(tmp_path / "saved")):
        loads = [event for event in events if event[0] == "load" and event[2]]
        assert loads == [("load", number + 1, len(loads)) for number in range(len(loads))]
        assert 0 < len(loads) < 47  # the tensors of one stage
        exports = [event for event in events if event[0] == "export"]
        assert exports == [("export", number + 1, 47) for number in range(47)]
        assert [event for event in events if event[2] == 0][-1] == ("load", 47, 0)


@pytest.mark.parametrize(("rank", "draws"), [("0", True), ("1", False)])
def test_the_first_rank_alone_draws_a_bar(
    rank: str, draws: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    with mb.show_progress():
        assert list(tracked(range(3), "load", lambda: 3)) == [0, 1, 2]
    assert ("load: 100%" in capsys.readouterr().err) == draws
    with pytest.raises(mb.BridgeError, match="on_event must be a function, or None, found 3"), mb.show_progress(3):  # type: ignore[arg-type]
        pass
