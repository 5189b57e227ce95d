"""The program for `python -m halfway.pipeline` and for spark-submit, which needs a file."""

from halfway.pipeline.cli import main

if __name__ == "__main__":
    main()
