"""Compile the Triton kernels for GPUs that are not here, in a process of its own.

    python -m tests.cuda_paths.compile_triton      # one line: [compute capability, bytes of code, of shared memory]
"""

from __future__ import annotations

import itertools
import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rldsl.backends.torch.kernels import layer_kernels, nucleus, ordered_products, split_kv

# compute capability, head size, query heads per KV head
PART_CASES = ((80, 64, 4), (80, 128, 7), (90, 64, 6), (90, 80, 2), (90, 96, 1), (90, 128, 8), (90, 256, 4))
JOIN_CASES = ((80, 128, 7), (90, 64, 4), (90, 256, 8))
PRODUCT_CASES = tuple((target, dtype) for target in (80, 90) for dtype in ("fp32", "bf16"))


def compiled(kernel: object, target: int, types: dict[str, str], constants: dict[str, int]) -> list[int]:
    """types: of the arguments that are no constants. Pointers and strides are multiples of 16, as the KV cache's are."""
    names = kernel.arg_names
    signature = {n: types.get(n, "constexpr") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if types.get(n, "").startswith("*") or n in ("slot", "token", "head")}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()},
                       attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32))
    return [target, len(made.asm["cubin"]), made.metadata.shared]


def main() -> None:
    found = []
    for target, size, each in PART_CASES:
        shape = {"HEADS": 4, "EACH": each, "SIZE": size, "ROWS": max(16, triton.next_power_of_2(each)),
                 "WIDE": triton.next_power_of_2(size)}
        types = {"queries": "*bf16", "keys": "*bf16", "values": "*bf16", "positions": "*i64", "sums": "*fp32",
                 "stats": "*fp32", "first": "i32", "scale": "fp32", "window": "i32", "slot": "i32", "token": "i32",
                 "head": "i32"}
        found.append(compiled(split_kv._part, target, types, shape | {"PART": 256, "BLOCK": split_kv.BLOCK}))
    for target, size, each in JOIN_CASES:
        shape = {"HEADS": 4, "EACH": each, "SIZE": size,
                 "WIDE": triton.next_power_of_2(size)}
        found.append(compiled(split_kv._join, target, {"sums": "*fp32", "stats": "*fp32", "out": "*bf16",
                                                       "parts": "i32"}, shape | {"MANY": 64, "AT_ONCE": split_kv.JOINED_AT_ONCE}))
    tile = {"ROWS": ordered_products.ROWS, "COLUMNS": ordered_products.COLUMNS, "TERMS": ordered_products.TERMS}
    for target, dtype in PRODUCT_CASES:
        numbers = dict.fromkeys(set(ordered_products._product.arg_names) - set(tile), "i32")
        types = numbers | dict.fromkeys(("left", "right", "out"), f"*{dtype}")
        found.append(compiled(ordered_products._product, target, types, tile))
    for target in (80, 90):
        types = {"scores": "*fp32", "out": "*fp32", "mass": "fp32", "columns": "i32", "stride": "i32"}
        found.append(compiled(nucleus._threshold, target, types,
                              {"BLOCK": nucleus.BLOCK, "WAYS": nucleus.WAYS, "ROUNDS": nucleus.ROUNDS}))
    for target, half in itertools.product((80, 90), (32, 40, 64, 128)):
        types = dict(x="*bf16", y="*bf16", cos="*fp32", sin="*fp32", head="i32", token="i32", heads="i32")
        found.append(compiled(layer_kernels._rotate, target, types, {
            "HALF": half, "WIDE": triton.next_power_of_2(half), "ROWS": layer_kernels.HEADS_AT_ONCE, "BACK": target == 80}))
    for target, kernel in itertools.product((80, 90), (layer_kernels._gate, layer_kernels._gate_backward)):
        types = {name: "*bf16" for name in kernel.arg_names} | {"count": "i32"}
        del types["BLOCK"]
        found.append(compiled(kernel, target, types, {"BLOCK": layer_kernels.ELEMENTS_AT_ONCE}))
    for target, wide in itertools.product((80, 90), (1024, 8192)):
        types = dict(x="*fp32", weight="*bf16", out="*bf16", size="i32", eps="fp32")
        found.append(compiled(layer_kernels._normalize, target, types, {"WIDE": wide}))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
