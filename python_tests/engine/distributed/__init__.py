"""Tests of the engine in several processes."""
