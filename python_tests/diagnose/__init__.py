"""Tests of the diagnostics from the command line."""
