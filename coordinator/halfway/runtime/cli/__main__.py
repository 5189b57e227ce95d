"""Runs `halfway` as `python -m halfway.runtime.cli`."""

from halfway.runtime.cli.main import main

if __name__ == "__main__":
    main()
