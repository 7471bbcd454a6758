"""Memory of one block, handed out by session: ranks ask for the same in the same order, and get the same offsets."""

from __future__ import annotations

ALIGN = 256


class Arena:
    """``size`` bytes from ``address`` on."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size
        self._held: dict[int, tuple[int, int]] = {}  # offset: bytes, owner

    def take(self, size: int, owner: int) -> int:
        """The address of the first gap of ``size`` bytes; 0 if there is none."""
        at = 0
        for offset, (held, _) in sorted(self._held.items()):
            if offset - at >= size:
                break
            at = offset + held
        if not size or at + size > self._size:
            return 0
        self._held[at] = (-(-size // ALIGN) * ALIGN, owner)
        return self._address + at

    def give_back(self, owner: int) -> None:
        """All that ``owner`` holds."""
        self._held = {offset: entry for offset, entry in self._held.items() if entry[1] != owner}
