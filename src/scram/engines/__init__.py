"""The engines: three implementations of one protocol. Folders say where code runs, files say what it does."""
