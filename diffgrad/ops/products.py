"""How an op's products treat their operands: as they are, or rounded to bfloat16 (FORMULAS section 4, flag bf16)."""

from __future__ import annotations

from dataclasses import dataclass

from diffgrad.bars import U_BF16, Bounded, to_bfloat16


@dataclass(frozen=True)
class Products:
    """The precision of a link's products.

    With ``bf16``, every product, forward and backward, takes both operands rounded to bfloat16 and accumulates in the
    run's precision. ``f32_cotangent`` and ``bf16_result`` are what frameworks do instead or besides: leave the
    upstream cotangent as it is; round what a product gives. ``bf16_batch_sum`` adds a weight's gradients of the
    examples, each rounded, in bfloat16.
    """

    bf16: bool = False
    f32_cotangent: bool = False
    bf16_result: bool = False
    bf16_batch_sum: bool = False

    def operand(self, a: Bounded) -> Bounded:
        """An activation or a weight, as a product takes it."""
        return to_bfloat16(a) if self.bf16 else a

    def upstream(self, dy: Bounded) -> Bounded:
        """The upstream cotangent, as a product takes it."""
        return to_bfloat16(dy) if self.bf16 and not self.f32_cotangent else dy

    def result(self, y: Bounded, examples: int = 1) -> Bounded:
        """What a product gives; for a weight's gradient, the number of examples that it sums over."""
        if self.bf16_batch_sum and examples > 1:
            return y.widen((examples + 1) * U_BF16 * y.reach)
        return y.widen(U_BF16 * y.mag) if self.bf16_result else y

    def looser(self) -> dict[str, Products]:
        """What a framework's mixed precision may do beyond the flag, by name, the least first."""
        if not self.bf16:
            return {}
        return {
            "bf16_result": Products(True, bf16_result=True),
            "f32_cotangent": Products(True, f32_cotangent=True),
            "bf16_result+f32_cotangent": Products(True, True, True),
            "bf16_batch_sum": Products(True, bf16_result=True, bf16_batch_sum=True),
        }


EXACT = Products()
"""Operands as they are."""
