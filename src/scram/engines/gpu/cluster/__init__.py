"""The stage `cluster`: keys grouped by content."""
