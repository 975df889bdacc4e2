"""Paints a timeline: one lane a rank, as HTML or SVG that needs nothing, or as PNG.

The upper part of a lane is blue while the rank runs steps and grey while it idles; the strip below shows what it did
with sequences.  What is short is drawn a pixel wide so that it is seen, and pieces that joined many deeds are the paler
the less of their time the deeds took.  The HTML has a title on every piece and the table of sums; it is one file
without scripts, so it can be mailed, opened from a cluster's file system, and kept beside the results.

A layout is boxes and words first, painted second, so that all formats show the same picture.  PNG needs Pillow (the
extra `plot`); rejected: matplotlib, ten packages for rectangles and a font.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from bgmpi.errors import UsageError, WriteError
from bgmpi.timeline import Lane, Piece, Timeline, bytes_text, seconds_text, table

SUFFIXES = (".html", ".svg", ".png")

#: Colours that eyes of every kind tell apart (Okabe and Ito).
_COLOURS = {"run": "#0072b2", "combine": "#56b4e9", "yield": "#e69f00", "migrate": "#d55e00", "partition": "#009e73",
            "spill": "#cc79a7"}
_OTHER = "#555555"
_IDLE = "#e4e4e4"
_LINE = "#b0b0b0"
_LEFT, _PLOT, _RIGHT, _TOP, _BOTTOM = 60, 1100, 24, 56, 34
_WIDTH = _LEFT + _PLOT + _RIGHT
_MOST_LANE, _LEAST_LANE, _ALL_LANES = 34, 4, 8000
_FAINTEST = 0.2
_PNG_SCALE = 2

_STYLE = """
body { font: 14px sans-serif; margin: 24px; color: #202020; background: #ffffff }
svg { max-width: 100%; height: auto }
table { border-collapse: collapse; margin-top: 16px }
th, td { padding: 2px 10px; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap }
"""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, pixels from the upper left corner.  strength: 1 for the full colour; title: shown on hover."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    strength: float = 1.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text whose middle lies at height y.  anchor: what of it lies at x, "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    anchor: str = "start"


@dataclass(frozen=True, slots=True)
class Picture:
    """What is to be painted, in this order."""

    width: int
    height: int
    boxes: list[Box]
    words: list[Words]


def check_format(path: str | Path) -> None:
    """Raise UsageError unless a timeline can be drawn under this name, as its suffix says, on this machine."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"--timeline {path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if suffix == ".png":
        _pillow()


def draw(timeline: Timeline, path: str | Path) -> None:
    """Write the timeline to `path` in the format of its suffix.  Raises UsageError for others, WriteError."""
    check_format(path)
    picture = lay_out(timeline)
    try:
        match Path(path).suffix.lower():
            case ".png":
                _paint(picture).save(path, "PNG")
            case ".svg":
                Path(path).write_text(svg(picture), encoding="utf-8")
            case _:
                Path(path).write_text(html(timeline, picture), encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise WriteError(f"--timeline {path}: cannot be written: {reason}; name another place") from None


def lay_out(timeline: Timeline) -> Picture:
    """Return the picture of a timeline: legend, axis in seconds of the job's clock, one lane a rank."""
    ranks = len(timeline.lanes)
    height = max(_LEAST_LANE, min(_MOST_LANE, _ALL_LANES // max(1, ranks)))
    boxes, words = _axis(timeline, ranks * height)
    words.append(Words(_LEFT, 14, f"{timeline.name}: {ranks} {'rank' if ranks == 1 else 'ranks'}, "
                                  f"{seconds_text(timeline.seconds)} from the first deed to the last"))
    _legend(timeline, boxes, words)
    every = max(1, ceil(14 / height))
    for rank, lane in enumerate(timeline.lanes):
        top = _TOP + rank * height
        if rank % every == 0:
            words.append(Words(_LEFT - 8, top + height / 2, f"rank {rank}", "end"))
        boxes += _lane(timeline, rank, lane, top, height)
    return Picture(_WIDTH, _TOP + ranks * height + _BOTTOM, boxes, words)


def svg(picture: Picture) -> str:
    """Return the picture as SVG that stands alone."""
    anchored = {"start": "", "middle": ' text-anchor="middle"', "end": ' text-anchor="end"'}
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width}" height="{picture.height}" '
             f'viewBox="0 0 {picture.width} {picture.height}" font-family="sans-serif" font-size="12" fill="#202020">',
             f'<rect width="{picture.width}" height="{picture.height}" fill="#ffffff"/>']
    for box in picture.boxes:
        pale = f' fill-opacity="{box.strength:.2f}"' if box.strength < 1 else ""
        start = (f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}" '
                 f'fill="{box.colour}"{pale}')
        lines.append(f"{start}><title>{escape(box.title)}</title></rect>" if box.title else f"{start}/>")
    lines += [f'<text x="{one.x:.2f}" y="{one.y:.2f}" dominant-baseline="central"{anchored[one.anchor]}>'
              f"{escape(one.text)}</text>" for one in picture.words]
    return "\n".join([*lines, "</svg>\n"])


def html(timeline: Timeline, picture: Picture) -> str:
    """Return a page with the picture and the table of sums, one file that needs no other."""
    head, *rows = table(timeline)
    cells = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    title = f"Timeline of {escape(timeline.name)}"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{svg(picture)}<table>\n" + "\n".join(cells)
        + "\n</table>\n</body>\n</html>\n"
    )


# --- layout ---------------------------------------------------------------------------------------------------------


def _lane(timeline: Timeline, rank: int, lane: Lane, top: float, height: float) -> Iterator[Box]:
    gap = height / 10
    upper, lower = height * 0.5, height * 0.3
    idle = f"rank {rank}: idle {seconds_text(timeline.idle(lane))}"
    yield Box(_LEFT, top + gap, _PLOT, upper + lower, _IDLE, title=idle)
    for kind in timeline.kinds:
        y, high = (top + gap, upper) if kind == "run" else (top + gap + upper, lower)
        for piece in lane.pieces.get(kind, ()):
            x = _x(timeline, piece.begin)
            width = min(max(1.0, _x(timeline, piece.end) - x), _LEFT + _PLOT - x + 1)
            span = piece.end - piece.begin
            strength = 1.0 if piece.deeds == 1 or not span else max(_FAINTEST, min(1.0, piece.busy / span))
            yield Box(x, y, width, high, _COLOURS.get(kind, _OTHER), strength, _title(rank, kind, piece))


def _title(rank: int, kind: str, piece: Piece) -> str:
    facts = [f"rank {rank}: {kind}", f"{piece.begin:.6f} s to {piece.end:.6f} s", seconds_text(piece.busy)]
    if piece.deeds > 1:
        facts.append(f"{piece.deeds} times")
    if piece.sequences:
        facts.append(f"{piece.sequences} {'sequence' if piece.sequences == 1 else 'sequences'}")
    if piece.bytes:
        facts.append(bytes_text(piece.bytes))
    return ", ".join(facts)


def _axis(timeline: Timeline, lanes: float) -> tuple[list[Box], list[Words]]:
    boxes, words = [], []
    for at in _ticks(timeline.begin, timeline.end):
        x = _x(timeline, at)
        boxes.append(Box(x, _TOP, 1, lanes + 6, _LINE))
        words.append(Words(x, _TOP + lanes + 18, f"{at:.6g} s", "middle"))
    return boxes, words


def _ticks(begin: float, end: float) -> list[float]:
    """Return at most eleven round numbers from `begin` to `end`."""
    if end <= begin:
        return [begin]
    rough = (end - begin) / 10
    scale = 10.0 ** floor(log10(rough))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough * (1 - 1e-9))
    return [number * step for number in range(ceil(begin / step), floor(end / step) + 1)]


