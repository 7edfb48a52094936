"""diffgrad: a property-based differential tester for the backward passes of neural networks."""

__version__ = "0.1.0"
