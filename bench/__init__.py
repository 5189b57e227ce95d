"""Benchmarks of coordinators and a broker on one machine: `make bench` (docs/benchmarks.md)."""
