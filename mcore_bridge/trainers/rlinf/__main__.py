"""RLinf's scripts for checkpoints, with RLinf's arguments: ``python -m mcore_bridge.trainers.rlinf SCRIPT ...``.

SCRIPT is ``convert_hf_to_middle_file`` or ``convert_middle_file_to_mg``. The HF config describes the model.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from mcore_bridge.trainers.rlinf.convertor import hf_to_middle_file, middle_file_to_mg
from mcore_bridge.trainers.rlinf.convertor_settings import ConvertorSettings
from mcore_bridge.weights.dist_checkpoint.extra_state import EXTRA_STATES

SCRIPTS = {"convert_hf_to_middle_file": hf_to_middle_file, "convert_middle_file_to_mg": middle_file_to_mg}
_UNUSED = ("--model", "--model-type", "--use-gpu-num", "--process-num")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script."""
    parser = ArgumentParser(prog="python -m mcore_bridge.trainers.rlinf", description=__doc__)
    scripts = parser.add_subparsers(dest="script", required=True)
    for name, convert in SCRIPTS.items():
        script = scripts.add_parser(name)
        script.add_argument("--load-path", required=True, help="folder to read")
        script.add_argument("--save-path", required=True, help="folder to write")
        for unused in _UNUSED:
            script.add_argument(unused, help="an argument of RLinf's script, without effect here")
        if convert is middle_file_to_mg:
            _add_mesh(script)
    asked = parser.parse_args(arguments)
    SCRIPTS[asked.script](_conversion(asked))


def _add_mesh(script: ArgumentParser) -> None:
    for size in ("tp", "pp", "tpe", "ep"):
        script.add_argument(f"--{size}-size", type=int, default=1)
    script.add_argument("--pp-stages", type=int, nargs="*", help="layers of each pipeline stage")
    script.add_argument("--grouped-gemm", choices=("te",), help="experts of one grouped module")
    for fused in ("--te-ln-linear-qkv", "--te-ln-linear-mlp_fc1"):
        script.add_argument(fused, type=_truth, default=False, help="norms fused with the linears behind them: both")
    script.add_argument("--te-ln-add-extra-state", choices=list(filter(None, EXTRA_STATES)))


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "1")


def _conversion(asked: Namespace) -> ConvertorSettings:
    fields = {name: value for name, value in vars(asked).items() if name in ConvertorSettings.__dataclass_fields__}
    if fields.get("pp_stages") is not None:
        fields["pp_stages"] = tuple(fields["pp_stages"])
    return ConvertorSettings(**fields)


if __name__ == "__main__":
    main()
