"""Tests of the papers' tables."""
