"""The rules, from DataFrames to DataFrames: no I/O, no clock."""
