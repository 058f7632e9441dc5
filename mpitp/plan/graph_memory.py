"""An encoder's output, the memory, in an operator graph: where it is made, and who reads it.

encoder -> "to decoder", whose output the memory is -> kv of every block's cross attention in the same chunk
                                                    -> a message to the next chunk of the decoder, and so on
backward: each of them gives a gradient of it; they are added where it came from, and go back beside dx
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mpitp.layers.cross_attention import CrossAttention
from mpitp.layers.crossing import ToDecoder
from mpitp.layers.layer import Layer, TypedLayer, walk
from mpitp.models.beside import gives_memory
from mpitp.models.stages import TO_DECODER, Chunk
from mpitp.plan.nodes import Tensor
from mpitp.plan.operations import ELEMENTWISE, Cost

INPUT = "the input"


def with_memory(types: Mapping[str, TypedLayer]) -> dict[str, TypedLayer]:
    """The types with edges as arrays go: the turn to the decoder gives the memory, of which keys and values are made,
    and the decoder's embedding takes ids of its own.
    """
    found = dict(types)
    for name, typed in types.items():
        if isinstance(typed.layer, ToDecoder):
            found[name] = replace(typed, outgoing=typed.incoming.of_layer(name))
        elif isinstance(typed.layer, CrossAttention):
            kv = types[f"{name}.kv"]
            found[f"{name}.kv"] = replace(kv, incoming=kv.incoming.of_layer(TO_DECODER))
        elif typed.incoming.made_by == TO_DECODER:
            found[name] = replace(typed, incoming=typed.incoming.of_layer(INPUT))
    return found


def memory_cost(chunk: Chunk, layers: Iterable[Layer], memory: Tensor) -> Cost:
    """Of the sums of the memory's gradients in a chunk with these layers: two are read, one written, each time."""
    readers = sum(isinstance(layer, CrossAttention) for _, layer in walk({str(i): x for i, x in enumerate(layers)}))
    sums = max(readers + gives_memory(chunk) - 1, 0)
    return Cost(ELEMENTWISE, moved=(0, 3 * sums * memory.num_bytes))
