"""Tails: what stands for the keys outside a query's windows. Each file holds the settings of a tail and what it does.

A new tail is a class: `Tail` in `base` says what it must define. `resolve` and `pipeline` know no tail by name, but for
the default.
"""
