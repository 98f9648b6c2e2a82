"""Random models, records and ways to train: what the bound must hold for."""
