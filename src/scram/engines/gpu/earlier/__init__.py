"""The stage `earlier`: dense attention in causal order."""
