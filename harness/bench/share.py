"""One rank's share of the work, alone on one GPU: the launches and shapes of one of several, without any other.

Its exchanges are made as always, by the same kernel, but with itself: the window's addresses are chosen so that what it
sends to another rank lies where it looks for that rank's. So a gather gives its own part as every rank's. Shapes and
routing are like the real ones; what comes out means nothing.
"""

from __future__ import annotations

from engine.ranks.exchange import EXCHANGE, MIB, memory_view
from engine.ranks.member import Member, Window, member

COUNTERS, WORD = 512, 16  # bytes: of a window's counters, and of its words (csrc/cuda/ranks.cu)


def own_window(address: int, size: int, ranks: int) -> Window:
    """A window of ``size`` bytes at ``address`` whose owner, rank 0, plays all ``ranks``: the words that it stores into
    the window of rank r, in the place of rank 0, lie in the place of rank r of its own."""
    share = (size - COUNTERS) // (2 * ranks * WORD) * WORD
    return Window(tuple(address + rank * share for rank in range(ranks)), size, EXCHANGE.total_seconds())


def alone(ranks: int) -> Member:
    """Rank 0 of ``ranks`` without any other, on the first GPU."""
    import torch

    def all_gather(recv: int, send: int, size: int, stream: int) -> None:  # of more than the window takes
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device="cuda:0")):
            part = memory_view(send, size, "cuda:0")
            memory_view(recv, size * ranks, "cuda:0").view(ranks, size).copy_(part.expand(ranks, size))

    room = torch.zeros(MIB << 20, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    made = member(0, ranks, all_gather, lambda data, size, stream: None, own_window(room.data_ptr(), MIB << 20, ranks))
    return Member(**{**vars(made), "kept": (*made.kept, room)})
