"""Hypothesis strategies: block specs, values, and whole cases."""

from diffgrad.strategies.cases import Batch, batches, cases, sample

if __name__ != "diffgrad.strategies":
    raise ImportError("import diffgrad.strategies, not strategies")

__all__ = ["Batch", "batches", "cases", "sample"]
