"""Runs `halfway` as `python -m halfway.app.cli`."""

from halfway.app.cli.main import main

if __name__ == "__main__":
    main()
