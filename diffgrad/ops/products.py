"""How an op's products treat their operands: as they are, or in less precision (FORMULAS section 4, flag bf16)."""

from __future__ import annotations

from dataclasses import dataclass

from diffgrad.bars import U_BF16, Bounded, cut_to_tf32, is_bfloat16, to_bfloat16


@dataclass(frozen=True)
class Products:
    """The precision of a link's products.

    With ``bf16``, every product, forward and backward, takes both operands rounded to bfloat16 and accumulates in the
    run's precision. ``f32_cotangent`` and ``bf16_result`` are what frameworks do instead or besides: leave the
    upstream cotangent as it is; round what a product gives. ``bf16_batch_sum`` adds a weight's gradients of the
    examples, each rounded, in bfloat16. ``tf32`` takes operands as tensor cores do, in 11 bits.
    """

    bf16: bool = False
    f32_cotangent: bool = False
    bf16_result: bool = False
    bf16_batch_sum: bool = False
    tf32: bool = False

    def operand(self, a: Bounded) -> Bounded:
        """An activation or a weight, as a product takes it."""
        if self.tf32:
            return cut_to_tf32(a)
        return to_bfloat16(a) if self.bf16 else a

    def upstream(self, dy: Bounded) -> Bounded:
        """The upstream cotangent, as a product takes it."""
        return dy if self.f32_cotangent else self.operand(dy)

    def result(self, y: Bounded, examples: int = 1) -> Bounded:
        """What a product gives; for a weight's gradient, the number of examples that it sums over."""
        if self.bf16_batch_sum and examples > 1:
            return y.widen((examples + 1) * U_BF16 * y.reach)
        return y.widen(U_BF16 * y.mag) if self.bf16_result else y

    def looser(self, y: Bounded) -> dict[str, Products]:
        """What a framework's mixed precision may do beyond what is asked, by name, the least first.

        Without the flag, results that are rounded to bfloat16 show as such in the link's own result ``y``.
        """
        if not self.bf16:
            models = {"tf32_operands": Products(tf32=True)} if y.p.name == "float32" else {}
            return models | ({"bf16_result": Products(bf16_result=True)} if is_bfloat16(y) else {})
        return {
            "bf16_result": Products(True, bf16_result=True),
            "f32_cotangent": Products(True, f32_cotangent=True),
            "bf16_result+f32_cotangent": Products(True, True, True),
            "bf16_batch_sum": Products(True, bf16_result=True, bf16_batch_sum=True),
        }


EXACT = Products()
"""Operands as they are."""
