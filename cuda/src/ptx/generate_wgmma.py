#!/usr/bin/env python3
"""Writes wgmma_shapes.inc: for each N, the accumulator operand lists and the numbers of the operands after them."""
import pathlib

SHAPES = [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256]


def define(name, items, per_line, quote):
    lines = [items[i : i + per_line] for i in range(0, len(items), per_line)]
    out = ["#define %s \\" % name]
    for i, line in enumerate(lines):
        last = i == len(lines) - 1
        text = ", ".join(line)
        if quote:
            text = '"%s%s%s"' % ("{" if i == 0 else "", text, "}" if last else ", ")
        elif not last:
            text += ","
        out.append("    " + text + ("" if last else " \\"))
    return out


def main():
    out = ["// Written by generate_wgmma.py; included by wgmma.cuh, once per shape macro.", ""]
    for n in SHAPES:
        regs = n // 2
        out += define("FLARE_WGMMA_REGS_%d" % n, ["%%%d" % i for i in range(regs)], 20, True)
        out += define("FLARE_WGMMA_ACC_%d" % n, ['"+f"(d[%d])' % i for i in range(regs)], 8, False)
        operands = ", ".join('"%%%d"' % (regs + i) for i in range(7))
        out += ["FLARE_WGMMA_SHAPE(%d, FLARE_WGMMA_REGS_%d, %s)" % (n, n, operands), ""]
    pathlib.Path(__file__).with_name("wgmma_shapes.inc").write_text("\n".join(out))


if __name__ == "__main__":
    main()
