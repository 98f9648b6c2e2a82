"""The tables of the federated papers, run again: many short runs, each kept by its settings."""
