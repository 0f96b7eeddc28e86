"""Profiles as text: the lines of one launch, or where two launches differ."""

from collections.abc import Iterable, Iterator

from .profile_record import UNITS, Record, cost
from .table import Column, Table

SOURCE_WIDTH = 40
LEGEND = """\
instr: instructions issued by warps, lanes: threads that took part in each. a request is one memory access of a warp:
32-byte sectors of global memory or wavefronts of shared memory, ideal if its bytes lay side by side; run: how many do.
PTX is counted, not the machine code made of it, and no cache is modelled: sectors are requests, not DRAM traffic."""


def launch_text(launch: Record) -> str:
    """All lines that access memory, the others together, and totals."""
    rows = [row for line in launch["lines"] for row in _line_rows(line)]
    table = _lines_table(_widest(place for place, *_ in rows))
    others = [line for line in launch["lines"] if not line["traffic"]]
    instructions = sum(line["warp_instructions"] for line in others)
    share = instructions / launch["warp_instructions"]
    return "\n".join(
        [
            _heading(launch),
            "",
            table.header(),
            *map(table.row, rows),
            f"{len(others)} lines without memory access: {instructions:,} instructions ({share:.0%})",
            "",
            f"all: {launch['warp_instructions']:,} instructions, {_mix(launch)}",
            *(f"     {kind}: {_total(kind, traffic)}" for kind, traffic in launch["traffic"].items()),
        ]
    )


def _lines_table(place_width: int) -> Table:
    return Table(
        (
            Column("line", place_width),
            Column("instr", 7, right=True),
            Column("lanes", 5, right=True),
            Column("access", 13),
            Column("requests", 8, right=True),
            Column("a request (ideal)", 22, right=True),
            Column("run", 7, right=True),
            Column("source", SOURCE_WIDTH),
        )
    )


def _widest(places: Iterable[str]) -> int:
    return max(map(len, places), default=len("line"))


def _heading(launch: Record) -> str:
    grid = " x ".join(map(str, launch["grid"]))
    return f"{launch['kernel']}, grid {grid} of {launch['threads']} threads"


def _line_rows(line: Record) -> Iterator[list[str]]:
    lanes = line["thread_instructions"] / line["warp_instructions"]
    first = [line["line"], f"{line['warp_instructions']:,}", f"{lanes:.1f}"]
    for kind, traffic in line["traffic"].items():
        source = line["source"] if first[0] else ""
        yield [*first, kind, f"{traffic['requests']:,}", _cost(kind, traffic), _run(traffic), source[:SOURCE_WIDTH]]
        first = [""] * 3


def _cost(kind: str, traffic: Record) -> str:
    actual, ideal = cost(kind, traffic)
    return f"{actual:.1f} ({ideal:.1f}) {UNITS[kind.split()[0]]}"


def _run(traffic: Record) -> str:
    return f"{traffic['bytes'] / traffic['runs']:.0f} B"


def _mix(launch: Record) -> str:
    ranked = sorted(launch["mix"].items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {count / launch['warp_instructions']:.0%}" for kind, count in ranked)


def _total(kind: str, traffic: Record) -> str:
    unit = UNITS[kind.split()[0]]
    ideal = traffic[f"ideal_{unit}"]
    needed = f"all needed: {ideal:,}" if ideal == traffic[unit] else f"{ideal / traffic[unit]:.0%} needed: {ideal:,}"
    return f"{traffic['requests']:,} requests, {traffic[unit]:,} {unit} ({needed})"


# ---- two launches ---------------------------------------------------------------------------------------------------


def comparison_text(settings: tuple[str, str], launches: tuple[Record, Record]) -> str:
    """What two launches have in common, and the lines and accesses in which they differ."""
    kernels = [_heading(launch) for launch in launches]
    differ = kernels[0] != kernels[1]
    titles = settings if differ else [" and ".join(settings)]
    heading = [f"{title}: {kernel}" for title, kernel in zip(titles, kernels, strict=False)]
    rows = [*_differing("all", "", *launches), *_differing_lines(*launches, accesses_only=differ)]
    cells = [[_count(each) for each in counts] for *_, counts in rows]
    widths = [max(map(len, column)) for column in zip(settings, *cells, strict=True)]
    table = Table(
        (
            Column("line", _widest(place for place, *_ in rows)),
            Column("", 16),
            *(Column(setting, width, right=True) for setting, width in zip(settings, widths, strict=True)),
            Column("source", SOURCE_WIDTH),
        )
    )
    body = [
        table.row([place, what, *pair, source[:SOURCE_WIDTH]])
        for (place, source, what, _), pair in zip(rows, cells, strict=True)
    ]
    return "\n".join([*heading, "", table.header(), *body, "", _same(*launches, accesses_only=differ)])


Row = tuple[str, str, str, tuple[Record, Record]]  # line, its source, what is counted, both counts


def _differing_lines(before: Record, after: Record, accesses_only: bool) -> Iterator[Row]:
    lines = [{line["line"]: line for line in launch["lines"]} for launch in (before, after)]
    for place in sorted(lines[0] | lines[1], key=_file_and_number):
        pair = [each.get(place, NOTHING) for each in lines]
        source = (lines[0] | lines[1])[place]["source"]
        yield from (row for row in _differing(place, source, *pair) if row[2] != "instructions" or not accesses_only)


NOTHING = {"warp_instructions": 0, "traffic": {}}


def _file_and_number(place: str) -> tuple[str, int]:
    file, _, number = place.rpartition(":")
    return file, int(number)


def _differing(place: str, source: str, before: Record, after: Record) -> Iterator[Row]:
    if before["warp_instructions"] != after["warp_instructions"]:
        yield place, source, "instructions", (before, after)
    for kind in before["traffic"] | after["traffic"]:
        pair = before["traffic"].get(kind, {}), after["traffic"].get(kind, {})
        if pair[0] != pair[1]:
            yield place, source, kind, pair


def _count(counts: Record) -> str:
    if "warp_instructions" in counts:
        return f"{counts['warp_instructions']:,}"
    if not counts:
        return "-"
    unit = "sectors" if "sectors" in counts else "wavefronts"
    return f"{counts['requests']:,} x {counts[unit] / counts['requests']:.1f} {unit}, run {_run(counts)}"


def _same(before: Record, after: Record, accesses_only: bool) -> str:
    places = {line["line"] for launch in (before, after) for line in launch["lines"]}
    differing = {place for place, *_ in _differing_lines(before, after, accesses_only=False)}
    shown = "; of the others those that access memory are shown" if accesses_only else ""
    return f"{len(places - differing)} of {len(places)} lines do the same{shown}"
