"""The command ``mcore-bridge``: arguments and exit codes. What it does is in ``mcore_bridge.commands``."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command; exit code 0 when all is well, 1 when something is off, 2 for wrong usage."""
    try:
        from mcore_bridge.commands.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"mcore-bridge: the command line needs {error.name}; install it with: pip install 'mcore-hf[cli]'")
    try:
        app()
    finally:
        gc.freeze()  # or the interpreter would look through all that torch and a plan have made, for over a second


if __name__ == "__main__":
    main()
