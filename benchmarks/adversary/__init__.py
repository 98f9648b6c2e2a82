"""Attacks on the guarantee: how far one record can move what is released.

    python -m benchmarks.adversary

Every attack trains without noise on a batch, and again with one record gone, and returns how far
the released sum moves in units of the bound C; or the figure that its claim is about; or the reason
with which the engine refused.
"""
