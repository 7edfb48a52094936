"""Framework adapters: one file per framework, each importing its framework and nothing of the oracle or the chains."""

if __name__ != "diffgrad.adapters":
    raise ImportError("import diffgrad.adapters, not adapters")
