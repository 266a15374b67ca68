"""The stage `window_scores`: the keys of one box per query."""
