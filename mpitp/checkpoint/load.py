"""From a wish to a model on a site: a Hugging Face directory, some of its blocks, or fresh weights from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mpitp.checkpoint.hf import load_params
from mpitp.checkpoint.hf_directory import read_config, read_generation_config
from mpitp.comm.agreement import folder_facts
from mpitp.errors import ConfigError
from mpitp.layers.gathered import deal_weights
from mpitp.layers.init import init_params
from mpitp.layers.site import Site
from mpitp.models import CausalLM, DecoderConfig, abstract_model, build_model, config_from_hf
from mpitp.models.ends import GENERATION_CONFIG, check_bos, ids_of, with_ends
from mpitp.models.kinds import is_encoder, is_encoder_decoder, is_vision
from mpitp.models.registry import check_site, recompute_blocks, tensor_names
from mpitp.models.stages import Cutting


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be made on any site: from `directory`, or fresh from `seed` where that is None.

    `config` is the whole model's; `blocks`: only these of its blocks (None: all), with embedding, final norm and head.
    `cutting`: into the stages of a mesh that has several. `deals_weights`: to the ranks of the axes of data.
    `recompute`: which blocks forget (`layers/recompute.py`).
    """

    config: DecoderConfig
    directory: Path | None = None
    seed: int = 0
    blocks: range | None = None
    cutting: Cutting = Cutting()
    deals_weights: bool = False
    recompute: str = "none"

    @property
    def chosen_blocks(self) -> range:
        """The blocks of the whole model that this one has."""
        return range(self.config.num_layers) if self.blocks is None else self.blocks

    @property
    def made_config(self) -> DecoderConfig:
        """The config of the model that is made."""
        return self.config.of_blocks(self.chosen_blocks)

    def abstract(self, site: Site, num_layers: int | None = None) -> CausalLM:
        """The model, or one of so many of its blocks, on a site without memory."""
        config = self.made_config if num_layers is None else replace(self.config, num_layers=num_layers)
        return abstract_model(config, site)

    def check(self, site: Site) -> None:
        """Raise ConfigError where the model can't be cut into the stages of such a site. Nothing is allocated."""
        check_site(self.made_config, site)
        abstract_model(self.made_config, site, self.cutting)

    def make(self, site: Site) -> CausalLM:
        """The model on `site`, a collective over its ranks."""
        model = recompute_blocks(build_model(self.made_config, site, self.cutting), self.recompute)
        if self.deals_weights:
            deal_weights(model.layers, site.mesh)
        if self.directory is None:
            init_params(model.named_params(), self.seed)
            return model
        if self.blocks is None:
            return _loaded(model, self.directory)
        return _with_blocks(model, self.directory, self.blocks, self.config)


HEAD_TENSORS = ("lm_head.weight", "embed_out.weight")
AGREED_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")  # weights, configs and tokenizers


def load_config(directory: str | Path) -> DecoderConfig:
    """The config of a Hugging Face directory; the end-of-text ids of generation_config.json count beside those of
    config.json. What is to be told about it: `mpitp.models.ends.notices_of`.
    """
    raw = read_config(directory)
    generation = read_generation_config(directory)
    if is_vision(raw):
        raise ConfigError(
            f"{directory} holds a vision transformer (model_type {raw['model_type']!r}), and this needs a model that "
            "continues text; mpitp classify, eval images, verify and step take such, and train with [task] kind = "
            '"image"'
        )
    if is_encoder(raw):
        raise ConfigError(
            f"{directory} holds an encoder (model_type {raw['model_type']!r}), and this needs a model that continues "
            "text; mpitp embed, eval labels, words or masked, verify and step take encoders, and train with [task] "
            'kind = "classification", "token-classification" or "masked"'
        )
    if is_encoder_decoder(raw):
        raise ConfigError(
            f"{directory} holds an encoder with a decoder (model_type {raw['model_type']!r}), and this needs a model "
            "that continues text; mpitp generate, eval pairs, verify and step take such, and train with [task] kind = "
            '"translation"'
        )
    try:
        config = config_from_hf(raw)
        check_bos(GENERATION_CONFIG, generation.get("bos_token_id"), config)
        return with_ends(config, GENERATION_CONFIG, ids_of(GENERATION_CONFIG, generation.get("eos_token_id")))
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error


def model_facts(label: str, directory: str | Path | None) -> dict[str, str]:
    """What a model's directory holds, for the comparison between ranks (`comm.agreement`); None: there is none."""
    return folder_facts(label, None if directory is None else Path(directory), AGREED_FILES)


def load_model(
    directory: str | Path, site: Site, *, config: DecoderConfig | None = None, in_place: bool = False
) -> CausalLM:
    """The directory's model with its weights; each rank of the site reads only the slices it holds. in_place: what can
    stay in the files does (`in_place.py`), for a model that is read alone and not for long.

    `config` replaces `load_config(directory)`, for other dropout rates. Raises ConfigError for a model that isn't
    supported, FileError for a directory that is incomplete or contradictory.
    """
    return _loaded(build_model(config or load_config(directory), site), Path(directory), in_place=in_place)


def _loaded(model: CausalLM, directory: Path, *, in_place: bool = False) -> CausalLM:
    """The model with the weights of the directory."""
    load_params(model, directory, model.ignorable_tensors, _copies(model, model.config), in_place=in_place)
    return model


def _with_blocks(model: CausalLM, directory: Path, blocks: range, whole: DecoderConfig) -> CausalLM:
    """The model, made of as many blocks, with the weights of these blocks of the directory's whole one."""
    pieces = tensor_names(whole)
    for name, part in list(model.pieces):
        model.pieces[name, part] = pieces[_renumbered(name, blocks.start), part]
    load_params(model, directory, ("*",), _copies(model, whole))
    return model


def _copies(model: CausalLM, config: DecoderConfig) -> dict[str, str]:
    """The tensors that a head may be stored as: a tied one beside the embedding or in its place, another under a name
    of other versions.
    """
    of = model.hf_pieces()["embedding.weight" if config.tied else "head.weight", "vocab"].tensor
    return {name: of for name in HEAD_TENSORS if name != of}


def _renumbered(name: str, offset: int) -> str:
    """The name of a parameter with `offset` added to the number of its block."""
    words = name.split(".")
    if words[0] == "blocks":
        words[1] = str(int(words[1]) + offset)
    return ".".join(words)
