"""What a guide of the tour is, and the examples that its chapters lead to."""

from __future__ import annotations

from dataclasses import dataclass

EXAMPLES = {  # a chapter: the scripts of examples/ that teach it
    "linear": ("01_four_ways_to_cut_a_product.py", "02_column_then_row.py"),
    "attention": ("04_attention_by_heads.py",),
    "vocabulary": ("05_the_vocabulary.py",),
    "block": ("06_a_whole_block.py",),
    "backward": ("03_backward_is_the_conjugate.py",),
    "optimizer": ("07_train_on_real_text.py", "13_data_parallel_and_zero.py"),
    "pipeline": ("15_a_pipeline_and_its_bubble.py",),
    "context": ("16_ring_attention.py",),
    "replicas": ("13_data_parallel_and_zero.py",),
    "experts": ("17_experts_and_all_to_all.py",),
    "tokens cut": ("14_sequence_parallel.py",),
}


@dataclass(frozen=True, slots=True)
class Guide:
    """Of one operation: a chapter of `EXAMPLES`, and two sentences."""

    chapter: str
    why: str
    without: str

    @property
    def examples(self) -> tuple[str, ...]:
        """The scripts that teach it."""
        return EXAMPLES[self.chapter]
