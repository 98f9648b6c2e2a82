"""Tests of training from the command line."""
