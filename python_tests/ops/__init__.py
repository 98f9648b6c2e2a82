"""Tests of the operations, on every backend."""
