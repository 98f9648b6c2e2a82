"""How each kind of layer is computed, captured and turned into norms and clipped sums."""
