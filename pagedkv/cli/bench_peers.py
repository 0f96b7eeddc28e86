"""What other libraries needed: measured once on the same kind of card, kept in ``results/<card>/peers.json``."""

from collections.abc import Sequence

from .bench_shape import is_plain
from .markdown import Record

SOURCE = ("card", "date", "method", "versions")


def comparable(peers: Record | None, shape: Record) -> Record | None:
    """The others, unless they were measured on other caches."""
    return peers if peers is not None and is_plain(shape) else None


def source(peers: Record | None) -> Record | None:
    """Where their figures come from."""
    return None if peers is None else {name: peers[name] for name in SOURCE}


def same_batch(entries: Sequence[Record], row: Record, sizes: Sequence[str]) -> Record | None:
    """The entry of the same sizes, if there is one."""
    return next((entry for entry in entries if all(entry[name] == row[name] for name in sizes)), None)


def source_line(record: Record) -> list[str]:
    """Lines below a table that say where the figures of others come from, if it has any."""
    if not record["peers"]:
        return []
    said = record["peers"]
    versions = ", ".join(f"{name} {version}" for name, version in said["versions"].items())
    return ["", f"Others as recorded on {said['date']}, {said['card']}: {said['method']}; {versions}."]
