"""Benchmarks: ratios measured in one run, against a named reference."""
