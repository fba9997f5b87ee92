"""PyTorch files: what PyTorch writes is read bit by bit, and nothing that is pickled is run."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from specjax.checkpoints.formats.torch_file import open_torch_file


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def write_zip(path: Path, pickled: bytes, **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", np.arange(4, dtype=np.float32).tobytes())
        archive.writestr("archive/version", b"3\n")
    return path


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None], **options: Any) -> Path:
    """The archive with each entry changed, or left out."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w", **options) as archive:
        for entry, content in entries.items():
            changed = change(entry, content)
            if changed is not None:
                archive.writestr(entry, changed)
    return path


def tensor_pickle(
    size: tuple[int, ...], stride: tuple[int, ...], *, offset: int = 0, numbers: int = 4, kind: str = "FloatStorage"
) -> bytes:
    """A state dict with one tensor `w` over storage 0, opcode by opcode."""

    def integers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"I%d\n" % value for value in values) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\n%s\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuI%d\ntQ" % (kind.encode(), numbers)
    arguments = b"(" + storage + b"I%d\n" % offset + integers(size) + integers(stride) + b"I00\nccollections\nOrderedDict\n(tRt"
    return b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


def test_every_dtype_is_read_bit_by_bit(tmp_path: Path, torch: Any) -> None:
    values = torch.arange(-6, 18).reshape(4, 6)
    dtypes = ["bfloat16", "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
    torch.save(OrderedDict((dtype, (values * 1.37).to(getattr(torch, dtype))) for dtype in dtypes), tmp_path / "a.bin")
    found = open_torch_file(tmp_path / "a.bin")
    assert [tensor.dtype for tensor in found.values()] == ["BF16", "F16", "F32", "F64", "I64", "I32", "I16", "I8", "U8", "BOOL"]
    for dtype in dtypes:
        expected = (values * 1.37).to(getattr(torch, dtype))
        read = found[dtype].read(slice(None))
        assert found[dtype].shape == (4, 6)
        assert read.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
        assert found[dtype].num_bytes == read.nbytes
        np.testing.assert_array_equal(read.astype(np.float64), expected.double().numpy())
        np.testing.assert_array_equal(found[dtype].read(slice(1, 3)), read[1:3])


def test_views_shared_storages_and_parameters_are_read(tmp_path: Path, torch: Any) -> None:
    base = torch.randn(6, 10)
    state = OrderedDict(
        transposed=base.T,
        part=base[2:5, 1:9:2],
        same=base,
        parameter=torch.nn.Parameter(base[1:]),
        scalar=torch.tensor(3.5),
        empty=torch.zeros(0, 7),
        broadcast=torch.tensor([[2.0]]).expand(3, 4),
    )
    torch.save(state, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert sum("/data/" in entry for entry in archive.namelist()) == 4  # one for all views of `base`
    found = open_torch_file(tmp_path / "a.pt")
    for name, tensor in state.items():
        assert found[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(found[name].read(slice(None)), tensor.detach().numpy())
        if tensor.ndim:
            np.testing.assert_array_equal(found[name].read(slice(1, 2)), tensor.detach().numpy()[1:2])


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_a_state_dict_among_other_things_is_found(tmp_path: Path, torch: Any, wrapper: str) -> None:
    torch.save({wrapper: torch.nn.Linear(3, 2).state_dict(), "epoch": 3, "note": "best"}, tmp_path / "a.pt")
    assert sorted(open_torch_file(tmp_path / "a.pt")) == ["bias", "weight"]


def test_what_is_no_state_dict_is_refused(tmp_path: Path, torch: Any) -> None:
    for content, message in (
        ([1, 2, 3], "holds a list, expected a state dict"),
        ({"a": torch.zeros(2), "b": {"c": torch.zeros(2)}}, "under 'b' it has a dict"),
        ({"a": torch.zeros(2), "step": 3}, "under 'step' it has a int"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ):
        torch.save(content, tmp_path / "a.pt")
        with pytest.raises(ValueError, match=message):
            open_torch_file(tmp_path / "a.pt")


def test_files_from_before_torch_1_6_are_refused_with_what_to_do(tmp_path: Path, torch: Any) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"a\.pt: written in the format from before PyTorch 1\.6.*save it again"):
        open_torch_file(tmp_path / "a.pt")


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, torch: Any) -> None:
    torch.save({"a": torch.zeros(100)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for length in (len(whole) // 2, len(whole) - 10, 3, 0):
        (tmp_path / "a.pt").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut short|not a file that torch.save wrote"):
            open_torch_file(tmp_path / "a.pt")


def test_an_archive_that_torch_would_not_write_is_refused(tmp_path: Path, torch: Any) -> None:
    def fresh() -> Path:
        torch.save({"a": torch.zeros(100)}, tmp_path / "a.pt")
        return tmp_path / "a.pt"

    cases: list[tuple[Callable[[str, bytes], bytes | None], dict[str, Any], str]] = [
        (lambda entry, content: content, {"compression": zipfile.ZIP_DEFLATED}, "compressed"),
        (lambda entry, content: b"big" if entry.endswith("/byteorder") else content, {}, "big-endian"),
        (lambda entry, content: None if entry.endswith("/data.pkl") else content, {}, "not a state dict that torch.save wrote"),
        (lambda entry, content: None if entry.endswith("/data/0") else content, {}, "lacks the storage '0'"),
        (lambda entry, content: content[:-4] if entry.endswith("/data/0") else content, {}, "should hold 100 numbers of F32"),
    ]
    for change, options, message in cases:
        rewritten(fresh(), change, **options)
        with pytest.raises(ValueError, match=message):
            open_torch_file(tmp_path / "a.pt")
    assert list(open_torch_file(rewritten(fresh(), lambda entry, content: content))) == ["a"]


class Command:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    commands = {
        r"\w+\.system": Command(os.system, f"touch {trace}"),
        r"\w+\.eval": Command(eval, f"open({str(trace)!r}, 'w')"),
        r"\w+\.getattr": Command(getattr, Command(os.system, f"touch {trace}"), "real"),
    }
    for name, command in commands.items():
        path = write_zip(tmp_path / "a.bin", pickle.dumps({"w": command}, protocol=protocol))
        with pytest.raises(ValueError, match=rf"a\.bin: the pickle in it cannot be read: it names {name}, .*nothing of it was run"):
            open_torch_file(path)
    assert not trace.exists()


def test_a_pickle_that_changes_its_dictionary_s_methods_changes_nothing(tmp_path: Path) -> None:
    pickled = b"ccollections\nOrderedDict\n)R}(S'get'\nI5\nS'values'\nI5\nS'items'\nI5\nub."
    assert open_torch_file(write_zip(tmp_path / "a.pt", pickled)) == {}


def test_a_pickle_cannot_ask_for_a_table_larger_than_memory(tmp_path: Path) -> None:
    hostile = b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b"."  # an empty dict, remembered as object number 2**32 - 1
    with pytest.raises(ValueError, match="it stores object number 4294967295, and has 9 bytes"):
        open_torch_file(write_zip(tmp_path / "w.bin", hostile))


def test_a_pickle_cannot_reach_beyond_its_storage(tmp_path: Path) -> None:
    found = open_torch_file(write_zip(tmp_path / "a.pt", tensor_pickle((2, 2), (1, 2))))
    np.testing.assert_array_equal(found["w"].read(slice(None)), [[0, 2], [1, 3]])
    for pickled in (
        tensor_pickle((5,), (1,)),
        tensor_pickle((2, 2), (2, 1), offset=1),
        tensor_pickle((2,), (-1,)),
        tensor_pickle((4,), (1,), offset=-1),
        tensor_pickle((4, 1), (1,)),
        tensor_pickle((2**40, 2**40), (0, 1)),
        tensor_pickle((4,), (1,), numbers=8),
        tensor_pickle((4,), (1,), kind="DoubleStorage"),
        tensor_pickle((4,), (1,), kind="UntypedStorage"),
        tensor_pickle((4,), (1,))[:-1],
        b"\x80\x02",
        b"not a pickle",
    ):
        with pytest.raises(ValueError, match=r"a\.pt: the pickle in it cannot be read"):
            open_torch_file(write_zip(tmp_path / "a.pt", pickled))


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.pt", tensor_pickle((4,), (1,)))
    found = open_torch_file(path)
    content = path.read_bytes()
    with path.open("r+b") as file:  # in place: the memory map shows it
        file.seek(content.index(np.arange(4, dtype=np.float32).tobytes()))
        file.write(np.full(4, 7, np.float32).tobytes())
    np.testing.assert_array_equal(found["w"].read(slice(1, 3)), [7, 7])
