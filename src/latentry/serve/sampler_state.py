"""The saved state of a sampler: a dictionary of plain numbers, and what is checked when it is loaded.

``leg_first_batch`` and ``leg_consumed`` are the names that earlier versions gave to a segment's fields. They stay, so
that existing checkpoints load.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from latentry.errors import StateError
from latentry.serve.epoch_order import BUCKET_ORDERS, EpochOrder, OrderSettings
from latentry.serve.order import ORDER_VERSION, Segment

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Position:
    """How far the trainer is."""

    epoch: int
    batches_received: int
    """Batches of this epoch, those before a resume included."""
    segment: Segment


def save_state(position: Position, fingerprint: str, settings: OrderSettings) -> dict[str, Any]:
    """The state to save, the same on all ranks."""
    segment = position.segment
    return {
        **_identity(fingerprint, settings),
        "epoch": position.epoch,
        "batches_yielded": position.batches_received,
        "num_replicas": segment.num_replicas,
        "batch_sizes": list(segment.batch_sizes),
        "drop_last": segment.drop_last,
        "bucket_order": segment.bucket_order,
        "leg_first_batch": segment.first_batch,
        "leg_consumed": list(segment.consumed),
    }


def load_state(
    state: Mapping[str, Any], fingerprint: str, settings: OrderSettings, whole_epoch: Segment
) -> Position:
    """The position that a state describes, for a sampler with this fingerprint and these settings.

    A state with only ``epoch`` and ``batches_yielded``, from an older checkpoint, is taken as saved with the same
    ranks and batch sizes. A full state may come from other ones; its position then lies in a new segment.
    """
    epoch = _whole_number(state, "epoch")
    received = _whole_number(state, "batches_yielded")
    segment = whole_epoch
    if "version" in state:
        for name, here in _identity(fingerprint, settings).items():
            if state.get(name) != here:
                origin = "dataset" if name == "fingerprint" else "order"
                raise StateError(
                    f"the state's {name} is {state.get(name)!r}, but this sampler's is {here!r}; "
                    f"a state can only be loaded with the {origin} it was saved with"
                )
        segment = _segment_after(state, epoch, received, settings, whole_epoch)
    if received > segment.end_batch:
        raise StateError(
            f"the state has {received} batches of epoch {epoch}, but the epoch has only {segment.end_batch}; "
            "it was saved with other data or other batch sizes"
        )
    return Position(epoch, received, segment)


def _identity(fingerprint: str, settings: OrderSettings) -> dict[str, Any]:
    """What must be equal in a state and in the sampler that loads it."""
    return {
        "version": STATE_VERSION,
        "fingerprint": fingerprint,
        "order_version": ORDER_VERSION,
        **asdict(settings),
    }


def _segment_after(
    state: Mapping[str, Any], epoch: int, received: int, settings: OrderSettings, whole_epoch: Segment
) -> Segment:
    """The saved segment if ranks and batch sizes are the same, otherwise a new one over what it left."""
    try:
        saved = replace(
            whole_epoch,
            num_replicas=int(state["num_replicas"]),
            batch_sizes=tuple(int(size) for size in state["batch_sizes"]),
            drop_last=bool(state["drop_last"]),
            bucket_order=str(state["bucket_order"]),
            first_batch=int(state["leg_first_batch"]),
            consumed=tuple(int(count) for count in state["leg_consumed"]),
        )
        if saved.bucket_order not in BUCKET_ORDERS or not isinstance(state["drop_last"], bool):
            raise ValueError(f"bucket_order {saved.bucket_order!r}, drop_last {state['drop_last']!r}")
        if not all(0 <= used <= size for used, size in zip(saved.starts, saved.sizes, strict=True)):
            raise ValueError(f"leg_consumed {saved.consumed} of {saved.sizes}")
        if not saved.first_batch <= received <= saved.end_batch:
            raise ValueError(f"batches_yielded {received} is outside its segment")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise StateError(f"the state is damaged ({error!r}); load one that state_dict() returned") from None
    if replace(saved, first_batch=0, consumed=()) == whole_epoch:
        return saved
    consumed = EpochOrder(saved, epoch, settings).consumed_after(received)
    return replace(whole_epoch, first_batch=received, consumed=consumed)


def _whole_number(state: Mapping[str, Any], name: str) -> int:
    if not isinstance(state, Mapping) or name not in state:
        raise StateError(f"the state has no {name!r}; load one that state_dict() returned")
    value = state[name]
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise StateError(f"the state's {name} is {value!r}; it must be a whole number, 0 or more")
    return number


def buckets_fingerprint(own: str, keys: Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """Identifies the samples of a sampler.

    Args:
        own: The dataset's own fingerprint.
        keys: The buckets' keys.
        groups: The buckets. Their sizes and a few of their indices count, so that it is fast at any scale.
    """
    digest = hashlib.blake2b(own.encode(), digest_size=16)
    for key, group in zip(keys, groups, strict=True):
        indices = group["indices"]
        size = len(indices)
        probes = sorted({size * i // 64 for i in range(64)} | {size - 1}) if size else []
        digest.update(repr((key, tuple(group["resolution"]), size)).encode())
        digest.update(repr([int(indices[probe]) for probe in probes]).encode())
    return digest.hexdigest()
