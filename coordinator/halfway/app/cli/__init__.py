"""The command line `halfway`: its main program, and the operators' commands, which call a coordinator over REST."""
