"""All that is wrong with a store is found at once, and repaired so that nothing else is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from made_stores import change_head, fill, flip_bit, list_files, make_rows, make_store

from hookline import _errors as errors
from hookline.stores import StoreWriter, open_store, verify


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a store of 40 samples, four in each of ten shards."""
    make_store(tmp_path, 40, group_bytes=1, shard_bytes=1)
    assert len(list_files(tmp_path)) == 10
    return tmp_path


def add_line(folder: Path, text: str, name: str = "writer.jsonl") -> None:
    with (folder / "index" / name).open("a") as file:
        file.write(text + "\n")


def damage(folder: Path) -> dict[str, str]:
    """Damage four shards, each in another way; give what should be said of them."""
    shards = list_files(folder)
    flip_bit(shards[1], shards[1].stat().st_size - 70)
    shards[3].write_bytes(shards[3].read_bytes()[:-5])
    change_head(shards[5], lambda head, told: head.pop("000000/rows"))
    shards[7].write_bytes(b"")
    said = {
        1: "group 0 does not have the checksum it was written with",
        3: "its head names bytes that it does not have",
        5: "its head is not that of a shard",
        7: "it has 0 bytes",
    }
    return {f"shards/{shards[at].name}": what for at, what in said.items()}


def test_good_store_is_good(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    verdict = verify(folder, on_progress=lambda done, total: told.append((done, total)))
    size = sum(one.stat().st_size for one in list_files(folder))
    assert verdict.is_good
    assert (verdict.shards, verdict.samples, verdict.bytes) == (10, 40, size)
    assert (verdict.problems, verdict.repairs) == ([], [])
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) == 11


def test_every_damaged_shard_is_named_with_the_reason(folder: Path) -> None:
    wanted = damage(folder)
    before = {one: one.read_bytes() for one in list_files(folder)}
    verdict = verify(folder)
    assert dict(verdict.problems) == wanted
    assert not verdict.is_good
    assert (verdict.shards, verdict.samples, verdict.repairs) == (6, 24, [])
    assert {one: one.read_bytes() for one in list_files(folder)} == before


def test_repaired_store_is_filled_by_the_same_again(folder: Path) -> None:
    wanted = damage(folder)
    damaged = {name: (folder / name).read_bytes() for name in wanted}
    verdict = verify(folder, repair=True)
    assert dict(verdict.problems) == wanted
    assert len(verdict.repairs) == 5  # four shards, and the lines of the index
    for name, data in damaged.items():
        assert (folder / name.replace("shards", "damaged")).read_bytes() == data
    assert verify(folder).is_good
    done = StoreWriter(folder).find_done()
    missing = np.setdiff1d(np.arange(40), done)
    assert missing.tolist() == [4, 5, 6, 7, *range(12, 16), *range(20, 24), *range(28, 32)]
    fill(folder, missing.tolist())
    assert torch.equal(open_store(folder)["rows"][:], make_rows(range(40)))
    assert verify(folder).samples == 40


def test_what_was_put_aside_before_stays(folder: Path) -> None:
    for content in (b"first", b"second", b"third"):
        list_files(folder)[0].with_name("writer-000000.safetensors").write_bytes(content)
        verify(folder, repair=True)
    found = {one.name: one.read_bytes() for one in (folder / "damaged").iterdir()}
    assert found == {
        "writer-000000.safetensors": b"first",
        "writer-000000.safetensors.2": b"second",
        "writer-000000.safetensors.3": b"third",
    }


def test_ends_that_fit_their_checksum_and_no_rows_are_found(tmp_path: Path) -> None:
    """As a writer that is wrong itself would write them."""
    make_store(tmp_path, 4)

    def lie(head: dict[str, dict[str, object]], told: object) -> None:
        head["000000/ragged"]["shape"], head["000000/ragged"]["data_offsets"] = [0, 2], [0, 0]

    change_head(list_files(tmp_path)[0], lie)
    (problem,) = verify(tmp_path).problems
    assert problem[1] == "group 0 does not say whose the rows of `ragged` are"


def test_samples_in_two_shards_are_named(folder: Path) -> None:
    fill(folder, range(2, 9), name="again", batch=7, shard_bytes=1)
    fill(folder, [50, 50], name="twice", batch=2)
    verdict = verify(folder, repair=True)
    name = "shards/again-000000.safetensors"
    assert sorted(verdict.problems) == [
        ("shards/twice-000000.safetensors", "holds samples twice: 50"),
        (
            "shards/writer-000000.safetensors",
            f"holds samples that `{name}` holds too: 2, 3",
        ),
        (
            "shards/writer-000001.safetensors",
            f"holds samples that `{name}` holds too: 4, 5, 6, 7",
        ),
        ("shards/writer-000002.safetensors", f"holds samples that `{name}` holds too: 8"),
    ]
    assert (verdict.samples, verdict.repairs) == (41, [])


