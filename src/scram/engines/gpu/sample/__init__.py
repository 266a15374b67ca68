"""The stage `sample`: keys that each query draws or walks to on its own."""
