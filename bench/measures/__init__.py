"""What is measured, a module for each run; `runs` has the command line and the table of each."""
