"""Throughput and memory of private training: ``python -m benchmarks.training``."""
