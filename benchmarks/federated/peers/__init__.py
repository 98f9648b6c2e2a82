"""The same round in other frameworks, each in an environment of its own under ``build/peers``."""
