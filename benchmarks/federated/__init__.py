"""Federated rounds against per-client loops and other frameworks: ``-m benchmarks.federated``."""
