"""Texts that are hard to encode, and random damage to bytes."""

TEXTS = ["grün ist die Wiese, ", "def f(x):\n    return x\n\n\n", "你好 <|endoftext|> ", "🜁", "a\tb  c\r\n"]


def corrupt(content: bytes, random) -> bytes:
    """Truncate `content`, flip one bit, repeat a part, or insert random bytes."""
    at, end = sorted(random.integers(0, len(content) + 1, 2).tolist())
    match random.integers(4):
        case 0:
            return content[:at]
        case 1:
            at = min(at, len(content) - 1)
            return content[:at] + bytes([content[at] ^ (1 << int(random.integers(8)))]) + content[at + 1 :]
        case 2:
            return content[:end] + content[at:]
    return content[:at] + random.bytes(int(random.integers(1, 9))) + content[at:]
