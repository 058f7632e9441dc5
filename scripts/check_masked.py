#!/usr/bin/env python3
"""Two real masked language models against transformers, and how often they tell a hidden token.

    python -m venv .venv-peer
    .venv-peer/bin/pip install torch==2.13.0 transformers==5.24.0
    python scripts/check_masked.py --peer-python .venv-peer/bin/python

rxnfp (chemical reactions as SMILES, vocabulary of 591) and AntiBERTy (antibodies, 25) come in packages as pickled
weights: the peer makes Hugging Face directories of them and computes logits. Each token of some well-known reactions
and each fifth of two antibody domains is hidden by itself and told from the rest. Ends with code 1 where mpitp's logits
differ from the peer's by more than float32's rounding, or where fewer are told than below.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MOST_DIFFERENCE = 2e-4  # of logits up to 30
ANTIBODIES = [  # the variable domains of trastuzumab
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
]
REACTIONS = [  # an ester, an amide, a Suzuki coupling, a reductive amination, an oxidation
    "CC(=O)O.CCO>>CC(=O)OCC",
    "O=C(O)c1ccccc1.NCc1ccccc1>>O=C(NCc1ccccc1)c1ccccc1",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
    "O=Cc1ccccc1.C1CCNCC1>>C1CCN(Cc2ccccc2)CC1",
    "OC1CCCCC1>>O=C1CCCCC1",
]
SMILES = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9]"
MODELS = {
    "rxnfp": ("rxnfp/models/transformers/bert_pretrained", "vocab.txt", REACTIONS, SMILES, 1, 0.95),
    "antiberty": ("antiberty/trained_models/AntiBERTy_md_smooth", "../vocab.txt", ANTIBODIES, ".", 5, 0.85),
}


def hidden_texts(
    vocabulary: list[str], texts: list[str], pattern: str, step: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Each text once for each `step`-th of its tokens, which is hidden there; the hidden tokens' places and ids."""
    number = {token: i for i, token in enumerate(vocabulary)}
    seen, places, targets = [], [], []
    for text in texts:
        ids = [number["[CLS]"], *(number[token] for token in re.findall(pattern, text)), number["[SEP]"]]
        for place in range(1, len(ids) - 1, step):
            seen.append([*ids[:place], number["[MASK]"], *ids[place + 1 :]])
            places.append(place)
            targets.append(ids[place])
    return seen, places, targets


def convert(package: Path, out: Path) -> None:
    """The peer's part: a directory, and the logits of the hidden tokens."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig.from_dict(json.loads((package / "config.json").read_text()))
    weights = torch.load(package / "pytorch_model.bin", map_location="cpu", weights_only=True)
    model = BertForMaskedLM(config).eval()
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"cls.predictions.decoder.bias"}, missing
    model.save_pretrained(out)
    asked = json.loads((out / "asked.json").read_text())
    with torch.no_grad():
        rows = [
            model(torch.tensor([ids])).logits[0, at] for ids, at in zip(asked["seen"], asked["places"], strict=True)
        ]
    np.save(out / "logits.npy", torch.stack(rows).numpy())


def check(name: str, args: argparse.Namespace) -> bool:
    """One model: prepare, let the peer compute, compute, compare."""
    from mpitp.checkpoint.encoder import load_encoder
    from mpitp.comm import Group, run_threads
    from mpitp.layers.site import make_site
    from mpitp.models import Batch

    folder, vocab, texts, pattern, step, least = MODELS[name]
    fetch = [sys.executable, str(ROOT / "scripts" / "fetch_assets.py"), name]
    place = subprocess.run(fetch, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    package, out = Path(place) / folder, args.out / name
    out.mkdir(parents=True, exist_ok=True)
    seen, places, targets = hidden_texts((package / vocab).read_text().split("\n"), texts, pattern, step)
    (out / "asked.json").write_text(json.dumps({"seen": seen, "places": places}))
    subprocess.run([args.peer_python, __file__, "--convert", str(package), "--out", str(out)], check=True)

    def logits(group: Group) -> np.ndarray:
        model, rows = load_encoder(out, make_site(group)), []
        for ids, at in zip(seen, places, strict=True):
            rows.append(model.gather_logits(model.forward(Batch.of_lists([ids]))[0])[at])
        return np.stack(rows)

    found, expected = run_threads(args.ranks, logits)[0], np.load(out / "logits.npy")
    difference, told = np.abs(found - expected).max(), (found.argmax(axis=1) == targets).mean()
    reference = (expected.argmax(axis=1) == targets).mean()
    print(
        f"{name}: {told:.4f} of {len(targets)} hidden tokens told (transformers {reference:.4f}); largest difference "
        f"of logits {difference:.1e}, of values up to {np.abs(expected).max():.1f}"
    )
    return bool(difference < MOST_DIFFERENCE and told >= least)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="a Python with torch and transformers")
    parser.add_argument("--ranks", type=int, default=2, help="threads that mpitp's model is laid on; default 2")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "masked", help="where the directories are made")
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:
        convert(args.convert, args.out)
        return 0
    sys.path.insert(0, str(ROOT))
    return 0 if all([check(name, args) for name in MODELS]) else 1


if __name__ == "__main__":
    sys.exit(main())
