#!/usr/bin/env python3
"""Random decoders of all types, computed by mpitp and by transformers: logits, loss, every gradient, generation over a
cache. Anything that differs is printed with its config.

    python -m venv .venv-golden
    .venv-golden/bin/pip install torch==2.13.0 transformers==5.24.0 -e .
    PYTHONPATH=. .venv-golden/bin/python scripts/differential.py --cases 300
    PYTHONPATH=. .venv-golden/bin/python scripts/differential.py --store        # the stored cases of tests/parity

A config that mpitp refuses isn't a difference; the reasons are counted.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden import as_stored, double_precision, exact_bloom_gelu, mean_loss, model_class
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from mpitp.comm import Group, run_threads
from mpitp.errors import ConfigError
from mpitp.models import MODEL_TYPES
from tests.parity.differential import (
    CASES,
    SEQ,
    Arrays,
    chosen_rows,
    computed,
    differences,
    digest,
    tokens_of,
    weight_of,
)

STORED_A_TYPE = 2
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GPT_ACTIVATIONS = ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "quick_gelu", "silu", "gelu_fast"]
GATES = ["silu", "gelu", "gelu_pytorch_tanh", "relu", "swish"]
Fields = dict[str, Any]


def llama_sizes(pick: random.Random, *, own_head_dim: bool = True) -> Fields:
    """Sizes, ragged in every way that is allowed."""
    kv_heads, group = pick.choice([1, 2, 3]), pick.choice([1, 2, 3])
    heads, head_dim = kv_heads * group, pick.choice([4, 6, 8])
    fields: Fields = {
        "vocab_size": pick.randint(7, 23),
        "num_hidden_layers": pick.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": pick.randint(3, 19),
        "max_position_embeddings": pick.choice([SEQ, 16, 64]),
        "tie_word_embeddings": pick.random() < 0.4,
        "hidden_size": heads * head_dim,
    }
    if own_head_dim and pick.random() < 0.7:
        fields |= {"head_dim": head_dim, "hidden_size": 2 * heads * pick.randint(1, 4)}
    return fields


def rope(pick: random.Random, fields: Fields, *, partial: bool = False) -> Fields:
    """RoPE with any scaling."""
    kind = pick.choice(["default", "default", "linear", "dynamic", "yarn", "llama3", "longrope"])
    width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    found: Fields = {"rope_type": kind, "rope_theta": pick.choice([10.0, 1000.0, 10000.0])}
    if partial:
        found["partial_rotary_factor"] = pick.choice([1.0, 0.5]) if width % 4 == 0 else 1.0
    width = int(width * found.get("partial_rotary_factor", 1.0))
    kind = found["rope_type"] = "default" if kind == "dynamic" and width < 4 else kind
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        found["factor"] = pick.choice([2.0, 4.0])
    if kind in ("yarn", "llama3", "longrope"):
        found["original_max_position_embeddings"] = pick.choice([4, 8, 16])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        found |= pick.choice([{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"mscale": 0.7, "mscale_all_dim": 1.0}])
        found |= pick.choice([{}, {"attention_factor": 1.3}, {"truncate": False}])
    if kind == "longrope":
        found |= {name: [pick.uniform(1, 4) for _ in range(width // 2)] for name in ("short_factor", "long_factor")}
        found |= pick.choice([{}, {"factor": 3.0}, {"attention_factor": 1.2}])
    return found


def layer_types(pick: random.Random, fields: Fields) -> Fields:
    """Kinds of blocks named one by one, or left to the type."""
    kinds = [pick.choice(["full_attention", "sliding_attention"]) for _ in range(fields["num_hidden_layers"])]
    return {"layer_types": kinds} if pick.random() < 0.5 else {}


def llama(pick: random.Random) -> Fields:
    fields = llama_sizes(pick)
    fields |= {"attention_bias": pick.random() < 0.3, "mlp_bias": pick.random() < 0.3, "hidden_act": pick.choice(GATES)}
    return fields | {"rope_parameters": rope(pick, fields)}


def qwen(pick: random.Random, *, is_3: bool) -> Fields:
    fields = llama_sizes(pick, own_head_dim=is_3)
    fields |= {"head_dim": fields.get("head_dim", 6)} if is_3 else {}
    fields |= {"rope_parameters": rope(pick, fields)} | ({"attention_bias": pick.random() < 0.3} if is_3 else {})
    if pick.random() < 0.6:
        fields |= {
            "use_sliding_window": True,
            "sliding_window": pick.randint(1, 9),
            "max_window_layers": pick.randint(0, 2),
        }
        fields |= layer_types(pick, fields)
    return fields


def mistral(pick: random.Random) -> Fields:
    fields = llama_sizes(pick) | {"sliding_window": pick.choice([None, 1, 3, 7, 64])}
    return fields | {"rope_parameters": rope(pick, fields)}


def losses(pick: random.Random) -> Fields:
    """Of a mixture of experts."""
    return {"output_router_logits": pick.random() < 0.7, "router_aux_loss_coef": pick.choice([0.0, 0.02, 0.3])}


def mixtral(pick: random.Random) -> Fields:
    experts = pick.randint(1, 6)
    fields = llama_sizes(pick) | {"sliding_window": pick.choice([None, 1, 3, 7, 64])}
    fields |= {"head_dim": fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])}
    fields |= {"num_local_experts": experts, "num_experts_per_tok": pick.randint(1, experts)}
    return fields | {"rope_parameters": rope(pick, fields), "hidden_act": pick.choice(GATES)} | losses(pick)


def qwen2_moe(pick: random.Random) -> Fields:
    experts, fields = pick.randint(1, 6), qwen(pick, is_3=False)
    step, plain = pick.choice([1, 1, 2]), [i for i in range(fields["num_hidden_layers"]) if pick.random() < 0.2]
    has_experts = any(i not in plain and (i + 1) % step == 0 for i in range(fields["num_hidden_layers"]))
    return {
        **fields,
        **{"num_experts": experts, "num_experts_per_tok": pick.randint(1, experts), "hidden_act": pick.choice(GATES)},
        **{"moe_intermediate_size": pick.randint(1, 9), "shared_expert_intermediate_size": pick.randint(1, 9)},
        "norm_topk_prob": pick.random() < 0.5,
        **{"decoder_sparse_step": step, "mlp_only_layers": plain},
        "qkv_bias": pick.random() < 0.7,
        **(losses(pick) if has_experts else {}),
    }


def smollm3(pick: random.Random) -> Fields:
    fields = llama_sizes(pick, own_head_dim=False)
    fields |= {"attention_bias": pick.random() < 0.3, "mlp_bias": pick.random() < 0.3}
    fields |= {"no_rope_layer_interval": pick.randint(1, 3)} if pick.random() < 0.7 else {}
    fields |= {"use_sliding_window": True, "sliding_window": pick.randint(1, 9)} if pick.random() < 0.4 else {}
    return fields | {"rope_parameters": rope(pick, fields)}


def olmo2(pick: random.Random) -> Fields:
    fields = llama_sizes(pick) | {"attention_bias": pick.random() < 0.3, "hidden_act": pick.choice(GATES)}
    return fields | {"rope_parameters": rope(pick, fields)}


def phi3(pick: random.Random) -> Fields:
    fields = llama_sizes(pick, own_head_dim=False) | {"sliding_window": pick.choice([None, 3, 7])}
    found = rope(pick, fields, partial=True)
    if found["rope_type"] not in ("default", "longrope"):
        found = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}
    original = found.get("original_max_position_embeddings")
    fields |= {"original_max_position_embeddings": original} if original else {}
    return fields | {"rope_parameters": found, "hidden_act": pick.choice(GATES)}


def stablelm(pick: random.Random) -> Fields:
    fields = llama_sizes(pick, own_head_dim=False) | {"use_parallel_residual": pick.random() < 0.5}
    fields |= {"use_qkv_bias": pick.random() < 0.5, "hidden_act": pick.choice(GATES)}
    return fields | {"rope_parameters": rope(pick, fields, partial=True)}


def gpt_neox(pick: random.Random) -> Fields:
    fields = llama_sizes(pick, own_head_dim=False) | {"use_parallel_residual": pick.random() < 0.6}
    del fields["num_key_value_heads"]
    fields |= {"attention_bias": pick.random() < 0.7, "hidden_act": pick.choice(GPT_ACTIVATIONS)}
    return fields | {"rope_parameters": rope(pick, fields, partial=True)}


def gpt2(pick: random.Random) -> Fields:
    heads = pick.randint(1, 5)
    return {
        **{"vocab_size": pick.randint(7, 23), "n_layer": pick.randint(1, 3), "n_head": heads, "n_positions": 16},
        **{"n_embd": heads * pick.randint(2, 5), "n_inner": pick.choice([None, 5, 17])},
        "activation_function": pick.choice(GPT_ACTIVATIONS),
        "scale_attn_weights": pick.random() < 0.7,
        "scale_attn_by_inverse_layer_idx": pick.random() < 0.4,
        "tie_word_embeddings": pick.random() < 0.6,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def opt(pick: random.Random) -> Fields:
    fields = llama_sizes(pick, own_head_dim=False)
    del fields["num_key_value_heads"]
    return {
        **{key: value for key, value in fields.items() if key != "intermediate_size"},
        **{"ffn_dim": fields["intermediate_size"], "activation_function": pick.choice(GPT_ACTIVATIONS)},
        **{"dropout": 0.0, "do_layer_norm_before": pick.random() < 0.9, "enable_bias": pick.random() < 0.9},
    }


def bloom(pick: random.Random) -> Fields:
    heads = pick.randint(1, 7)
    return {
        **{"vocab_size": pick.randint(7, 23), "n_layer": pick.randint(1, 3), "n_head": heads},
        **{"hidden_size": heads * pick.randint(2, 5), "tie_word_embeddings": pick.random() < 0.6},
    }


def gemma(pick: random.Random) -> Fields:
    fields = llama_sizes(pick)
    fields |= {"head_dim": fields.get("head_dim", 6), "attention_bias": pick.random() < 0.3}
    return fields | {"hidden_act": pick.choice([*GATES, "gelu"]), "rope_parameters": rope(pick, fields)}


def gemma2(pick: random.Random) -> Fields:
    fields = gemma(pick) | {"query_pre_attn_scalar": pick.choice([4, 7]), "sliding_window": pick.choice([2, 5, 64])}
    fields |= {"hidden_activation": fields.pop("hidden_act")} | layer_types(pick, fields)
    return fields | {
        "attn_logit_softcapping": pick.choice([None, 0.7, 50.0]),
        "final_logit_softcapping": pick.choice([None, 1.5, 30.0]),
    }


def gemma3(pick: random.Random) -> Fields:
    fields = gemma2(pick)
    both = rope(pick, fields), rope(pick, fields)
    return fields | {"rope_parameters": dict(zip(("full_attention", "sliding_attention"), both, strict=True))}


MAKERS = {
    **{"llama": llama, "qwen2": lambda pick: qwen(pick, is_3=False), "qwen3": lambda pick: qwen(pick, is_3=True)},
    **{"mistral": mistral, "smollm3": smollm3, "phi3": phi3, "stablelm": stablelm, "gpt_neox": gpt_neox},
    **{"olmo2": olmo2, "mixtral": mixtral, "qwen2_moe": qwen2_moe},
    **{"gpt2": gpt2, "opt": opt, "bloom": bloom, "gemma": gemma, "gemma2": gemma2, "gemma3_text": gemma3},
}


def reference(config: PreTrainedConfig, directory: Path, seed: int) -> tuple[dict[str, np.ndarray], PreTrainedModel]:
    """What transformers makes of a config, in float64; the directory that it saves."""
    with double_precision():
        config._attn_implementation = config._experts_implementation = "eager"
        model = model_class(config)(config).double()
        for name, param in model.named_parameters():
            array = np.empty(tuple(param.shape))
            for stored, view in as_stored(model, name, array).items():
                view[...] = weight_of(stored, view.shape)
            param.data = torch.from_numpy(array)
        tokens = torch.from_numpy(tokens_of(config.vocab_size, seed))
        logits = model(tokens[:, :-1]).logits
        loss = mean_loss(model, tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        grads = all_as_stored(model, lambda param: param.grad)
    model.save_pretrained(directory)
    arrays = {"logits": chosen_rows(logits.detach().flatten(0, 1).numpy()), "loss": loss.detach().numpy()}
    return arrays | digest(grads), model


def all_as_stored(model: PreTrainedModel, get: Callable[[torch.Tensor], torch.Tensor | None]) -> dict[str, np.ndarray]:
    """What each parameter has, as the tensors of the files; noughts where it has nothing."""
    found: dict[str, np.ndarray] = {}
    for name, param in model.named_parameters():
        array = get(param)
        found |= as_stored(model, name, np.zeros(param.shape) if array is None else array.detach().numpy())
    return found


def older_spelling(raw: Fields) -> Fields:
    """The same facts with the keys that transformers 4 used."""
    found = dict(raw)
    inner = found.pop("rope_parameters", None)
    if isinstance(inner, dict) and "rope_theta" in inner:
        inner = dict(inner)
        theta_key, partial_key = (
            ("rotary_emb_base", "rotary_pct")
            if raw["model_type"] == "gpt_neox"
            else ("rope_theta", "partial_rotary_factor")
        )
        found[theta_key] = inner.pop("rope_theta")
        if "partial_rotary_factor" in inner:
            found[partial_key] = inner.pop("partial_rotary_factor")
        found["rope_scaling"] = None if inner.get("rope_type") == "default" else inner
    elif inner is not None:
        found["rope_parameters"] = inner
    return {**{key: value for key, value in found.items() if key != "dtype"}, "torch_dtype": "float32", "_extra_key": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """One random case: what is stored of it, what transformers makes of it, and what mpitp does. `reference` and
    `computed` raise ConfigError for a config that mpitp refuses.
    """

    facts: Fields
    reference: Callable[[], Arrays]
    computed: Callable[[Group], Arrays]


def make_case(number: int, kind: str, pick: random.Random, directory: Path) -> Case:
    """A random decoder, saved in `directory`."""
    fields = MAKERS[kind](pick)
    ranks = pick.choice([1, 2, 3])
    expected, model = reference(CONFIG_MAPPING[kind](**fields, **NO_IDS), directory, number)
    raw = json.loads((directory / "config.json").read_text())
    if pick.random() < 0.4:
        raw = older_spelling(raw)
        (directory / "config.json").write_text(json.dumps(raw))
    names = {name: list(array.shape) for name, array in all_as_stored(model, lambda param: param).items()}
    facts = {"config": raw, "ranks": ranks, "seed": number, "shapes": names}
    return Case(facts, lambda: expected, lambda group: computed(group, directory, number, names))


Maker = Callable[[int, str, random.Random, Path], Case]


def run_case(number: int, seed: int, kind: str, make: Maker) -> tuple[str, Fields]:
    """What became of one random case ("equal", "refused: ..." or what differs), and what is stored of it."""
    with tempfile.TemporaryDirectory() as folder:
        case = make(number, kind, random.Random(f"{seed}/{number}"), Path(folder) / "model")
        try:
            expected = case.reference()
            found = run_threads(case.facts["ranks"], case.computed)[0]
        except ConfigError as error:
            return f"refused: {str(error).rpartition('config.json: ')[2]}", case.facts
        worst = differences(found, expected)
    case.facts["expected"] = {name: [float(f"{x:.13g}") for x in value.flat] for name, value in expected.items()}
    case.facts["expected"]["logits"] = [list(map(float, row)) for row in np.char.mod("%.13g", expected["logits"])]
    return f"differs: {worst}" if worst else "equal", case.facts


def run(about: str, kinds: list[str], make: Maker, path: Path, a_type: int) -> int:
    """The command line of a script of random cases; `path`: where `a_type` of each type are stored. Its exit status."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=kinds, help="this type alone")
    parser.add_argument("--store", action="store_true", help=f"write {a_type} equal cases a type to {path.name}")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    chosen, counts, stored = [args.only] if args.only else kinds, collections.Counter(), []
    for number in range(args.cases):
        kind = chosen[number % len(chosen)]
        result, case = run_case(number, args.seed, kind, make)
        counts[result.partition(":")[0]] += 1
        if result.startswith("differs"):
            print(f"case {number}, {kind}, {case['ranks']} ranks: {result}\n  {json.dumps(case['config'])}", flush=True)
        elif result.startswith("refused"):
            counts[f"  {kind}: {result}"[:150]] += 1
        elif sum(other["config"]["model_type"] == kind for other in stored) < a_type:
            stored.append(case)
    print(*(f"{count:5} {what}" for what, count in sorted(counts.items())), sep="\n")
    if args.store:
        path.write_text(json.dumps(stored) + "\n")
        print(f"{path}: {len(stored)} cases, {path.stat().st_size / 1024:.0f} KiB")
    return 1 if counts["differs"] else 0


def main() -> int:
    exact_bloom_gelu()
    assert set(MAKERS) == set(MODEL_TYPES), "a type without random configs"
    return run(__doc__, list(MAKERS), make_case, CASES, STORED_A_TYPE)


if __name__ == "__main__":
    sys.exit(main())
