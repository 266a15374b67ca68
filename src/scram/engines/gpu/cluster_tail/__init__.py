"""The stage `cluster_tail`: clusters beside the keys of the windows."""
