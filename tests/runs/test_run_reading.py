"""Reading a run: names, statistics, steps, ranks, and what is said when there is no such thing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from made_runs import SITES, make_rows, make_sites, make_step, write_run

from hookline._errors import AmbiguousRead, HooklineError, NoSuchRun, NoSuchSite, NotRecorded
from hookline.runs import (
    MEASURES,
    Block,
    History,
    RecentSteps,
    RunWriter,
    SiteFacts,
    StepRecord,
    open_run,
)
from hookline.stats.rows import STATS, derive, merge_rows

ADDRESSES = {
    ":output": "value",
    "layers.0:output": "value",
    "layers.0:output.grad": "gradient",
    "layers.0.attn:output[0]": "value",
    "layers.0.attn:output[0].grad": "gradient",
    "layers.0.attn:output[1].weights": "value",
    "layers.0.mlp:output.hidden": "value",
    "layers.1:output": "value",
    "layers.1.mlp.weight": "parameter",
    "layers.1.mlp.weight:grad": "parameter gradient",
    "layers.1.mlp.weight:update": "update",
    "layers.1.mlp.weight:exp_avg": "moment",
}


def describe_sites() -> list[SiteFacts]:
    return [
        SiteFacts(number, address, kind, address.partition(":")[0], "Linear")
        for number, (address, kind) in enumerate(ADDRESSES.items())
    ]


@pytest.fixture(params=["disk", "memory"])
def named(request: pytest.FixtureRequest, tmp_path: Path) -> History:
    """Three steps of sites of every kind, on disk and in memory."""
    recent = RecentSteps(10)
    with RunWriter(tmp_path) as writer:
        for one in (writer, recent):
            one.add_sites(describe_sites())
            for step in (0, 10, 20):
                record = make_step(step, ("rows", "sketch", "counts", "histogram", "updates"))
                *blocks, updates = record.blocks
                updates = Block("updates", updates.sites[10:11], updates.values[10:11])
                one.write(dataclasses.replace(record, blocks=[*blocks, updates]))
    return open_run(tmp_path) if request.param == "disk" else recent


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("", ":output"),
        ("layers.0", "layers.0:output"),
        ("layers.0:output.grad", "layers.0:output.grad"),
        ("layers.0.mlp", "layers.0.mlp:output.hidden"),
        ("layers.0.mlp:output", "layers.0.mlp:output.hidden"),
        ("layers.0.attn:output.grad", "layers.0.attn:output[0].grad"),
        ("layers.0.attn:output[1]", "layers.0.attn:output[1].weights"),
        ("layers.1.mlp.weight", "layers.1.mlp.weight"),
        ("layers.1.mlp.weight:exp_avg", "layers.1.mlp.weight:exp_avg"),
        ("**.weight:update", "layers.1.mlp.weight:update"),
    ],
)
def test_address_means_one_site(named: History, given: str, means: str) -> None:
    series = named.series(given, "mean")
    assert series.address == means
    place = list(ADDRESSES).index(means)
    np.testing.assert_array_equal(series.values, [step + place / 4 for step in (0, 10, 20)])


@pytest.mark.parametrize(
    ("where", "kind", "count"),
    [
        (None, None, 12),
        ("**", None, 12),
        ("layers.*", None, 3),
        ("layers.**", "value", 5),
        ("layers.[0-1]:output", None, 2),
        ("**:output", None, 6),
        ("**:output.grad", None, 2),
        ("**:update", None, 1),
        ("**.weight", ("update", "moment"), 2),
        (":output", None, 1),
        (["layers.0", "layers.1"], None, 3),
        ("re:layers.0.*", "gradient", 2),
        ("re:.*weights", None, 1),
    ],
)
def test_pattern_means_many_sites(
    named: History, where: str | list[str] | None, kind: str | None, count: int
) -> None:
    table = named.sites(where, kind)
    assert len(table) == count
    addresses, values = named.map("max", where=where, kind=kind)[1:]
    assert addresses == [row["site"] for row in table]
    assert values.shape == (count, 3)
    assert [row["site"] for row in named.table(where=where, kind=kind)] == addresses


def test_address_of_several_sites_names_them(named: History) -> None:
    with pytest.raises(AmbiguousRead) as caught:
        named.series("layers.0.attn", "rms")
    assert str(caught.value) == (
        "`layers.0.attn` means 2 sites: `layers.0.attn:output[0]`, "
        "`layers.0.attn:output[1].weights`. Name one of them, or read all with "
        "`run.map(stat, where='layers.0.attn')`."
    )


def test_unknown_names_are_answered_with_the_nearest(named: History) -> None:
    with pytest.raises(NoSuchSite) as no_site:
        named.series("layer.1", "rms")
    assert str(no_site.value) == (
        "`layer.1` matches no site of this run (12 sites). Nearest: `layers.1`, `layers.0`, "
        "`layers.1:output`. List them with `run.sites()`."
    )
    with pytest.raises(NoSuchSite, match=r"List them with `run\.sites"):
        named.table(where="decoder.*")
    with pytest.raises(
        NotRecorded, match=r"`rmse` is no statistic of a site\. Nearest: `rms`, `mean`\."
    ):
        named.series("layers.0", "rmse")
    with pytest.raises(NotRecorded) as no_step:
        named.table(step=11)
    assert str(no_step.value) == (
        "there is no step 11; there are 3 from 0 to 20. Nearest: 10, 20. All of them are "
        "`run.steps`."
    )
    with pytest.raises(NotRecorded, match="there is no step -4"):
        named.table(step=-4)
    with pytest.raises(NotRecorded, match="there is no rank 3; there are 0"):
        named.series("layers.0", "rms", rank=3)
    with pytest.raises(NotRecorded, match="'activation' is no kind of site; the kinds are 'value'"):
        named.sites(kind="activation")
    with pytest.raises(NotRecorded, match=r"'los'; there are loss, lr, .* Nearest: `loss`"):
        named.scalar("los")
    with pytest.raises(NotRecorded, match=r"`ratio` is measured of updates, and `layers\.0:"):
        named.series("layers.0", "ratio")
    with pytest.raises(NotRecorded, match=r"Nearest: `layers\.1\.mlp\.weight:update`\."):
        named.series("layers.1.mlp.weight", "lost")
    for error in (NoSuchSite, NotRecorded, AmbiguousRead):
        assert issubclass(error, HooklineError)


def test_every_statistic_of_a_row(named: History) -> None:
    assert set(STATS) <= set(MEASURES)
    rows = np.stack([make_rows(step)[0] for step in (0, 10, 20)])
    for stat in STATS:
        np.testing.assert_allclose(
            named.series("", stat).values, derive(rows, stat), rtol=1e-7, err_msg=stat
        )


def test_counts_shares_and_updates(named: History) -> None:
    site = "layers.1.mlp.weight:update"
    place = list(ADDRESSES).index(site)
    steps = np.array([0, 10, 20])
    zeros, tiny, huge = (3 * place + column + steps for column in range(3))
    np.testing.assert_array_equal(named.series(site, "zeros").values, zeros)
    np.testing.assert_array_equal(named.series(site, "tiny").values, tiny)
    count = named.series(site, "count").values
    np.testing.assert_allclose(named.series(site, "huge_share").values, huge / count)
    # The block of updates was made of the same numbers: given, lost, norm.
    np.testing.assert_allclose(named.series(site, "lost").values, tiny / zeros)
    np.testing.assert_allclose(
        named.series(site, "ratio").values, named.series(site, "l2").values / huge, rtol=1e-12
    )


def test_sketch_and_histogram(named: History) -> None:
    sketch = named.sketch("layers.0", 10)
    assert sketch.dtype == np.float32
    np.testing.assert_array_equal(sketch, np.arange(64) + 64 + 10)
    histogram = named.histogram("layers.0")
    assert histogram.dtype == np.int64
    np.testing.assert_array_equal(histogram, np.arange(256) + 256 + 20)


def test_what_is_sampled_is_nan_elsewhere(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.add_sites(make_sites())
        for step in range(4):
            kinds = ("rows", "sketch") if step == 1 else ("rows",)
            writer.write(make_step(step, kinds, sites=2 if step == 3 else SITES))
    run = open_run(tmp_path)
    nan = float("nan")
    np.testing.assert_array_equal(run.series("layers.5.mlp", "min").values, [0.25, 1.25, 2.25, nan])
    with pytest.raises(NotRecorded) as caught:
        run.sketch("layers.5.mlp")
    assert str(caught.value) == (
        "`layers.5.mlp:output` has no sketch at step 3; the last step that has one is 1."
    )
    with pytest.raises(NotRecorded, match="has no histogram at step 3; no step has one"):
        run.histogram("layers.5.mlp")
    table = run.table()
    assert len(table) == 2
    assert table.notes == ("10 more sites were not measured at this step",)


def test_table_shows_sites_in_the_order_of_execution(named: History) -> None:
    table = named.table(step=10, stats=("mean", "count", "nan", "ratio"))
    assert table.title == "step 10"
    assert table.columns == ("site", "type", "mean", "count", "nan", "ratio")
    assert [row["site"] for row in table] == list(ADDRESSES)
    assert table.rows[1] == ("layers.0:output", "Linear", 10.25, 32, 0, None)
    assert table.rows[10][:5] == ("layers.1.mlp.weight:update", "Linear", 12.5, 33, 1)
    assert table.rows[10][5] is not None
    assert [row["site"] for row in named.table(stats="rms", where="layers.1")] == [
        "layers.1:output"
    ]


def test_series_is_numpy_and_tells_what_it_is(named: History) -> None:
    series = named.series("layers.0", "mean")
    steps, values = series
    assert steps.tolist() == [0, 10, 20]
    assert np.asarray(series).tolist() == values.tolist() == [0.25, 10.25, 20.25]
    assert np.asarray(series, dtype=np.float32).dtype == np.float32
    assert repr(series) == (
        "Series layers.0:output mean: 3 steps (0 to 20); first 0.25, last 20.2, min 0.25, max 20.2"
    )


def test_scalars_are_the_mean_of_ranks_and_keep_nan(tmp_path: Path) -> None:
    for rank, losses in enumerate(([1.0, 2.0, 5.0], [3.0, float("nan")])):
        with RunWriter(tmp_path, rank=rank, world=2) as writer:
            for step, loss in enumerate(losses):
                writer.write(StepRecord(step, 100.0 + step, None, {"loss": loss}))
    run = open_run(tmp_path)
    assert run.scalars == ("loss", "time", "seconds")
    np.testing.assert_array_equal(run.scalar("loss").values, [2.0, float("nan"), 5.0])
    np.testing.assert_array_equal(run.scalar("loss", rank=0).values, [1.0, 2.0, 5.0])
    np.testing.assert_array_equal(run.scalar("time").values, [100, 101, 102])
    assert np.isnan(run.scalar("seconds").values).all()
    assert repr(run.scalar("seconds")) == "Series seconds: 3 steps, all NaN"


def test_ranks_merge_as_if_one_had_seen_everything(tmp_path: Path) -> None:
    """Also where they number their sites differently, have others, and are not equally far."""
    first = np.random.default_rng(0).standard_normal((4, 2, 50))
    second = np.random.default_rng(1).standard_normal((4, 2, 30)) * 3 + 1
    names = (["a:update", "b:update"], ["b:update", "c:update"])
    for rank, (data, own) in enumerate(zip((first, second), names, strict=True)):
        with RunWriter(tmp_path, rank=rank, world=2) as writer:
            writer.add_sites(make_sites(own, kind="update"))
            for step in range(4 - rank):
                writer.write(StepRecord(step, 0.0, None, {}, make_blocks(data[step])))
    run = open_run(tmp_path)
    assert [row["site"] for row in run.sites()] == ["a:update", "b:update", "c:update"]
    assert run.steps.tolist() == [0, 1, 2, 3]
    for step in range(4):
        both = np.concatenate([first[step, 1], second[step, 0]]) if step < 3 else first[step, 1]
        table = {row["site"]: row for row in run.table(step, ("std", "sum", "max", "count", "l2"))}
        assert table["b:update"]["count"] == len(both)
        assert table["b:update"]["std"] == pytest.approx(both.std(), rel=1e-7)
        assert table["b:update"]["sum"] == pytest.approx(both.sum(), rel=1e-6)
        assert table["b:update"]["max"] == both.max()
        assert ("c:update" in table) == (step < 3)
        if step < 3:
            assert run.series("b:update", "lost").values[step] == pytest.approx(3 / 20)
            norm = run.series("b:update", "weight_l2").values[step]
            assert norm == pytest.approx(
                np.hypot(*[np.linalg.norm(x) for x in (first[step, 1], second[step, 0])])
            )
    np.testing.assert_allclose(
        run.series("b:update", "mean", rank=1).values, second[:3, 0].mean(axis=1)
    )
    assert run.sketch("b:update", 0, rank=1).tolist() == [0.0] * 64
    assert run.histogram("b:update", 0).tolist() == [2] * 256
    assert run.histogram("b:update", 0, rank=1).tolist() == [1] * 256


def make_blocks(data: np.ndarray) -> list[Block]:
    """Measure [sites, elements] exactly; say that 3 of 20 updates were lost over both ranks."""
    sites, count = np.arange(len(data)), data.shape[1]
    rows = np.zeros((len(data), 8))
    rows[:, 0] = count
    rows[:, 4], rows[:, 5], rows[:, 6] = data.min(1), data.max(1), data.mean(1)
    rows[:, 7] = data.var(1) * count
    norms = np.linalg.norm(data, axis=1)
    updates = np.stack([np.full(2, 10), [0, 3] if count == 50 else [0, 0], norms], axis=1)
    return [
        Block("rows", sites, rows),
        Block("updates", sites, updates.astype(float)),
        Block("sketch", sites, np.zeros((len(data), 64), np.float32)),
        Block("histogram", sites, np.ones((len(data), 256), np.int64)),
    ]


def test_shared_module_is_found_by_all_its_names(tmp_path: Path) -> None:
    facts = SiteFacts(0, "enc.emb:output", "value", "enc.emb", more={"names": ["enc.emb", "tied"]})
    with RunWriter(tmp_path) as writer:
        writer.add_sites([facts])
        writer.write(make_step(0, sites=1))
    run = open_run(tmp_path)
    assert run.series("tied", "mean").address == "enc.emb:output"
    assert run.series("tied:output", "mean").address == "enc.emb:output"
    assert len(run.table(where="tied")) == 1
    assert run.site("tied").more == {"names": ["enc.emb", "tied"]}


def test_facts_of_a_site_come_back(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    run = open_run(tmp_path)
    assert run.site("layers.3.mlp") == make_sites()[3]
    assert run.source("layers.3.mlp") == "model.py:3"
    assert dict(zip(run.sites().columns, run.sites().rows[3], strict=True)) == {
        "site": "layers.3.mlp:output",
        "kind": "value",
        "type": "Linear",
        "shape": "8x4",
        "dtype": "float32",
        "source": "model.py:3",
    }


def test_run_says_what_it_is(tmp_path: Path) -> None:
    for rank in range(2):
        write_run(tmp_path, 3, rank=rank, world=2)
    assert repr(open_run(tmp_path)) == (
        f"Run `{tmp_path}`: finished, 3 steps (0 to 2), 12 sites, 2 ranks"
    )


def test_path_without_a_run_is_answered_with_the_runs_near_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runs/first", "runs/second"):
        write_run(tmp_path / name, 1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoSuchRun) as caught:
        open_run("runs/frist")
    assert str(caught.value) == (
        "`runs/frist` is not there. Runs near it: `runs/first`, `runs/second`."
    )
    with pytest.raises(NoSuchRun, match=r"`runs` holds no run .* Runs near it: `runs/"):
        open_run("runs")
    with pytest.raises(FileNotFoundError, match=r"`frist` is not there\. Runs near it: `runs/"):
        open_run("frist")
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    with pytest.raises(NoSuchRun, match="there is no run near it"):
        open_run(tmp_path / "empty" / "deep" / "x")
    assert len(open_run("runs/first/run.json").steps) == 1


def test_opening_reads_no_statistics_and_later_questions_see_later_steps(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        run = open_run(tmp_path)
        assert len(run.steps) == 0
        writer.add_sites(make_sites()[:2])
        writer.write(make_step(0, sites=2))
        assert run.series("layers.1.mlp", "mean").values.tolist() == [0.25]
        writer.add_sites(make_sites()[2:])
        writer.write(make_step(1))
        assert run.series("layers.1.mlp", "mean").values.tolist() == [0.25, 1.25]
        assert len(run.table()) == SITES
        second = RunWriter(tmp_path, rank=1, world=1)
        assert run.ranks == (0, 1)
        second.close()


def test_merging_many_ranks_equals_merging_their_rows(tmp_path: Path) -> None:
    for rank in range(5):
        write_run(tmp_path, 3, rank=rank, world=5)
    _, _, values = open_run(tmp_path).map("rms")
    for step in range(3):
        rows = np.concatenate([make_rows(step, rank=rank) for rank in range(5)])
        merged = merge_rows(rows, np.tile(np.arange(SITES), 5), SITES)
        np.testing.assert_allclose(values[:, step], derive(merged, "rms"), rtol=1e-7)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_frames(named: History, package: str) -> None:
    """With the package installed a frame, and without it the way to install it."""
    table, series = named.table(stats=("mean", "nan")), named.series("layers.0", "mean")
    try:
        __import__(package)
    except ModuleNotFoundError:
        for one in (table, series):
            with pytest.raises(ModuleNotFoundError, match=rf'pip install "hookline\[{package}\]"'):
                getattr(one, f"to_{package}")()
        return
    frame = getattr(table, f"to_{package}")()
    assert list(frame.columns) == ["site", "type", "mean", "nan"]
    assert list(frame["site"]) == list(ADDRESSES)
    assert list(frame["mean"]) == [row["mean"] for row in table]
    other = getattr(series, f"to_{package}")()
    if package == "pandas":
        assert other.index.tolist() == [0, 10, 20]
        assert other.tolist() == [0.25, 10.25, 20.25]
        assert other.name == "layers.0:output mean"
    else:
        assert other["step"].to_list() == [0, 10, 20]
        assert other["mean"].to_list() == [0.25, 10.25, 20.25]
