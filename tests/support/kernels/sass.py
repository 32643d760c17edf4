"""Checks of machine code for descriptors whose address ptxas has lost.

ptxas of CUDA 12.8 (in Triton 3.6) loses the low half of an address when two descriptors of one base differ in their
upper halves: it takes both halves of the next one from one register, which nothing wrote or which holds something else,
and the matrix units read from there. The PTX is right, and nothing else shows it.
"""

import re
from collections.abc import Iterator

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
UNIFORM = re.compile(r"(gdesc|desc)?\[?\bUR(\d+)\b(\.64)?")
CARRY = re.compile(r"UP\d")
WRITES_UNIFORM = ("U", "R2UR", "S2UR", "REDUX", "CREDUX", "VOTEU")


def reads_of_nothing(listing: str) -> list[str]:
    """Instructions, in the listing's order, that read a uniform register which none before them wrote."""
    written: set[int] = set()
    found = []
    for operation, operands in _instructions(listing):
        reads, writes = _uniform_registers(operation, operands)
        if reads - written:
            found.append(f"{operation} {', '.join(operands)}")
        written |= writes | reads
    return found


def sums_of_one_half(listing: str) -> list[str]:
    """Instructions that compute the upper half of a 64-bit sum from a register that its lower half was computed from.

    Sums whose lower half overwrites its operand are skipped: register names alone cannot show the fault there.
    """
    lower: dict[str, set[str]] = {}  # by carry: the registers of the sum that set it
    found = []
    for operation, operands in _instructions(listing):
        registers = {text for text in operands[1:] if re.fullmatch(r"UR\d+", text)}
        carries = [text for text in operands if CARRY.fullmatch(text)]
        if operation == "UIADD3":
            lower |= {carry: registers for carry in carries}
        elif operation == "UIADD3.X" and any(registers & lower.get(carry, set()) for carry in carries):
            found.append(f"{operation} {', '.join(operands)}")
        _, written = _uniform_registers(operation, operands)
        lower = {carry: sources - {f"UR{number}" for number in written} for carry, sources in lower.items()}
    return found


def _instructions(listing: str) -> Iterator[tuple[str, list[str]]]:
    for line in listing.splitlines():
        match = INSTRUCTION.search(line)
        if match is None:
            continue
        operation, operands = match.group(1), [text.strip() for text in match.group(2).split(",")]
        if operation.startswith("R2UR") and re.fullmatch(r"P\w+", operands[0]):  # whether all threads agree
            operands = operands[1:]
        yield operation, operands


def _uniform_registers(operation: str, operands: list[str]) -> tuple[set[int], set[int]]:
    reads: set[int] = set()
    writes: set[int] = set()
    is_uniform = operation.startswith(WRITES_UNIFORM)
    is_wide = is_uniform and (".64" in operation or ".WIDE" in operation)
    for place, operand in enumerate(operands):
        for kind, number, suffix in UNIFORM.findall(operand):
            first = int(number)
            if kind == "gdesc":  # A's and B's descriptors; B's alone where A is in registers
                skipped = 2 if re.match(r"R(\d+|Z)", operands[1]) else 0
                reads |= set(range(first + skipped, first + 4))
            elif place == 0 and is_uniform and re.fullmatch(r"UR\d+", operand):
                writes |= set(range(first, first + (2 if is_wide else 1)))
            else:
                reads |= set(range(first, first + (2 if kind or suffix or (".64" in operation and is_uniform) else 1)))
    return reads, writes
