"""Samples of files: lines and arrays; and which files a path means."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hookline.extractions import file_sources, line_tables
from hookline.extractions.line_tables import count_lines
from hookline.extractions.sources import Broken, Wanted, open_source

EVERYTHING = Wanted.everything()


def read(data: Any, wanted: Wanted = EVERYTHING, **options: Any) -> list[tuple[int, Any]]:
    """Read the wanted samples of data."""
    return list(open_source(data, **options).samples(wanted))


def write_jsonl(path: Path, count: int) -> Path:
    """Write a dict a line, packed where the name says so."""
    text = "".join(
        json.dumps({"n": number, "text": f"ä{number}"}) + "\n" for number in range(count)
    )
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.NDJSON"])
def test_json_lines_are_dicts(tmp_path: Path, name: str) -> None:
    path = write_jsonl(tmp_path / name, 3)
    source = open_source(path)
    assert source.name == str(path)
    assert source.size == 3
    for _ in range(2):
        assert [number for number, _ in source.samples(EVERYTHING)] == [0, 1, 2]
    assert read(str(path), Wanted.of_ranges([(1, 2)])) == [(1, {"n": 1, "text": "ä1"})]
    assert read(path, column="text") == [(0, "ä0"), (1, "ä1"), (2, "ä2")]


def test_lines_that_are_not_wanted_are_not_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", 100)
    parsed = []

    class Noting:
        @staticmethod
        def loads(line: bytes) -> Any:
            parsed.append(line)
            return json.loads(line)

    monkeypatch.setattr(file_sources, "json", Noting)
    assert len(read(path, Wanted.of_ranges([(10, 12), (50, 51)]))) == 3
    assert len(parsed) == 3


def test_broken_line_is_given_as_such_and_blank_ones_are_none(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 0}\r\n\n{"n": \n  \n{"n": 2}')
    found = read(path)
    assert [number for number, _ in found] == [0, 1, 2]
    assert found[0][1] == {"n": 0}
    assert isinstance(found[1][1], Broken)
    assert "sample 1 cannot be read: JSONDecodeError" in str(found[1][1].error)
    assert found[2][1] == {"n": 2}


def read_plainly(path: Path) -> list[bytes]:
    """Give the lines of a file as Python does; without blank ones, those of JSON."""
    lines = list(io.BytesIO(path.read_bytes()))
    lines[:1] = [one.removeprefix(b"\xef\xbb\xbf") for one in lines[:1]]
    return [one for one in lines if one.strip()] if path.suffix == ".jsonl" else lines


@pytest.mark.parametrize("name", ["data.txt", "data.jsonl"])
@given(
    parts=st.lists(st.sampled_from([b"\n", b" ", b"\t\x0c", b"\r\n", b"1", b"22", b" 3 "])),
    has_mark=st.booleans(),
    chunk=st.integers(3, 9),
)
def test_lines_are_counted_and_read_by_number_wherever_chunks_end(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    parts: list[bytes],
    has_mark: bool,
    chunk: int,
) -> None:
    path = tmp_path_factory.mktemp("lines") / name
    path.write_bytes(b"\xef\xbb\xbf" * has_mark + b"".join(parts))
    expected = list(enumerate(read_plainly(path)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_tables, "_CHUNK", chunk)
        patch.setattr(line_tables, "STRETCH", 2)
        with path.open("rb") as file:
            table = count_lines(file, leaves_out_blank=path.suffix == ".jsonl")
            assert table.count == len(expected)
            assert list(table.read(file, EVERYTHING)) == expected
            for number, line in expected:
                only = Wanted.of_ranges([(number + 7, number + 8)])
                assert list(table.read(file, only, start=7)) == [(number + 7, line)]
            odd = EVERYTHING.share(1, 2, block=1)
            assert list(table.read(file, odd)) == expected[1::2]


def test_far_line_is_read_without_those_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.txt"
    path.write_text("".join(f"{number}\n" for number in range(100_000)))
    source = open_source(path)
    assert source.size == 100_000
    begins = []
    read_stretch = line_tables.LineTable._read_stretch

    def note(table: Any, file: Any, at: int, low: int, ids: Any) -> Any:
        begins.append(low)
        return read_stretch(table, file, at, low, ids)

    monkeypatch.setattr(line_tables.LineTable, "_read_stretch", note)
    assert list(source.samples(Wanted.of_ranges([(70_000, 70_002)]))) == [
        (70_000, "70000"),
        (70_001, "70001"),
    ]
    assert begins == [70_000 // line_tables.STRETCH * line_tables.STRETCH]


def test_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("a\nb\nc\n")
    source = open_source(path)
    path.write_text("a\n")
    with pytest.raises(ValueError, match="fewer lines than when it was opened") as caught:
        list(source.samples(EVERYTHING))
    assert any("data.txt" in note for note in caught.value.__notes__)


def test_packed_file_that_is_cut_names_itself(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl.gz", 1000)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EOFError) as caught:
        read(path)
    assert any("data.jsonl.gz" in note for note in caught.value.__notes__)


def test_text_is_a_sample_a_line(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes("\ufeffone\n\nthrée \x0b\r\nlast".encode())
    assert read(path) == [(0, "one"), (1, ""), (2, "thrée \x0b"), (3, "last")]
    path.write_bytes(b"one\n\xff\nthree\n")
    found = read(path)
    assert isinstance(found[1][1], Broken)
    assert found[2] == (2, "three")
    bare = tmp_path / "prompts"
    bare.write_text("a\nb\n")
    assert read(bare) == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("given", ["s3://bucket/*.parquet", "https://a.org/data.jsonl"])
def test_data_from_elsewhere_is_told_how_to_come(given: str) -> None:
    with pytest.raises(ValueError, match=r"not on a disk of this machine.*ray\.data\.read_parquet"):
        open_source(given)


def test_an_address_of_this_machine_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("one\n")
    assert read(f"file://{tmp_path}/data.txt") == [(0, "one")]


def test_folder_and_pattern_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".cache").mkdir()
    for name in ("b/2.txt", "a.txt", "b/1.txt", ".cache/0.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    assert read(tmp_path) == [(0, "a.txt"), (1, "b/1.txt"), (2, "b/2.txt")]
    assert read(f"{tmp_path}/b/*.txt") == [(0, "b/1.txt"), (1, "b/2.txt")]
    assert read(tmp_path / "**" / "[12].txt") == [(0, "b/1.txt"), (1, "b/2.txt")]
    last = Wanted.of_ranges([(2, None)])
    assert read(tmp_path, last) == [(2, "b/2.txt")]


def test_linked_folders_are_followed_and_circles_are_not(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "one.txt").write_text("one\n")
    (tmp_path / "data" / "far").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "data" / "self").symlink_to(tmp_path / "data", target_is_directory=True)
    assert read(tmp_path / "data") == [(0, "one")]


def test_npy_gives_rows_and_stays_on_disk(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float16).reshape(4, 2, 3)
    np.save(tmp_path / "rows.npy", array)
    source = open_source(tmp_path / "rows.npy")
    assert source.size == 4
    found = list(source.samples(Wanted.of_ranges([(2, 4)])))
    assert [number for number, _ in found] == [2, 3]
    assert found[0][1].dtype == torch.float16
    assert torch.equal(found[1][1], torch.from_numpy(array[3]))
    np.save(tmp_path / "other.npy", np.arange(3, dtype=">i8"))
    assert [int(sample) for _, sample in read(tmp_path / "other.npy")] == [0, 1, 2]


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array(3.0)])
def test_npy_without_rows_of_numbers_is_refused(tmp_path: Path, array: Any) -> None:
    np.save(tmp_path / "rows.npy", array)
    with pytest.raises(ValueError, match=r"rows\.npy"):
        open_source(tmp_path / "rows.npy")


def test_safetensors_gives_rows_of_one_tensor(tmp_path: Path) -> None:
    path = tmp_path / "two.safetensors"
    x = torch.randn(4, 3).bfloat16()
    save_file({"x": x, "y": torch.arange(2), "scale": torch.tensor(1.0)}, path)
    source = open_source(path, column="x")
    assert source.size == 4
    found = list(source.samples(Wanted.of_ranges([(1, 3)])))
    assert [number for number, _ in found] == [1, 2]
    assert torch.equal(found[1][1], x[2])
    assert [int(sample) for _, sample in read(path, column="y")] == [0, 1]
    assert source.fingerprint() != open_source(path, column="y").fingerprint()
    with pytest.raises(ValueError, match=r"holds several tensors; give column= one of: .*x"):
        open_source(path)
    with pytest.raises(ValueError, match="holds no tensor 'z'"):
        open_source(path, column="z")
    with pytest.raises(ValueError, match="is a single number"):
        open_source(path, column="scale")
    save_file({"only": x}, tmp_path / "one.safetensors")
    assert len(read(tmp_path / "one.safetensors")) == 4


def test_fingerprint_tells_other_files_apart(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", 3)
    before = open_source(path).fingerprint()
    path.touch()
    assert open_source(path).fingerprint() == before
    other = tmp_path / "moved"
    other.mkdir()
    assert open_source(write_jsonl(other / "data.jsonl", 3)).fingerprint() == before
    assert open_source(write_jsonl(other / "more.jsonl", 3)).fingerprint() != before
    assert open_source(path, column="n").fingerprint() != before
    write_jsonl(path, 4)
    assert open_source(path).fingerprint() != before


def test_missing_file_is_said_with_what_is_near(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", 1)
    with pytest.raises(FileNotFoundError, match=r"does not exist \(there is `train\.jsonl`\)"):
        open_source(tmp_path / "trian.jsonl")
    with pytest.raises(FileNotFoundError, match=r"`imdb` does not exist.*give \*\.parquet"):
        open_source("imdb")
    with pytest.raises(FileNotFoundError, match="holds no file that samples are read from"):
        open_source(f"{tmp_path}/*.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty` holds no file"):
        open_source(tmp_path / "empty")


def test_files_that_hold_no_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.pt` is no file that samples are read from"):
        open_source(tmp_path / "model.pt")
    (tmp_path / "a.npy").write_bytes(b"")
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"several kinds \(npy, parquet\); say which"):
        open_source(tmp_path)
    (tmp_path / "b.npy").write_bytes(b"")
    with pytest.raises(ValueError, match="means 2 npy files"):
        open_source(f"{tmp_path}/*.npy")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match="column='x' picks a field of dict samples"):
        open_source(tmp_path / "a.txt", column="x")


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("a.parquet", "pyarrow", "parquet"), ("a.png", "PIL", "images")]
)
def test_missing_package_is_said_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    for module in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'pip install "hookline\[{extra}\]"'):
        open_source(tmp_path / name)
