from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayshift.webui.series import FOLDER, Pyramid, SeriesReader, SeriesWriter

floats = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@given(st.lists(st.lists(floats, max_size=40), max_size=12), st.integers(1, 30), st.data())
def test_a_window_holds_the_extremes_of_every_point_in_it(
    pieces: list[list[float]], width: int, data: st.DataObject
) -> None:
    pyramid, values = Pyramid(), [value for piece in pieces for value in piece]
    done = 0
    for piece in pieces:
        pyramid.extend(np.arange(done, done + len(piece), dtype=float), np.array(piece, dtype=float))
        done += len(piece)
    assert len(pyramid) == len(values)
    first = data.draw(st.integers(0, max(0, len(values) - 1)))
    last = data.draw(st.integers(first, max(first, len(values) - 1)))

    t, low, high = pyramid.window(first, last, width)

    inside = values[first : last + 1]
    if inside:
        assert low.min() <= min(inside)
        assert high.max() >= max(inside)
        assert set(low) | set(high) <= set(values)
        assert np.all(np.diff(t) > 0)
        assert len(t) <= 2 * width + 2 + 3 * 5  # and up to three points per level that have no group yet


def test_few_points_are_given_exactly() -> None:
    pyramid = Pyramid()
    times = np.linspace(0, 999, 1000, dtype=np.float64)
    pyramid.extend(times, np.sin(times).astype(np.float64))
    t, low, high = pyramid.window(10, 12, width=100)
    assert t.tolist() == [9, 10, 11, 12, 13]
    np.testing.assert_array_equal(low, np.sin(t))
    np.testing.assert_array_equal(low, high)


def test_a_reader_follows_a_writer_and_ignores_half_a_sample(tmp_path: Path) -> None:
    reader = SeriesReader(tmp_path)
    reader.refresh()
    assert reader.names == []
    with SeriesWriter(tmp_path) as writer:
        writer.append(0.5, {"batch_size": 1.0})
        reader.refresh()
        writer.append(1.0, {"batch_size": 3.0, "cpu_percent": 50.0})
    path = tmp_path / FOLDER / "batch_size.f64"
    path.write_bytes(path.read_bytes() + b"\0" * 7)  # killed in the middle of a sample
    reader.refresh()
    assert reader.names == ["batch_size", "cpu_percent"]
    assert reader.window("batch_size", 0, 2, 100)[2].tolist() == [1.0, 3.0]

    with SeriesWriter(tmp_path) as writer:  # a resumed run
        writer.append(2.0, {"batch_size": 5.0})
    reader.refresh()
    assert reader.window("batch_size", 0, 3, 100)[0].tolist() == [0.5, 1.0, 2.0]


def test_an_unknown_series_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        SeriesReader(tmp_path).window("nothing", 0, 1, 10)
