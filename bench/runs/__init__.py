"""The runs of `python -m bench`: the command line, the table and the exit status of each."""
