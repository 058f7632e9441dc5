"""What is nearest to a model type that isn't supported, and in what it differs: for the message that refuses it."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_TURNED_PAIRS = "RoPE turns neighbouring columns, not halves"
_ONE_KV_HEAD = "q, k and v are fused in another way"

# type: (the nearest of the decoders, what it has that this one hasn't)
NEAREST: dict[str, tuple[str, str]] = {
    "minimax": ("mixtral", "some blocks have linear attention"),
    **dict.fromkeys(
        ("dbrx", "jetmoe", "phimoe", "granitemoe"), ("mixtral", "experts and norms are made in another way")
    ),
    "qwen3_moe": ("qwen2_moe", "q and k are normalised head by head, and no expert is shared"),
    "gpt_oss": ("mixtral", "experts have biases, and attention has sinks"),
    "olmoe": ("mixtral", "q and k are normalised over all heads together"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("qwen2_moe", "keys and values are compressed")),
    **dict.fromkeys(
        ("llama4", "llama4_text"), ("mixtral", "scores multiply what goes into experts, and attention runs in chunks")
    ),
    "olmo": ("llama", "its norms have no weights"),
    "olmo3": ("olmo2", "most of its blocks see a window, and turn by a RoPE of their own"),
    **dict.fromkeys(("ministral", "ministral3"), ("mistral", "its blocks see windows of different lengths")),
    "granite": ("llama", "embeddings, scores, branches and logits have factors of their own"),
    **dict.fromkeys(
        ("cohere", "cohere2"), ("stablelm", f"{_TURNED_PAIRS}, its norms have no biases, and logits have a factor")
    ),
    **dict.fromkeys(("glm", "glm4"), ("phi3", f"{_TURNED_PAIRS}, and glm4 has norms behind its branches")),
    "nemotron": ("stablelm", "its MLP is relu squared without a gate, its norms have an offset"),
    "starcoder2": ("gpt_neox", "its heads share keys and values, and its branches follow one another"),
    "phi": ("gpt_neox", "both branches read one norm, and the head has a bias"),
    "persimmon": ("gpt_neox", "q and k have LayerNorms, and the MLP is relu squared"),
    "codegen": ("gpt_neox", _TURNED_PAIRS),
    "gptj": ("gpt_neox", f"{_TURNED_PAIRS}, both branches read one norm, and the head has a bias"),
    "falcon": ("gpt_neox", f"{_ONE_KV_HEAD}, and it comes with ALiBi or one norm too"),
    "mpt": ("bloom", f"{_ONE_KV_HEAD}, and its layers have no biases"),
    "gpt_bigcode": ("gpt2", "all heads share one key and value"),
    "gpt_neo": ("gpt2", "every second block sees a window, and scores aren't scaled"),
    "openai-gpt": ("gpt2", "its norms stand behind the residual branches"),
    "xglm": ("opt", "its positions are sines"),
    **dict.fromkeys(("internlm2", "baichuan"), ("llama", "q, k and v are fused in the file in its own way")),
    "gemma3": ("gemma3_text", "it has an image tower; its text model is a directory of its own, of type gemma3_text"),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), ("gemma3_text", "embeddings of each block's own, and more")),
    **dict.fromkeys(("qwen3_next", "bamba", "falcon_h1", "zamba2", "jamba"), ("llama", "some blocks are recurrent")),
}
_SAME = "only the name is another"
# the same for types of the other kinds
NEAREST_OTHERS: dict[str, tuple[str, str]] = {
    "electra": ("bert", "embeddings may be narrower than blocks, and the head finds replaced tokens"),
    "albert": ("bert", "all blocks share their weights, and embeddings are narrower"),
    **dict.fromkeys(("deberta", "deberta-v2", "mpnet"), ("bert", "scores depend on the distance of tokens")),
    "modernbert": ("bert", "it has RoPE, windows and gated MLPs"),
    **dict.fromkeys(("xlm-roberta", "camembert"), ("roberta", _SAME)),
    "deit": ("vit", "a token for distillation stands behind the class token"),
    "beit": ("vit", "scores depend on the distance of patches"),
    "swin": ("vit", "attention runs in shifted windows"),
    "clip_vision_model": ("vit", "a norm stands before the blocks"),
    "siglip_vision_model": ("vit", "there is no class token, and the pooler attends"),
    "dinov2_with_registers": ("dinov2", "tokens that stand for no patch come behind the class token"),
    "dinov3_vit": ("dinov2", "positions are RoPE's, and tokens that stand for no patch come behind the class token"),
    "mt5": ("t5", _SAME),
    "mbart": ("bart", "norms stand in front of the branches"),
    **dict.fromkeys(("pegasus", "m2m_100"), ("marian", "norms stand in front of the branches")),
}
TAKEN = {  # other kinds that are supported: what each is, and what takes it
    **dict.fromkeys(
        ("bert", "roberta", "distilbert"), "an encoder: mpitp embed, classify, eval, verify, step and train take it"
    ),
    **dict.fromkeys(
        ("t5", "bart", "marian"), "an encoder with a decoder: mpitp generate, eval, verify, step and train take it"
    ),
    **dict.fromkeys(("vit", "dinov2"), "a vision transformer: mpitp classify, eval, verify, step and train take it"),
}
NO_DECODERS = {
    **TAKEN,
    **dict.fromkeys(("mamba", "mamba2", "rwkv", "xlstm"), "a recurrent model, without attention"),
    **dict.fromkeys(("clip", "siglip"), "a model of images"),
}


def what_it_is(model_type: object) -> str:
    """What a message adds that refuses a model of another kind; "" for one of which nothing is known."""
    if not isinstance(model_type, str):
        return ""
    return f"; it is {TAKEN[model_type]}" if model_type in TAKEN else _nearest(model_type)


def _nearest(model_type: str) -> str:
    """The nearest type of any kind, and what differs; "" for nothing known."""
    near, difference = (NEAREST | NEAREST_OTHERS).get(model_type, ("", ""))
    return f"; the nearest is {near!r}, but here {difference}" if near else ""


def advice(model_type: object, supported: Collection[str]) -> str:
    """What the message adds behind the supported types: the nearest one and what differs; "" for nothing known."""
    if not isinstance(model_type, str):
        return "; it is what the file must say first"
    if known := _nearest(model_type):
        return known
    if model_type in NO_DECODERS:
        return f"; it is {NO_DECODERS[model_type]}"
    close = difflib.get_close_matches(model_type[:80].lower().replace("-", "_"), supported, n=1, cutoff=0.7)
    own = "; one of your own is registered by register_model or an entry point of the group mpitp.models"
    return f"; was {close[0]!r} meant?" if close else own
