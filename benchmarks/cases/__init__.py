"""The cases, one module for each room; each has ``cases(device, quick)`` (see ``registry``)."""
