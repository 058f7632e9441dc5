"""The config of a model of any kind."""

from mpitp.models.config import DecoderConfig
from mpitp.models.encoder_config import EncoderConfig
from mpitp.models.encoder_decoder_config import EncoderDecoderConfig
from mpitp.models.vision_config import VisionConfig

AnyConfig = DecoderConfig | EncoderConfig | EncoderDecoderConfig | VisionConfig
