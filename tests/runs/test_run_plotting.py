"""`run.plot`, and what runs look like in a notebook."""

from __future__ import annotations

import base64
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from made_runs import make_sites, make_step, write_run

from hookline._errors import NoSuchSite
from hookline.runs import RecentSteps, Run, Series, StatMap, open_run
from hookline.runs.pictures import draw_line, draw_map

EVIL = "</script><img src=x onerror=alert(1)>\"'"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Give a small run."""
    write_run(tmp_path, steps=6)
    return open_run(tmp_path)


def plotting() -> None:
    """Skip where matplotlib is missing."""
    pytest.importorskip("matplotlib", reason="needs matplotlib")


def test_plot_of_a_site_has_its_series(run: Run) -> None:
    plotting()
    (axes,) = run.plot("layers.3.mlp", "absmax").axes
    steps, values = run.series("layers.3.mlp", "absmax")
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), steps)
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), values)
    assert axes.get_title(loc="left") == "layers.3.mlp:output"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "absmax")


def test_plot_of_several_sites_or_a_pattern_has_a_line_each(run: Run) -> None:
    plotting()
    (axes,) = run.plot(["layers.0.mlp", "layers.1.mlp", "loss"]).axes
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["layers.0.mlp:output rms", "layers.1.mlp:output rms", "loss"]
    (axes,) = run.plot("layers.1*.mlp").axes
    assert len(axes.lines) == 3


def test_plot_of_a_statistic_is_a_map_that_marks_what_is_not_finite(run: Run) -> None:
    plotting()
    axes = run.plot("rms").axes[0]
    cells, bad = axes.collections[:2]
    np.testing.assert_allclose(cells.get_array(), run.map("rms").values)
    marked = np.argwhere(~np.ma.getmaskarray(bad.get_array())).tolist()
    assert marked == [[site, site] for site in range(6)]
    assert axes.yaxis_inverted()


def test_plot_of_a_number_of_the_steps_and_its_scale(run: Run) -> None:
    plotting()
    assert run.plot("loss").axes[0].get_yscale() == "linear"
    assert run.plot("loss", log=True).axes[0].get_yscale() == "log"


def test_plot_draws_into_given_axes_and_leaves_no_figure_open(run: Run) -> None:
    plotting()
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    figure = Figure()
    assert run.plot("loss", ax=figure.subplots()) is figure
    run.plot("loss")
    assert pyplot.get_fignums() == []


def test_plot_works_on_steps_in_memory() -> None:
    plotting()
    recent = RecentSteps()
    recent.add_sites(make_sites())
    for step in range(3):
        recent.write(make_step(step))
    assert len(recent.plot("layers.0.mlp").axes[0].lines[0].get_xdata()) == 3


def test_plot_of_an_unknown_name_says_what_is_near(run: Run) -> None:
    with pytest.raises(NoSuchSite, match=r"layers\.3\.mlp"):
        run.plot("layer.3.mlp")


def test_plot_without_matplotlib_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for what in ("loss", "rms"):
        with pytest.raises(ModuleNotFoundError) as caught:
            run.plot(what)
        assert str(caught.value) == (
            'matplotlib is not installed; install it with: pip install "hookline[plot]"'
        )


def test_series_in_a_notebook_is_a_line_with_its_range() -> None:
    steps = np.arange(5)
    shown = Series("fc", "rms", steps, np.array([1.0, 2.0, np.inf, np.nan, 3.0]))._repr_html_()
    points = re.search(r'points="([^"]*)"', shown)
    assert points
    assert len(points[1].split()) == 3
    assert shown.count("<rect") == 1
    assert "fc rms: 1 to 3; step 0 to 4" in shown


def test_a_long_series_keeps_its_peak_in_few_points() -> None:
    values = np.ones(10_000)
    values[6543] = 1000.0
    shown = draw_line(np.arange(10_000), values, title="x")
    assert "1 to 1e+03, log scale" in shown
    assert len(shown) < 12_000


def test_map_in_a_notebook_is_a_picture_of_its_values() -> None:
    values = np.array([[1.0, 10.0], [np.nan, np.inf]])
    shown = StatMap(np.arange(2), ["a", "b"], values)._repr_html_()
    data = base64.b64decode(re.search(r"base64,([^\"]*)", shown)[1])  # type: ignore[index]
    body = data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8]
    lines = np.frombuffer(zlib.decompress(body), np.uint8).reshape(2, 9)[:, 1:].reshape(2, 2, 4)
    assert lines[:, :, 3].tolist() == [[255, 255], [0, 255]]
    assert lines[1, 1, :3].tolist() == [224, 17, 95]
    assert lines[0, 0, :3].tolist() != lines[0, 1, :3].tolist()
    assert "1 to 10, log scale" in shown


def test_nothing_to_draw_is_no_error() -> None:
    assert "no finite value" in draw_line(np.arange(2), np.full(2, np.nan), title="x")
    assert "no steps" in draw_line(np.empty(0, np.int64), np.empty(0), title="x")
    assert "nothing" in draw_map(np.empty((0, 3)), title="x")
    assert "no value above zero" in draw_map(np.zeros((2, 3)), title="x")


def test_run_in_a_notebook_says_how_it_stands(run: Run) -> None:
    shown = run._repr_html_()
    assert "finished, 6 steps (0 to 5), 12 sites" in shown
    assert "no findings" in shown
    assert "loss: 0.167 to 1" in shown


def test_names_are_text_in_a_notebook(tmp_path: Path) -> None:
    series = Series(EVIL, "rms", np.arange(3), np.ones(3))._repr_html_()
    write_run(tmp_path / "<img src=x>", steps=1)
    shown = open_run(tmp_path / "<img src=x>")._repr_html_()
    assert "<img" not in series + shown
    assert "</script" not in series
