"""`python -m hookline`: the same as the command `hookline`."""

from __future__ import annotations

from hookline.cli import main

if __name__ == "__main__":
    main(prog_name="hookline")
