"""Laws of the picture: every piece lies in its lane and its time, all formats show the same, nothing is fetched."""

from __future__ import annotations

import builtins
import xml.etree.ElementTree as Tree

import numpy as np
import pytest

from bgmpi.errors import UsageError, WriteError
from bgmpi.picture import check_format, draw, lay_out
from bgmpi.primitives import NOBODY, Deed, Reported, Run
from bgmpi.timeline import KINDS, read_timeline
from bgmpi.trace import TraceWriter

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def timeline(tmp_path):
    """Two ranks, 10 s: rank 0 runs the first half, rank 1 the second; each kind of deed once, on rank 0."""
    moves = [Deed(kind, 6.0 + i / 2, 0.25, np.arange(i), 1000 * i) for i, kind in enumerate(KINDS) if kind != "run"]
    first, second = Deed("run", 0.0, 5.0, NOBODY), Deed("run", 5.0, 5.0, NOBODY)
    return timeline_of(tmp_path / "<t & u>.jsonl", [first, *moves], [second])


def timeline_of(path, *ranks: list[Deed]):
    with TraceWriter(path) as writer:
        told = [Reported(rank, (), 0, 0, 0, 0, deeds=tuple(deeds)) for rank, deeds in enumerate(ranks)]
        writer.round(0, 0.0, told, [[Run(1)]] * len(ranks))
    return read_timeline(path)


def titled(picture, start: str):
    return [box for box in picture.boxes if box.title.startswith(start)]


def test_pieces_lie_where_their_time_is_and_are_as_wide_as_they_are_long(timeline):
    picture = lay_out(timeline)
    (idle,) = titled(picture, "rank 0: idle")
    (first,), (second,) = titled(picture, "rank 0: run"), titled(picture, "rank 1: run")
    assert (first.x, first.width) == (idle.x, idle.width / 2)
    assert second.x == pytest.approx(idle.x + idle.width / 2) and second.y > first.y + first.height
    (spill,) = titled(picture, "rank 0: spill")
    assert (spill.x - idle.x) / idle.width == pytest.approx(0.85) and spill.width == pytest.approx(idle.width / 40)
    assert spill.title == "rank 0: spill, 8.500000 s to 8.750000 s, 250 ms, 5 sequences, 5 kB"


def test_everything_lies_inside_the_picture_and_is_wide_enough_to_be_seen(tmp_path):
    one = np.arange(1)
    deeds = [Deed("run", 0.0, 100.0, NOBODY), Deed("yield", 100.0, 0.0, one), Deed("yield", 3.0, 1e-6, one)]
    picture = lay_out(timeline_of(tmp_path / "t", deeds))
    assert all(box.width >= 1 and box.x >= 0 and box.y >= 0 for box in picture.boxes)
    assert all(box.x + box.width <= picture.width and box.y + box.height <= picture.height for box in picture.boxes)


def test_the_axis_has_round_seconds_of_the_job_s_clock(tmp_path):
    picture = lay_out(timeline_of(tmp_path / "t", [Deed("run", 12.3, 0.7, NOBODY)]))
    assert [one.text for one in picture.words if one.anchor == "middle"] == [
        "12.3 s", "12.4 s", "12.5 s", "12.6 s", "12.7 s", "12.8 s", "12.9 s", "13 s"]


def test_the_legend_names_every_kind_that_occurs(timeline):
    words = {one.text for one in lay_out(timeline).words}
    assert {*KINDS, "idle", "rank 0", "rank 1"} <= words


def test_many_ranks_get_thin_lanes_and_not_all_a_name(tmp_path):
    picture = lay_out(timeline_of(tmp_path / "t", *([Deed("run", 0.0, 1.0, NOBODY)] for _ in range(1000))))
    assert picture.height < 9000
    assert 100 < sum(one.text.startswith("rank ") for one in picture.words) < 700


def test_pieces_that_joined_many_short_deeds_are_paler_than_one_that_took_all_its_time(tmp_path):
    deeds = [Deed("run", 0.0, 1000.0, NOBODY), *(Deed("yield", 500 + i / 10, 0.05, np.arange(1)) for i in range(100))]
    joined = titled(lay_out(timeline_of(tmp_path / "t", deeds)), "rank 0: yield")
    assert 10 <= len(joined) <= 14 and all(0.5 <= one.strength < 0.6 for one in joined[:-1])


def test_the_svg_is_whole_and_every_piece_has_its_title(timeline, tmp_path):
    draw(timeline, tmp_path / "o.svg")
    root = Tree.parse(tmp_path / "o.svg").getroot()
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert len(titles) == 2 + 2 + 5 and "rank 1: run, 5.000000 s to 10.000000 s, 5 s" in titles
    assert any("<t & u>.jsonl" in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_the_page_holds_picture_and_table_and_asks_nothing_of_any_other_file(timeline, tmp_path):
    draw(timeline, tmp_path / "o.html")
    page = (tmp_path / "o.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and page.count("<svg") == 1 and page.count("<tr>") == 4
    assert "<td>5 s in 1</td>" in page and "&lt;t &amp; u&gt;.jsonl" in page
    assert not any(word in page for word in ("<script", "<link", "src=", "url(", "@import", "href"))


def test_the_png_shows_the_colours_of_the_lanes(timeline, tmp_path):
    image_room = pytest.importorskip("PIL.Image")
    draw(timeline, tmp_path / "o.PNG")
    picture = lay_out(timeline)
    with image_room.open(tmp_path / "o.PNG") as image:
        assert image.size == (2 * picture.width, 2 * picture.height)
        for start in ("rank 0: run", "rank 1: run", "rank 0: spill"):
            (box,) = titled(picture, start)
            at = (round(2 * (box.x + box.width / 2)), round(2 * (box.y + box.height / 2)))
            assert "#{:02x}{:02x}{:02x}".format(*image.getpixel(at)) == box.colour


def test_without_pillow_a_png_is_refused_with_advice_and_html_is_drawn(timeline, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "PIL":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'bgmpi\[plot\]'"):
        check_format("o.png")
    draw(timeline, tmp_path / "o.html")


@pytest.mark.parametrize("name", ["o.pdf", "o", "png", ".html"])
def test_other_formats_are_refused_before_anything_is_read(name):
    with pytest.raises(UsageError, match=r"\.html, \.svg, \.png"):
        check_format(name)


def test_a_picture_that_cannot_be_written_is_told(timeline, tmp_path):
    with pytest.raises(WriteError, match="No such file"):
        draw(timeline, tmp_path / "none" / "o.svg")


def test_a_trace_without_deeds_can_be_drawn(tmp_path):
    timeline = timeline_of(tmp_path / "t", [], [])
    for name in ("o.html", "o.svg", "o.png"):
        draw(timeline, tmp_path / name)
        assert (tmp_path / name).stat().st_size
