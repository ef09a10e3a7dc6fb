"""Draw ``verify`` and ``plan`` at work, as a terminal shows them: docs/images/terminal.svg.

python docs/tools/terminal.py FOLDER    (a checkpoint, such as that of `make demo`; its seconds differ from run to run)
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from mcore_bridge.commands import report
from mcore_bridge.commands.plan import tables
from mcore_bridge.commands.verify.verify import verify
from mcore_bridge.config.mesh.parallel_dims import ParallelDims
from mcore_bridge.factory.blueprint import BuildOptions

PICTURE = Path(__file__).parent.parent / "images" / "terminal.svg"
COLUMNS = 108
DIMS = ParallelDims(tp=2, pp=2, vp=2)
OPTIONS = "--tp 2 --pp 2 --vp 2"


def main() -> None:
    """Run both commands and keep what they print."""
    folder = Path(sys.argv[1])
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(f"[bold]$ mcore-bridge verify {folder} {OPTIONS}[/]")
    console.print(report.render(verify(folder, BuildOptions(dims=DIMS, device="cpu"), on_event=lambda *event: None)))
    console.print(f"\n[bold]$ mcore-bridge plan {folder} {OPTIONS}[/]")
    console.print(tables.render(tables.Planned.of(tables.plan(folder, BuildOptions(dims=DIMS)))))
    svg = console.export_svg(title="mcore-bridge", unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no font from a network
    lines = svg.replace("Fira Code, monospace", "monospace").replace("\u2026", "...").splitlines()
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    PICTURE.write_text(text.encode("ascii", "xmlcharrefreplace").decode(), encoding="ascii")


if __name__ == "__main__":
    main()
