"""An index that also says which caption to read.

The sampler knows seed and epoch, and the dataset, which may be in another process, reads. So what the dataset needs
travels with the index. The index is an ordinary integer for everything else.
"""

from __future__ import annotations

from latentry.seeds import derived_seed


class SampleIndex(int):
    """The index of a sample, with the number that its caption is drawn with."""

    caption_draw: int

    def __new__(cls, index: int, caption_draw: int) -> SampleIndex:
        self = super().__new__(cls, index)
        self.caption_draw = caption_draw
        return self

    def __reduce__(self) -> tuple[type[SampleIndex], tuple[int, int]]:
        return SampleIndex, (int(self), self.caption_draw)


def caption_draw(seed: int, epoch: int) -> int:
    """The number that captions are drawn with in an epoch: the same on all ranks."""
    return derived_seed(seed, "caption", epoch)
