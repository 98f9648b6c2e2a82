"""Ahead-of-time compilation of every GPU kernel, with no GPU: what ``make gpu-check`` runs."""
