"""Entry point of the command ``mcore-bridge``. The commands themselves are in ``mcore_bridge.commands``."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command. The exit code is 0 for success, 1 for a problem, 2 for wrong usage."""
    try:
        from mcore_bridge.commands.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"mcore-bridge: the command line needs {error.name}; install it with: pip install 'mcore-hf[cli]'")
    try:
        app()
    finally:
        gc.freeze()  # otherwise the garbage collector would search all objects at exit, which takes over a second


if __name__ == "__main__":
    main()
