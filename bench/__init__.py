"""The benchmark of one coordinator on one broker, all on one machine: `make bench`; docs/benchmarks.md tells more."""