def _legend(timeline: Timeline, boxes: list[Box], words: list[Words]) -> None:
    x = float(_LEFT)
    for kind in [*timeline.kinds, "idle"]:
        boxes.append(Box(x, 30, 12, 12, _IDLE if kind == "idle" else _COLOURS.get(kind, _OTHER)))
        words.append(Words(x + 18, 36, kind))
        x += 42 + 8 * len(kind)


def _x(timeline: Timeline, at: float) -> float:
    return _LEFT + (_PLOT * (at - timeline.begin) / timeline.seconds if timeline.seconds else 0.0)


# --- PNG ------------------------------------------------------------------------------------------------------------


def _pillow() -> tuple[Any, Any, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise UsageError(
            "--timeline: a PNG needs Pillow, which is not installed: pip install 'bgmpi[plot]', or name a .html or "
            ".svg, which need nothing"
        ) from None
    return Image, ImageDraw, ImageFont


def _paint(picture: Picture) -> Any:
    """Return the picture as a Pillow image, twice as large as the SVG so that it stays sharp."""
    image_room, draw_room, font_room = _pillow()
    scale = _PNG_SCALE
    image = image_room.new("RGB", (picture.width * scale, picture.height * scale), "#ffffff")
    canvas = draw_room.Draw(image)
    for box in picture.boxes:
        left, top = round(box.x * scale), round(box.y * scale)
        right, bottom = round((box.x + box.width) * scale), round((box.y + box.height) * scale)
        canvas.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), fill=_mixed(box))
    font = font_room.load_default(12 * scale)
    anchors = {"start": "lm", "middle": "mm", "end": "rm"}
    for one in picture.words:
        canvas.text((one.x * scale, one.y * scale), one.text, fill="#202020", font=font, anchor=anchors[one.anchor])
    return image


def _mixed(box: Box) -> tuple[int, ...]:
    """Return the colour of a box where it lies on an idle lane."""
    return tuple(
        round(int(box.colour[at : at + 2], 16) * box.strength + int(_IDLE[at : at + 2], 16) * (1 - box.strength))
        for at in (1, 3, 5)
    )
