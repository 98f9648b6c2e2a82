"""Tests of federated learning."""
