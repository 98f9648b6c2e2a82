"""FedFisher's tables and figures: clients are trained once, and merged by every method."""
