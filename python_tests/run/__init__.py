"""Tests of private training as a whole."""
