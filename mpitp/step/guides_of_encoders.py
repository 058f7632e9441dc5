"""The tour's sentences on what encoders, vision transformers and encoder-decoders have beside the layers of all."""

from __future__ import annotations

from mpitp.step.guide import Guide

_F, _B = "forward", "backward"
_GATHERED, _PATCHES = "gathered columns", "patch embedding"
_MEAN, _SOURCES = "class token and mean", "cross attention"
_CROSS, _TURN = "cross attention of each rank's heads", "from encoder to decoder"
_ELEMENTS_BACK = Guide(
    "backward",
    "The mirror of its forward pass, row by row: all ranks do the same.",
    "Without it what lies before would learn from a gradient of another size.",
)
_TABLE_BACK = Guide(
    "backward",
    "dy goes on to x and to the table's rows that were added; it is whole on every rank, so the copies stay alike.",
    "Were dy partial here, the copies of the table would drift apart.",
)
TO_ROWS = Guide(
    "tokens cut",
    "Each rank has some columns of all rows and needs all columns of its own rows: an all-to-all exchanges them.",
    "Gathered instead, every rank would hold all rows between the products, as without sequence parallelism.",
)

OWN: dict[tuple[str, str], Guide] = {  # a rank's own work, by what the layer is and the pass
    ("token types", _F): Guide(
        "vocabulary",
        "Each token gets the vector of its kind (first or second sentence); the table is small and on every rank.",
        "Without it a model of two sentences couldn't tell which of them a token is from.",
    ),
    ("token types", _B): _TABLE_BACK,
    (_GATHERED, _F): Guide(
        "linear",
        "The norm behind this product needs whole rows, so each rank's columns will be gathered.",
        "With a row cut instead there would be a sum; here there is no second product that would make it worth one.",
    ),
    (_GATHERED, _B): Guide(
        "backward",
        "dy is whole on every rank, and each takes the columns that it gave: the conjugate of a gather sends nothing.",
        "With a sum here each gradient would be counted once a rank.",
    ),
    ("columns to rows", _F): TO_ROWS,
    ("columns to rows", _B): TO_ROWS,
    (_PATCHES, _F): Guide(
        "linear",
        "A convolution without overlap is one product; its kernels, the columns of y, are dealt to the ranks.",
        "Uncut, every rank would multiply all kernels: little work, but the same on every rank.",
    ),
    (_PATCHES, _B): Guide(
        "backward",
        "Each rank takes its own columns of dy and makes the gradient of its own kernels; pixels need none.",
        "Without dW_r this rank's kernels would never learn.",
    ),
    ("class token and positions", _F): Guide(
        "block",
        "A row that is no patch is put in front: by attention it gathers what the image shows. Positions are added.",
        "Without positions the patches of an image could be shuffled and nobody would see it.",
    ),
    ("class token and positions", _B): _TABLE_BACK,
    ("OnFirstRows", _F): Guide(
        "block",
        "What is said of a whole text or image is read off its first row, which has seen all the others.",
        "Were all rows classified, there would be as many answers as tokens.",
    ),
    ("OnFirstRows", _B): Guide(
        "backward",
        "The first row alone was used: its gradient is dy, that of all others zero.",
        "Without the zeros rows that nobody has read would seem to matter.",
    ),
    (_MEAN, _F): Guide(
        "block",
        "The class token's row beside the mean of the patches' rows: both are read by the classifier.",
        "Without the mean the patches would be seen through the class token alone.",
    ),
    (_MEAN, _B): Guide(
        "backward",
        "Half of dy goes to the class token, the other half to each patch, divided by their number.",
        "Undivided, the patches of a large image would weigh more than those of a small one.",
    ),
    ("layer scale", _F): Guide(
        "block",
        "A learned factor for each column of a branch, small at first; every rank has all of them.",
        "Without it a deep model's branches would be as loud as what went past them from the start.",
    ),
    ("layer scale", _B): _ELEMENTS_BACK,
    ("scale", _F): Guide(
        "vocabulary",
        "A table that is both embedding and head serves two scales: this number brings one to the other.",
        "Without it logits would be so large that the softmax begins with certainty.",
    ),
    ("scale", _B): _ELEMENTS_BACK,
    ("sinusoidal positions", _F): Guide(
        "vocabulary",
        "Each row gets sines and cosines of its position: nothing is learned, and every rank can compute them.",
        "Without positions attention couldn't tell the order of the tokens.",
    ),
    ("sinusoidal positions", _B): Guide(
        "backward",
        "Something was added that isn't trained: dy goes through as it is.",
        "With anything else here what lies before would get another gradient.",
    ),
    ("logits bias", _F): Guide(
        "vocabulary",
        "A constant for each token, cut like the vocabulary: each rank adds to its own logits.",
        "Without it the texts of the models that carry one would be other texts.",
    ),
    ("logits bias", _B): Guide(
        "backward",
        "The constants aren't trained: dy goes through as it is.",
        "With a gradient here an optimizer would move what the reference holds still.",
    ),
    (_TURN, _F): Guide(
        "block",
        "The encoder's output becomes the memory, which every block of the decoder reads; that begins with ids.",
        "Without the memory the decoder would write without knowing what about.",
    ),
    (_TURN, _B): Guide(
        "backward",
        "Every block of the decoder has read the memory, so its gradient is the sum of what they have left.",
        "With the last block's part alone the encoder would learn for that block only.",
    ),
    (_SOURCES, _F): Guide(
        "context",
        "The source is cut over cp as the target is: each rank has made k and v of its own rows of the memory.",
        "Were every rank to make k and v of the whole source, the memory would have to be on all of them.",
    ),
    (_SOURCES, _B): Guide(
        "context",
        "The queries here have seen the keys of all ranks: what they leave for those is a summand for each of them.",
        "With its own queries' part alone a row of the memory would learn from a piece of the target only.",
    ),
    (_CROSS, _F): Guide(
        "attention",
        "A head's queries come from the target, its keys and values from the source; heads are dealt as ever.",
        "If the cut ran through a head, every score would be a partial sum and have to be summed before the softmax.",
    ),
    (_CROSS, _B): Guide(
        "attention",
        "The softmax is made again; dq goes to the decoder, dk and dv by way of the memory to the encoder.",
        "Without dk and dv the encoder would never learn from what the decoder gets wrong.",
    ),
}
_COLUMNS = Guide(
    "linear",
    "Each rank has made some columns of every row, and what comes next needs whole rows: columns lie side by side.",
    "Without it a norm would take the mean of a part of the row.",
)
SUMS: dict[tuple[str, str], Guide] = {  # a collective, by the layer's kind and the pass
    **dict.fromkeys(((_GATHERED, _F), (_PATCHES, _F)), _COLUMNS),
    (_SOURCES, _F): Guide(
        "context",
        "A query sees the whole source, so k and v of all ranks of cp come together, in the order of the source.",
        "Without it each query would read a piece of the source, and its softmax leave the others out.",
    ),
    (_SOURCES, _B): Guide(
        "context",
        "dk and dv of each row are summed over the ranks whose queries saw it, and go home: the gather's conjugate.",
        "Without the sum the encoder would learn from the queries of one rank.",
    ),
    (_MEAN, _F): Guide(
        "block",
        "Each rank has some of an image's rows: their parts of the mean are added where the class is told.",
        "Without it the mean would be that of a piece of the image.",
    ),
}
