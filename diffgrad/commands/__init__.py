"""The commands that have modules of their own; `diffgrad/cli.py` registers them."""
