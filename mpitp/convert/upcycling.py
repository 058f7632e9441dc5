"""A mixture of experts from a dense model: sparse upcycling (Komatsuzaki et al. 2023).

Every expert begins as the dense MLP, and a router with small random weights beside them. Scores add up to 1, so the
mixture computes what the dense model does, whatever the router chooses, until training makes the experts differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitp.checkpoint.hf import Documents, save_model
from mpitp.checkpoint.hf_directory import read_config, read_generation_config
from mpitp.checkpoint.load import load_config, load_model
from mpitp.comm.serial import SerialGroup
from mpitp.convert.documents import beside
from mpitp.errors import ConfigError
from mpitp.layers.init import init_params
from mpitp.layers.site import make_site
from mpitp.models import CausalLM, DecoderConfig, build_model, config_from_hf

# Without biases these are a Mixtral but for their MLPs; and the positions of each where the file names none.
DENSE = {"llama": 2048, "mistral": 131072}


def upcycle(
    source: str | Path,
    directory: str | Path,
    num_experts: int,
    top_k: int = 2,
    *,
    dtype: str = "float32",
    seed: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write `directory`, a Mixtral of `num_experts` copies of the MLPs of `source`; its config. Both are in memory.

    Raises ConfigError for a model that no Mixtral can be, and for more experts a token than there are.
    """
    dense_config = load_config(source)
    _refuse_others(dense_config)
    raw = mixtral_config(dense_config, read_config(source), num_experts, top_k)
    config = config_from_hf(raw)
    _check_alike(dense_config, config)
    dense, site = load_model(source, make_site(SerialGroup())), make_site(SerialGroup())
    mixture = build_model(config, site)
    _fill(mixture, dense, seed)
    documents = Documents(raw, read_generation_config(source) or None, beside(Path(source)))
    save_model(mixture, directory, SerialGroup(), documents, save_dtype=dtype, overwrite=overwrite)
    return raw


def mixtral_config(dense: DecoderConfig, raw: Mapping[str, Any], num_experts: int, top_k: int) -> dict[str, Any]:
    """The config.json of the mixture: the dense one's, with all that a Mixtral's defaults would make other."""
    rope = raw.get("rope_parameters")
    theta = {"rope_parameters": {**rope, "rope_theta": dense.rope_theta}} if rope else {"rope_theta": dense.rope_theta}
    return {
        **{key: value for key, value in raw.items() if key not in ("architectures", "attention_bias", "mlp_bias")},
        **theta,
        "model_type": "mixtral",
        "num_key_value_heads": dense.kv_heads,
        "head_dim": dense.head_dim,
        "max_position_embeddings": raw.get("max_position_embeddings") or DENSE[dense.model_type],
        "rms_norm_eps": dense.norm_eps,
        "sliding_window": max(dense.traits.windows, default=0) or None,
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.001,
    }


def _refuse_others(config: DecoderConfig) -> None:
    if config.model_type not in DENSE or config.grouping is not None:
        what = "its weights are rounded" if config.grouping is not None else f"its model_type is {config.model_type!r}"
        raise ConfigError(f"only a {' or a '.join(DENSE)} in floats can be upcycled to a mixtral: {what}")
    if config.qkv_bias or config.out_bias or config.mlp_bias:
        raise ConfigError("a mixtral has no biases, and this model has some: it can't be upcycled")


def _check_alike(dense: DecoderConfig, mixture: DecoderConfig) -> None:
    """But for the experts the two must be read as the same model."""
    traits = replace(mixture.traits, mixture=None)
    like = replace(mixture, model_type=dense.model_type, traits=traits, eos_ids=dense.eos_ids, bos_id=dense.bos_id)
    assert like == dense, f"a mixtral's config doesn't say the same: {like}, {dense}"


def _fill(mixture: CausalLM, dense: CausalLM, seed: int) -> None:
    """Experts are copies of the MLP, routers random, all else the dense model's."""
    theirs = {name: param.data for name, param in dense.named_params()}
    for name, param in mixture.named_params():
        if ".mlp.router." in name:
            init_params([(name, param)], seed)
        elif ".mlp.experts." in name:
            param.data[...] = theirs[name.replace(".experts.", ".") + ".weight"]
        else:
            param.data[...] = theirs[name]