def test_only_a_few_of_many_samples_are_named(tmp_path: Path) -> None:
    fill(tmp_path, range(2000), name="a", batch=2000)
    fill(tmp_path, range(2000), name="b", batch=2000)
    (problem,) = verify(tmp_path).problems
    assert problem[1].endswith("holds too: 0, 1, 2, 3, 4 and 1,995 more")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"file": "gone.safetensors"}', "names `shards/gone.safetensors`, which is not there"),
        ('{"file": "../../etc/passwd"}', "leads out of the folder: '../../etc/passwd' cannot name"),
        ('{"file": 7}', "leads out of the folder: 7 cannot name"),
        ('{"file": "writer-0000', "cannot be read"),
        ("[1]", "cannot be read"),
        (
            '{"file": "writer-000000.safetensors", "samples": 4, "ranges": [[90, 94]]}',
            "is not true of `shards/writer-000000.safetensors`",
        ),
    ],
)
def test_line_that_is_not_true_is_named_and_dropped(line: str, what: str, folder: Path) -> None:
    path = folder / "index" / "writer.jsonl"
    good = path.read_text().splitlines()
    add_line(folder, line)
    (problem,) = verify(folder).problems
    assert problem[0] == "index/writer.jsonl"
    assert problem[1].startswith(f"line 11 {what}")
    verdict = verify(folder, repair=True)
    assert verdict.repairs == ["1 line of `index/writer.jsonl` dropped"]
    assert path.read_text().splitlines() == good
    assert verify(folder).is_good
    assert StoreWriter(folder).find_done().tolist() == list(range(40))


def test_index_that_is_gone_is_no_problem(folder: Path) -> None:
    (folder / "index" / "writer.jsonl").unlink()
    assert verify(folder).is_good


def test_file_of_a_strange_name_is_put_aside(folder: Path) -> None:
    list_files(folder)[0].rename(folder / "shards" / "a copy.safetensors")
    (folder / "index" / "a copy.jsonl").write_text("{}\n")
    verdict = verify(folder, repair=True)
    assert [file for file, _ in verdict.problems] == [
        "shards/a copy.safetensors",
        "index/a copy.jsonl",
        "index/writer.jsonl",
    ]
    assert verify(folder).is_good


def test_unfinished_files_are_named_and_removed_but_not_those_of_a_writer_at_work(
    folder: Path,
) -> None:
    left = [".store.json.999999999.tmp", "shards/.writer-000010.safetensors.999999999.part"]
    own = folder / "shards" / f".other-000000.safetensors.{os.getpid()}.part"
    for name in left:
        (folder / name).touch()
    own.touch()
    verdict = verify(folder)
    assert verdict.problems == [(name, "was never finished") for name in left]
    verdict = verify(folder, repair=True)
    assert verdict.repairs == [f"`{name}` removed" for name in left]
    assert own.exists()
    assert verify(folder).is_good


def test_shard_of_a_newer_hookline_is_named_and_left(folder: Path) -> None:
    shard = list_files(folder)[2]
    change_head(shard, lambda head, told: told.update(version=99))
    verdict = verify(folder, repair=True)
    ((file, what),) = verdict.problems
    assert file == f"shards/{shard.name}"
    assert "newer hookline" in what
    assert shard.exists()
    assert verdict.repairs == []


def test_shard_that_cannot_be_reached_is_named_and_left(folder: Path) -> None:
    shard = list_files(folder)[2]
    shard.unlink()
    shard.symlink_to(folder / "nowhere")
    told: list[int] = []
    verdict = verify(folder, repair=True, on_progress=lambda done, total: told.append(done))
    assert [file for file, _ in verdict.problems] == [f"shards/{shard.name}"]
    assert shard.is_symlink()
    assert told


def test_store_without_a_word_of_itself_is_a_problem_and_no_store_an_error(
    folder: Path, tmp_path: Path
) -> None:
    about = folder / "store.json"
    good = about.read_text()
    about.write_text("{")
    verdict = verify(folder, repair=True)
    assert [file for file, _ in verdict.problems] == ["store.json"]
    assert about.read_text() == "{"
    about.write_text(json.dumps(json.loads(good) | {"version": 99}))
    with pytest.raises(errors.NewerRun):
        verify(folder)
    with pytest.raises(errors.NoSuchRun):
        verify(tmp_path / "nowhere")
