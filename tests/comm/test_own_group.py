"""A group of one's own: loaded by name, refused where layers would pass it by or where it adds up wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.your_own_all_reduce import Ring
from mpitp.bench import allreduce
from mpitp.comm import ForwardingGroup, Group, SerialGroup, make_mesh, run_threads
from mpitp.comm.observed import GroupObserver, ObservedGroup
from mpitp.comm.own_group import check_group, load_group
from mpitp.errors import ConfigError, NumericError
from tests.bench.test_command import parsed

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
from mpitp.comm import ForwardingGroup, ThreadGroup

class Counted(ForwardingGroup):
    calls = 0
    def all_reduce(self, x, op="sum", out=None):
        type(self).calls += self.rank == 0
        return super().all_reduce(x, op, out)

class Elsewhere(ForwardingGroup):
    def __init__(self, inner):
        super().__init__(inner)
        self.rank = 0

class Other: pass
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return str(path)


class Silent(GroupObserver):
    def around_collective(self, call: Any, arrays: Any, group: Any, run: Any) -> Any:
        return run()


class PassedBy(ObservedGroup):
    """What layers start goes past it."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner, Silent())

    def all_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Any:
        return self.inner.all_reduce(x, op, out)


class Whole(PassedBy):
    """Both of them."""

    def start_all_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Any:
        return self.inner.start_all_reduce(x, op, out)


def test_one_that_layers_would_pass_by_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"PassedBy does all_reduce .* ObservedGroup does in another.*ForwardingGroup"
    ):
        make_mesh(PassedBy(SerialGroup()))
    with pytest.raises(ConfigError, match="PassedBy does all_reduce"):
        make_mesh(SerialGroup(), wrap=PassedBy)
    with pytest.raises(ConfigError, match="PassedBy does all_reduce"):
        load_group(f"{__name__}:PassedBy")
    make_mesh(Whole(SerialGroup()))
    make_mesh(Ring(SerialGroup()))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:Ring", "No module named.*installed or on PYTHONPATH"),
        ("no/such/file.py:Ring", "there is no file no/such/file.py"),
        ("{file}:Missing", "has no such class"),
        ("{file}:Other", "expected a subclass of Group"),
        ("{file}:number", "is 3; expected a subclass"),
        ("{file}", "module:Class or path/to/file.py:Class"),
        ("{file}:not a name", "module:Class or path/to/file.py:Class"),
        (":Ring", "module:Class or path/to/file.py:Class"),
    ],
)
def test_what_can_not_be_loaded_is_told(name: str, said: str, file: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_group(name.format(file=file))


class Chunked(ForwardingGroup):
    """Wants to know more than its inner group."""

    def __init__(self, inner: Group, chunk: int) -> None:
        super().__init__(inner)
        self.chunk = chunk


class Bare(Group):
    """Has none of the methods that a group must have."""


def test_one_that_can_not_be_made_is_told() -> None:
    said = r"Chunked is made with the library's group as its only .* takes \(inner: 'Group', chunk: 'int'\).* defaults"
    for make in (lambda: load_group(f"{__name__}:Chunked"), lambda: make_mesh(SerialGroup(), wrap=Chunked)):
        with pytest.raises(ConfigError, match=said):
            make()
    with pytest.raises(ConfigError, match=r"Bare lacks all_gather, .*which every Group has; derive it from .*Forwa"):
        load_group(f"{__name__}:Bare")
    mesh = make_mesh(SerialGroup(), wrap=lambda group: Chunked(group, chunk=4))
    assert isinstance(mesh.world, Chunked) and mesh.world.chunk == 4


def test_one_that_says_another_place_is_refused(file: str) -> None:
    wrap = load_group(f"{file}:Elsewhere")
    with pytest.raises(ConfigError, match=r"made with rank \d of 2, it says rank 0 of 2"):
        run_threads(2, wrap)


def test_every_group_of_a_mesh_is_one() -> None:
    def program(group: Group) -> set[str]:
        mesh = make_mesh(group, {"dp": 2, "tp": 2}, Ring)
        assert mesh["tp"].all_reduce(np.ones(2)).tolist() == [2, 2]
        return {type(each).__name__ for _, each in mesh.groups() if each.size > 1} | {type(mesh.world).__name__}

    assert run_threads(4, program) == [{"Ring"}] * 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_right_ones_pass(ranks: int) -> None:
    run_threads(ranks, lambda group: check_group(Ring, group, "Ring"))
    run_threads(ranks, lambda group: check_group(ForwardingGroup, group, "plain"))


class Wrong(ForwardingGroup):
    """Wrong in the way that `fault` says, on rank 1."""

    fault = ""

    def all_reduce(self, x: Any, op: str = "sum", out: Any = None) -> Any:
        result = np.array(self.inner.all_reduce(x, op))
        if self.fault == "sum" and self.rank == 1 and result.size > 900:
            result[17] += 1
        if self.fault == "max is sum" and op == "max":
            return self.inner.all_reduce(x, "sum", out)
        if self.fault == "shape" and out is None:
            return result.reshape(-1)
        if self.fault == "dtype" and x.dtype == "float16":
            return result.astype("float32")
        if self.fault == "argument":
            x[...] = result
        if out is None or self.fault == "out":
            return result
        out[...] = result
        return out if self.fault != "nothing" else None

    def all_gather(self, x: Any, dim: int = 0) -> Any:
        result = self.inner.all_gather(x, dim)
        return result[::-1] if self.fault == "gather" else result


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("sum", r"all_reduce\(sum\) of float32 \[1003\] has .* at \[17\], expected .* \(1 of 1003 differ\), on rank 1"),
        ("max is sum", r"all_reduce\(max\) of float32"),
        ("shape", r"all_reduce\(sum\) of float32 \[7, 3\] is float32 \[21\], expected float32 \[7, 3\]"),
        ("dtype", r"of float16 \[1003\] is float32 \[1003\], expected float16"),
        ("argument", "its argument afterwards has"),
        ("out", "what is in out has"),
        ("nothing", r"with out is None, expected float32"),
        ("gather", r"all_gather of float32 \[1003\] has"),
    ],
)
def test_wrong_ones_are_refused_on_every_rank(fault: str, said: str) -> None:
    class Faulty(Wrong):
        pass

    Faulty.fault = fault

    def program(group: Group) -> str:
        with pytest.raises(NumericError, match=said) as caught:
            check_group(Faulty, group, "mine")
        return str(caught.value)

    told = run_threads(3, program)
    assert len(set(told)) == 1 and told[0].startswith("mine doesn't do what the library's group does: ")


def test_it_is_timed_beside_the_library() -> None:
    args = parsed("allreduce", "--max-bytes", "1024", "--group", f"{ROOT}/examples/your_own_all_reduce.py:Ring")
    facts = run_threads(2, lambda group: allreduce.measure(args, group))[0]
    assert facts["ways"] == ["library", "Ring"]
    assert facts["sizes"][0]["ways"]["Ring"]["times_the_library_least"] > 0
    assert any("Ring" in line for line in allreduce.report(facts))
