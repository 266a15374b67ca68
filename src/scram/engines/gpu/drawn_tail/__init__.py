"""The stage `drawn_tail`: keys that the queries of a row share, drawn, beside the keys of the windows."""
