"""What `python -m bench` can run: the command line, the table and the exit status of each."""
