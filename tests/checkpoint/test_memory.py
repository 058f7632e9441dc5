"""A rank's memory while it loads stays near its own share of the weights."""

import json
import subprocess
import sys

import numpy as np
import pytest

from mpitp.checkpoint.safetensors_file import SafetensorsWriter, create_file
from mpitp.checkpoint.safetensors_header import plan_file

ROWS, COLS, TENSORS = 4096, 4096, 4  # 256 MiB as float32

PROGRAM = """
import json, re, sys
from pathlib import Path
import numpy as np
from mpitp.checkpoint import load_params
from mpitp.layers.param import Param
from mpitp.layers.placement import Cut, Part, Placement
from mpitp.models.names import HfPiece

path, rows, cols, tensors, dim = sys.argv[1], *map(int, sys.argv[2:])
held = range(rows // 4, 3 * rows // 4)

class Half:
    def __init__(self):
        shape = (len(held), cols) if dim == 0 else (cols, len(held))
        cut, whole = Cut(rows, held, held, (held,), "tp"), Cut.whole(cols)
        placement = Placement((Part("", (cut, whole) if dim == 0 else (whole, cut)),), dim)
        self.params = {f"w{i}": Param(np.empty(shape, np.float32), placement) for i in range(tensors)}
    def named_params(self):
        yield from self.params.items()
    def hf_pieces(self):
        return {(name, ""): HfPiece(name) for name in self.params}

def most_kib():  # of this program alone: ru_maxrss begins with what the one that started it had
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

model = Half()
before = most_kib()
load_params(model, path)
after = most_kib()
share = sum(param.data.nbytes for param in model.params.values())
ends = float(model.params["w0"].data[-1, -1])
print(json.dumps({"before": before << 10, "after": after << 10, "share": share, "ends": ends}))
"""


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("stored", ["F32", "BF16"])
def test_memory_at_load(stored, dim, tmp_path):
    layout = plan_file({f"w{i}": (stored, (ROWS, COLS)) for i in range(TENSORS)})
    create_file(tmp_path / "model.safetensors", layout)
    writer = SafetensorsWriter(tmp_path / "model.safetensors", layout)
    for i in range(TENSORS):
        writer.write(f"w{i}", np.full((ROWS, COLS), 3.0, np.float32))
    writer.close()
    arguments = [str(tmp_path), *map(str, (ROWS, COLS, TENSORS, dim))]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    assert measured["ends"] == 3.0
    assert measured["after"] < 1.3 * measured["share"] + 200e6
    assert measured["after"] - measured["before"] < 1.1 * measured["share"] + 20e6
