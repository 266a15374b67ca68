"""`python -m scram`, the same as the command `scram`."""

from .cli import main

main()
